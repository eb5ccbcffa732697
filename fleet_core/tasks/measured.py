"""What a fleet knows of a model's answers to samples, whatever its task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Measures = Mapping[str, Mapping[str, float]]
"""Measure -> output -> value."""


@dataclass(frozen=True)
class Figure:
    """A figure by which models are compared. key: in result files. name: for people. lower: less is better. chance: by
    guessing; None if it depends on the samples."""

    key: str
    name: str
    lower: bool = False
    chance: float | None = None


@dataclass(frozen=True, eq=False)
class Measured:
    """How a model answers samples. samples: their number. sums: from which the measures follow, by name, each with a
    number for each output. figures: measure -> output -> value. text: the measure that listings show. distance: by
    which a device compares two models, lower is better. thresholds: by which one device answers, of each output; empty
    where a task has none, or they are not known. compared: the figures of the task's ``COMPARED`` that are known, by
    key."""

    samples: int
    sums: Mapping[str, tuple[float, ...]]
    figures: Measures
    text: str
    distance: float
    thresholds: tuple[float, ...] = ()
    compared: Mapping[str, float] = field(default_factory=dict)
