"""Training with torch.

``architectures`` has the named models and ``models`` builds them, with ``adapters``. ``local_training`` is the loop of
a round, ``gradient_estimators`` and ``gradients`` compute the gradients of its steps, ``losses`` and ``gaussian_loss``
the losses. ``personal_model`` makes a device's own model, ``torch_augment`` augments images, ``layer_flops`` counts
operations.

On devices only ``torch.autograd.grad`` and ``torch.func.functional_call`` are used: a ``torch.optim`` object or a
``torch.func`` transform costs more memory than the models trained here.
"""
