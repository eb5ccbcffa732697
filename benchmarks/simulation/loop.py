"""The hand-written loop: the same steps on plain PyTorch modules, without any federation.

One model takes the steps of all clients, one client after the other: nothing is sent, reset, averaged or kept.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.simulation.workload import CLASSES, LR, Workload
from fleet_core.board import allocator


def lenet(shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(shape[0], 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, CLASSES),
    )


def mlp(shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 80), nn.ReLU(), nn.Linear(80, 60), nn.ReLU(), nn.Linear(60, CLASSES))


MODELS = {"lenet": lenet, "mlp": mlp}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, batch: int, local_steps: int
) -> None:
    """``local_steps`` steps of ``batch`` samples, in shuffled passes."""
    passes = (rows for _ in itertools.count() for rows in torch.randperm(len(y)).split(batch))
    for rows in itertools.islice(passes, local_steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


def serve(workload: Workload, kept: bool, pipe: Any) -> None:
    """Runs one round of all clients at each message, and answers with (wall-clock seconds, CPU seconds). kept: with the
    laboratory's allocator settings instead of PyTorch's defaults."""
    torch.set_num_threads(1)
    if kept:
        allocator.keep_freed()
    model = MODELS[workload.model](workload.shape)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    data = [tuple(map(torch.tensor, workload.data(k))) for k in range(workload.clients)]
    while pipe.recv():
        started = time.perf_counter(), time.process_time()
        for x, y in data:
            train(model, optimizer, x, y, workload.batch, workload.local_steps)
        pipe.send((time.perf_counter() - started[0], time.process_time() - started[1]))
