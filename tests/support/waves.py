"""Series that differ in frequency, not in shape: three frequencies, each window with a random phase."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet_core.data.samples import Samples, save

CLASSES = ("idle", "worn", "broken")


def waves(
    count: int, seed: int, length: int = 64, mixed_up: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """x [count, 1, length], y [count]. mixed_up: labels unrelated to the samples."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(count) % 3)
    turns, phase = np.array([5.0, 9.0, 14.0])[y], rng.uniform(0, 2 * np.pi, count)
    x = np.sin(2 * np.pi * turns[:, None] * np.arange(length) / length + phase[:, None])
    x += rng.normal(size=x.shape) / 2
    return x[:, None].astype(np.float32), rng.permutation(y) if mixed_up else y


def write_waves(path: Path, clients: int = 6, rows: int = 48, mixed_up: bool = False) -> Path:
    """Write ``rows`` such windows of each client to a file."""
    x, y = waves(clients * rows, seed=0, mixed_up=mixed_up)
    client = np.repeat(np.array([f"pump-{k}" for k in range(clients)], dtype=np.str_), rows)
    save(path, Samples(x, y, client, np.tile(np.arange(rows) * 1.28, clients), CLASSES))
    return path
