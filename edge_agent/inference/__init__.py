"""Answers from samples, and how a device personalizes the model that answers. No torch.

``device_api`` is the device in Python. ``service`` answers and switches models. ``personalizers`` decides how to
personalize, ``personalization`` makes, stores and opens a personalization, ``predictor`` computes probabilities.
``stored_models`` opens the models in the slots. ``mixed_plans`` weighs several ways to personalize. ``relearn``
personalizes again and learns new samples while the device answers. ``worse_model_check`` refuses a model that does
worse on the device's held-back samples. ``drift`` notices that what the device answers has moved. ``bundle_check``
checks a bundle. ``embedded_support`` caches embedded samples.
"""
