"""What a fleet knows of a model's answers to samples, whatever its task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Measures = Mapping[str, Mapping[str, float]]
"""Measure -> output -> value."""


@dataclass(frozen=True, eq=False)
class Measured:
    """How a model answers samples. samples: their number. sums: from which the measures follow, by name, each with a
    number for each output. figures: measure -> output -> value. text: the measure that listings show. distance: by
    which models are compared, lower is better. threshold: of scores of anomalies, as in ``Alarms``."""

    samples: int
    sums: Mapping[str, tuple[float, ...]]
    figures: Measures
    text: str
    distance: float
    threshold: float | None = None
