"""What every side of the simulation benchmark does: plain SGD steps on a few clients, and nothing but training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

CLASSES, LR = 10, 0.01

Data = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Workload:
    """``clients`` take ``local_steps`` SGD steps of ``batch`` samples a round, from shuffled passes over their own
    ``samples``. pairs: rounds that are timed beside the hand-written loop; rounds: beside Flower."""

    model: str
    shape: tuple[int, ...]
    clients: int
    batch: int
    local_steps: int
    samples: int
    pairs: int
    rounds: int

    def data(self, client: int) -> Data:
        """A client's x float32 [samples, *shape] and y int64 [samples]."""
        rng = np.random.default_rng(client)
        x = rng.normal(size=(self.samples, *self.shape)).astype(np.float32)
        return x, rng.integers(0, CLASSES, self.samples)


WORKLOADS = {
    "lenet, 1 step": Workload("lenet", (1, 32, 32), 8, 32, 1, 64, pairs=20, rounds=10),
    "lenet, 10 steps": Workload("lenet", (1, 32, 32), 8, 32, 10, 320, pairs=4, rounds=4),
    "mlp, 1 step": Workload("mlp", (784,), 10, 40, 1, 400, pairs=200, rounds=40),
    "mlp, 10 steps": Workload("mlp", (784,), 10, 40, 10, 400, pairs=60, rounds=40),
}
"""LeNet of Acar et al. (794,762 parameters), as in ``benchmarks/overhead``; 784-80-60 of Fallah et al."""
