"""Training with torch.

``architectures`` has the named models and ``models`` builds them, with ``adapters``. ``local_training`` is the loop of
a round, ``gradient_estimators`` and ``gradients`` are what a step takes, ``losses`` and ``gaussian_loss`` what it
minimizes. ``personal_model`` makes a device's own model, ``torch_augment`` changes images, ``layer_flops`` counts.

On devices only ``torch.autograd.grad`` and ``torch.func.functional_call`` are used: a ``torch.optim`` object or a
``torch.func`` transform costs more memory than the models trained here.
"""
