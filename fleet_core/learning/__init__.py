"""Models, losses, gradient estimators and the one client loop: the home of torch.

Only ``torch.autograd.grad`` and ``torch.func.functional_call`` are used: a ``torch.optim`` object or a ``torch.func``
transform each cost a device more memory than the models trained here.
"""
