"""Compares runs, and recommends a method, model and codec.

``finished_runs`` reads runs, ``comparison`` computes, ``tables``, ``comparison_charts`` and ``html_page`` show,
``files`` writes. ``advise`` runs a short comparison on a user's samples, which ``recordings`` reads, ``candidates``
says what came out, and ``advice`` decides from it. ``model_trial`` tries models before a fleet is made.
``simple_baselines`` says what is possible without the fleet's models.
"""
