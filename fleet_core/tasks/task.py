"""The tasks without classes, of which a fleet has at most one, and how figures of each are shown to people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.tasks import anomaly, labels, regression
from fleet_core.tasks.anomaly import Alarms, Anomaly
from fleet_core.tasks.labels import LabelCounts, MultiLabel
from fleet_core.tasks.regression import Errors, Regression

Task = Regression | MultiLabel | Anomaly
Array = np.ndarray[Any, Any]
Measures = Mapping[str, Mapping[str, float]]

VARIANTS: Mapping[str, type[Any]] = {regression.KIND: Regression, labels.KIND: MultiLabel,
                                      anomaly.KIND: Anomaly}
"""The class of each ``kind``, as ``fleet_core.base.schema`` reads a task."""

OVERALL = {"micro_f1": labels.MEASURE, "macro_f1": "macro-F1", "exact_match": "exact match"}
"""Measures of all outputs together, under the key ``all``, and their names for people."""

OF_MEASURES = {"mae": regression.MEASURE, "r2": "R²", **OVERALL, "f1": "F1", "alarms": "alarms",
               "score": "score", "auroc": "AUROC"}
"""Names of all measures for people."""


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


def measured(task: Task, y_NK: Array, answers_NK: Array) -> Measured:
    """Of answers [N, K] to samples with targets or labels y_NK. Raises DataError for another shape or other values."""
    if isinstance(task, MultiLabel):
        return _of_counts(task, LabelCounts.of(task, y_NK, answers_NK))
    if isinstance(task, Anomaly):
        return _of_alarms(task, Alarms.of(task, y_NK, answers_NK))
    return _of_errors(task, Errors.of(task, y_NK, answers_NK))


def of_sums(task: Task, samples: int, sums: Mapping[str, Sequence[float]]) -> Measured:
    """The inverse of ``Measured.sums``. Raises DataError for sums that no samples have."""
    if isinstance(task, MultiLabel):
        return _of_counts(task, task.counts(samples, sums))
    if isinstance(task, Anomaly):
        return _of_alarms(task, task.alarms(samples, sums))
    return _of_errors(task, task.errors(samples, sums))


def _of_counts(task: MultiLabel, found: LabelCounts) -> Measured:
    return Measured(found.count, task.sums(found), task.figures(found), task.text(found), task.distance(found))


def _of_alarms(task: Anomaly, found: Alarms) -> Measured:
    return Measured(found.count, task.sums(found), task.figures(found), task.text(found), task.distance(found),
                    found.threshold)


def _of_errors(task: Regression, found: Errors) -> Measured:
    return Measured(found.count, task.sums(found), task.figures(found), task.text(found), task.distance(found))


def measures_of(kind: str, outputs: Sequence[str], rows: Sequence[tuple[int, Mapping[str, Sequence[float]]]]) -> (
    tuple[int, Measures]
):
    """(samples, measures) of several devices' sums, one or more, each with its number of samples."""
    if kind == labels.KIND:
        counts = labels.of_sums(outputs, rows)
        return counts.count, labels.measures(outputs, counts)
    if kind == anomaly.KIND:
        alarms = anomaly.of_sums(rows)
        return alarms.count, anomaly.measures(alarms)
    errors = regression.of_sums(outputs, rows)
    return errors.count, regression.measures(outputs, errors)


def head_of(kind: str) -> str:
    """The name of the measure that listings show."""
    return {labels.KIND: labels.MEASURE, anomaly.KIND: anomaly.MEASURE}.get(kind, regression.MEASURE)


def text_of(kind: str, measures: Measures) -> str:
    """The measure that listings show, without its name."""
    if kind == labels.KIND:
        return ", ".join(f"{value:.3f}" for value in measures.get("micro_f1", {}).values())
    if kind == anomaly.KIND:
        return anomaly.text_of(measures)
    return regression.text_of(measures.get("mae", {}))


def whole_text(kind: str, measures: Measures) -> str:
    """All measures: ``MAE speed 1.25; R² speed 0.950``, or ``micro-F1 0.900, macro-F1 0.880, …; F1 music 0.910``."""
    if kind == labels.KIND:
        overall = ", ".join(f"{name} {measures[key]['all']:.3f}" for key, name in OVERALL.items()
                            if key in measures)
        by_label = ", ".join(f"{name} {value:.3f}" for name, value in measures.get("f1", {}).items())
        return overall + (f"; F1 {by_label}" if by_label else "")
    if kind == anomaly.KIND:
        scores = ", ".join(f"{name} {value:.4g}" for name, value in measures.get("score", {}).items())
        return f"{head_of(kind)} {text_of(kind, measures)}; mean score {scores}"
    r2 = ", ".join(f"{name} {value:.3f}" for name, value in measures.get("r2", {}).items())
    return f"{head_of(kind)} {text_of(kind, measures)}" + (f"; R² {r2}" if r2 else "")


def told(task: Task) -> str:
    """What the model answers, for people."""
    if isinstance(task, Anomaly):
        return f"detects anomalies, {task.text_allowed}"
    return f"{'labels' if isinstance(task, MultiLabel) else 'predicts'} {', '.join(task.outputs)}"
