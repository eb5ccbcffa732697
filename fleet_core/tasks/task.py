"""The tasks without classes, of which a fleet has at most one. A task is a file, with a class and with what ``Kind``
says; this one knows them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fleet_core.tasks import anomaly, labels, regression
from fleet_core.tasks.anomaly import Anomaly
from fleet_core.tasks.labels import MultiLabel
from fleet_core.tasks.measured import Figure, Measured, Measures
from fleet_core.tasks.regression import Regression

Task = Regression | MultiLabel | Anomaly

VARIANTS: Mapping[str, type[Any]] = {regression.KIND: Regression, labels.KIND: MultiLabel, anomaly.KIND: Anomaly}
"""The class of each ``kind``, as ``fleet_core.base.schema`` reads a task."""


class Kind(Protocol):
    """What a task's file has for listings, which know measures and not the fleet. MEASURE: the name of the measure that
    they show. NAMES: those of all measures, for people. COMPARED: figures by which models are compared; the first that
    is known decides."""

    MEASURE: str
    NAMES: dict[str, str]
    COMPARED: tuple[Figure, ...]

    def reading_of(self, names: Sequence[str], /) -> dict[str, Any]:
        """As ``reading``."""

    def pooled(
        self, outputs: Sequence[str], rows: Sequence[tuple[int, Mapping[str, Sequence[float]]]], /
    ) -> tuple[int, Measures]:
        """(samples, measures) of several devices' ``Measured.sums``, one or more, each with its number of samples."""

    def lower(self, measure: str, output: str, /) -> bool | None:
        """Whether less of a measure is better; None if neither is."""

    def text_of(self, found: Measures) -> str:
        """The ``MEASURE``, without its name."""

    def whole_text(self, found: Measures) -> str:
        """All measures, with their names."""


KINDS: Mapping[str, Kind] = {regression.KIND: regression, labels.KIND: labels, anomaly.KIND: anomaly}
NAMES = {**regression.NAMES, **labels.NAMES, **anomaly.NAMES}
"""Of all measures, for people."""


def reading(kind: str, names: Sequence[str]) -> dict[str, Any]:
    """Options with which ``samples.load`` reads samples of a task that they make. names: of its outputs or labels, or
    of the labels of quiet samples. Empty for classes."""
    return KINDS[kind].reading_of(names) if kind in KINDS else {}


def reading_of(task: Task | None, classes: Sequence[str]) -> dict[str, Any]:
    """Options with which ``samples.load`` reads samples of a model: of its task, or its ``classes``."""
    return {"classes": tuple(classes) or None} if task is None else task.reading


def together(task: Task, several: Sequence[Measured]) -> Measured:
    """Of the samples of several devices, one or more."""
    sums = {name: tuple(np.sum([one.sums[name] for one in several], axis=0).tolist()) for name in several[0].sums}
    return task.of_sums(sum(one.samples for one in several), sums)
