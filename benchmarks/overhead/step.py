"""The training step of floor and peers; only the processes of devices import this module, because it loads torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fleet_core.learning import losses, models
from fleet_core.model.layout import InputSpec

BATCH, CLIENT_LR = 32, 0.01


class Step:
    """One device's model and its one batch."""

    def __init__(self, device: int):
        torch.set_num_threads(1)
        layout = models.describe("lenet", InputSpec((1, 32, 32)), tuple(map(str, range(10))), {})
        self._network = models.build(layout)
        self._parameters = [p for _, p in self._network.core.named_parameters()]
        rng = np.random.default_rng(device)
        self._x = torch.tensor(rng.normal(size=(BATCH, 1, 32, 32)).astype(np.float32))
        self._y = torch.tensor(rng.integers(0, 10, BATCH))

    def take(self, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Flat float32 weights after one step of gradient descent from flat float32 ``weights``."""
        flat = torch.tensor(weights)
        with torch.no_grad():
            for parameter, part in zip(
                self._parameters, flat.split([p.numel() for p in self._parameters]), strict=True
            ):
                parameter.copy_(part.view_as(parameter))
        losses.cross_entropy(self._network(self._x), self._y).backward()
        with torch.no_grad():
            for parameter in self._parameters:
                assert parameter.grad is not None
                parameter.sub_(CLIENT_LR * parameter.grad)
                parameter.grad = None
        return torch.cat([p.detach().flatten() for p in self._parameters]).numpy()
