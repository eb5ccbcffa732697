"""Recommends a method, a model and a codec for a user's samples.

``recordings`` reads the samples, ``short_comparison`` runs methods and models on them, ``candidates`` collects their
figures, and ``recommendation`` chooses among them. ``model_trial`` tries models before a fleet is made.
``simple_baselines`` measures simple classifiers on the same samples, ``task_baselines`` plain answers
of the tasks without classes.
"""
