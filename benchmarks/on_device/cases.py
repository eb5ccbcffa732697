"""The four models whose cost and parity are measured, with constructed samples: times depend only on shapes.

Samples of a class are its pattern with noise, so that gradient steps have a direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from export.graph import export_graph, samples
from fleet_core.learning import models
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import InputSpec, Layout

Array = np.ndarray[Any, Any]

CLASSES = tuple("abcdefghij")
SUPPORT, STEPS, LR = 50, 10, 0.01
"""Samples to personalize on, full-batch steps, and their rate: that of Per-FedAvg."""
NOISE = 0.5


@dataclass(frozen=True)
class Case:
    """A model by its name in ``fleet_core.learning.models``, and its input."""

    name: str
    model: str
    input: InputSpec
    options: Mapping[str, Any] = field(default_factory=dict)

    def layout(self) -> Layout:
        return models.describe(self.model, self.input, CLASSES, dict(self.options))


def _image(*shape: int) -> InputSpec:
    return InputSpec(shape, "uint8", 1 / 255, (0.5,) * shape[0], (0.5,) * shape[0])


CASES = {
    case.name: case
    for case in (
        Case("MLP", "mlp", _image(1, 28, 28)),
        Case("1-D CNN", "cnn1d", InputSpec((9, 128))),
        Case("LeNet", "lenet", _image(3, 32, 32)),
        Case("Conv-4", "conv4", _image(1, 28, 28)),
    )
}


def plain(layout: Layout) -> Graph:
    """The graphs from samples to outputs, without steps."""
    return export_graph(layout, kinds=("embed", "predict"))


def drawn(layout: Layout, number: int, seed: int) -> tuple[Array, Array]:
    """``number`` raw samples [n, *shape] with labels int64 [n], equally many per class; the patterns are the same for
    every seed."""
    rng = np.random.default_rng(seed)
    y = np.arange(number) % len(layout.classes)
    pattern = samples(layout.input, len(layout.classes), 0).astype(np.float64)[y]
    noise = samples(layout.input, number, int(rng.integers(1, 1 << 30)))
    return ((1 - NOISE) * pattern + NOISE * noise).astype(layout.input.dtype), y
