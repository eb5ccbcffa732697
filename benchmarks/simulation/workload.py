"""The workload of the simulation benchmark: plain SGD steps on a few clients, and nothing but training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

CLASSES, LR = 10, 0.01

Data = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Workload:
    """``clients`` take ``local_steps`` SGD steps of ``batch`` samples per round, from shuffled passes over their own
    ``samples``. pairs: rounds timed against the hand-written loop. rounds: against Flower. least: if not 0, the first
    client has this many samples, the last ``samples``, and sizes grow by a constant factor between them."""

    model: str
    shape: tuple[int, ...]
    clients: int
    batch: int
    local_steps: int
    samples: int
    pairs: int
    rounds: int
    least: int = 0

    def size(self, client: int) -> int:
        if not self.least:
            return self.samples
        return round(self.least * (self.samples / self.least) ** (client / (self.clients - 1)))

    def data(self, client: int) -> Data:
        """A client's x float32 [size, *shape] and y int64 [size]."""
        rng, size = np.random.default_rng(client), self.size(client)
        x = rng.normal(size=(size, *self.shape)).astype(np.float32)
        return x, rng.integers(0, CLASSES, size)


WORKLOADS = {
    "lenet, 1 step": Workload("lenet", (1, 32, 32), 8, 32, 1, 64, pairs=20, rounds=10),
    "lenet, 10 steps": Workload("lenet", (1, 32, 32), 8, 32, 10, 320, pairs=4, rounds=4),
    "mlp, 1 step": Workload("mlp", (784,), 10, 40, 1, 400, pairs=200, rounds=40),
    "mlp, 10 steps": Workload("mlp", (784,), 10, 40, 10, 400, pairs=60, rounds=40),
    "mlp, uneven": Workload("mlp", (60,), 100, 20, 20, 4000, pairs=20, rounds=10, least=40),
}
"""LeNet of Acar et al. (794,762 parameters), as in ``benchmarks/overhead``; 784-80-60 of Fallah et al.; and a hundred
uneven devices with 60-80-60, with the inputs and number of Dinh et al.'s Synthetic."""
