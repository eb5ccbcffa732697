"""Recommends a method, a model and a codec for a user's samples.

``recordings`` reads the samples, ``advise`` runs a short comparison on them, ``candidates`` says what came out, and
``advice`` decides from it. ``model_trial`` tries models before a fleet is made. ``simple_baselines`` says what is
possible without the fleet's models.
"""
