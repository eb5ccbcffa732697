"""Training with torch: models, losses, gradients, gradient estimators, and the loop of local training.

On devices only ``torch.autograd.grad`` and ``torch.func.functional_call`` are used: a ``torch.optim`` object or a
``torch.func`` transform costs more memory than the models trained here.
"""
