"""Runs side by side, and advice from them.

``finished_runs`` reads runs, ``comparison`` computes, ``tables``, ``plots`` and ``html_page`` show. ``advise`` runs a
short comparison on one's own samples, ``model_trial`` tries models before a fleet is made.
"""
