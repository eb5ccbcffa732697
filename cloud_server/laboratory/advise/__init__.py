"""Recommends a method, a model and a codec for a user's samples.

``recordings`` reads the samples, ``short_comparison`` runs methods and models on them, ``candidates`` says what came
out, and ``recommendation`` decides from it. ``model_trial`` tries models before a fleet is made. ``simple_baselines``
says what is possible without the fleet's models.
"""
