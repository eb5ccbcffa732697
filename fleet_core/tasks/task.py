"""The tasks without classes, of which a fleet has at most one. A task is a file, with a class and with what ``Kind``
says; this one knows them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fleet_core.tasks import anomaly, labels, regression
from fleet_core.tasks.anomaly import Anomaly
from fleet_core.tasks.labels import MultiLabel
from fleet_core.tasks.measured import Measures
from fleet_core.tasks.regression import Regression

Task = Regression | MultiLabel | Anomaly

VARIANTS: Mapping[str, type[Any]] = {regression.KIND: Regression, labels.KIND: MultiLabel, anomaly.KIND: Anomaly}
"""The class of each ``kind``, as ``fleet_core.base.schema`` reads a task."""


class Kind(Protocol):
    """What a task's file has for listings, which know measures and not the fleet. MEASURE: the name of the measure that
    they show. NAMES: those of all measures, for people."""

    MEASURE: str
    NAMES: dict[str, str]

    def pooled(
        self, outputs: Sequence[str], rows: Sequence[tuple[int, Mapping[str, Sequence[float]]]], /
    ) -> tuple[int, Measures]:
        """(samples, measures) of several devices' ``Measured.sums``, one or more, each with its number of samples."""

    def text_of(self, found: Measures) -> str:
        """The ``MEASURE``, without its name."""

    def whole_text(self, found: Measures) -> str:
        """All measures, with their names."""


KINDS: Mapping[str, Kind] = {regression.KIND: regression, labels.KIND: labels, anomaly.KIND: anomaly}
NAMES = {**regression.NAMES, **labels.NAMES, **anomaly.NAMES}
"""Of all measures, for people."""
