"""Accuracy and macro-F1 of confusion counts, and the measures of a task without classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleet_core.base.errors import DataError
from fleet_core.tasks.measured import Figure, Measured
from fleet_core.tasks.task import KINDS, Task, together

SHARE: dict[str, Any] = {"min": 0, "max": 1}
AMOUNT: dict[str, Any] = {"min": 0}
ACCURACY = Figure("accuracy", "accuracy")
FIGURES = {one.key: one for one in (ACCURACY, *(figure for kind in KINDS.values() for figure in kind.COMPARED))}
"""By which models are compared, by key: with classes the first, else the first of the task's that is known."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A device's score over the classes that it has, or a pooled score over all classes. method: the method that gave
    the answers. calibration_error: the expected one, of all answers; None if it is not known of all.
    """

    accuracy: float = field(metadata=SHARE)
    macro_f1: float = field(metadata=SHARE)
    method: str | None = None
    calibration_error: float | None = field(default=None, metadata=SHARE)


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """A score of a task without classes, of one device or pooled. task: its kind. samples: evaluated ones. measures:
    measure -> output -> value, as ``tasks.task.Kind.pooled``; what is not defined is left out. method: as in
    ``Score``."""

    task: str
    samples: int = field(metadata=AMOUNT)
    measures: Mapping[str, Mapping[str, float]]
    method: str | None = None

    @property
    def text(self) -> str:
        """The measure of listings: ``MAE speed 1.25, load 0.031`` or ``micro-F1 0.912``."""
        return f"{self.head} {self.short_text}"

    @property
    def head(self) -> str:
        """The name of that measure."""
        return KINDS[self.task].MEASURE

    @property
    def short_text(self) -> str:
        """``text`` without the measure's name."""
        return KINDS[self.task].text_of(self.measures)

    @property
    def whole_text(self) -> str:
        """All measures: ``MAE speed 1.25, load 0.031; R² speed 0.950, load 0.812``."""
        return KINDS[self.task].whole_text(self.measures)


@dataclass(frozen=True)
class Compared:
    """A figure of a task without classes over devices, each with the same weight. pooled: over all samples."""

    mean: float = field(metadata=AMOUNT)
    worst: float = field(metadata=AMOUNT)
    best: float = field(metadata=AMOUNT)
    variance: float | None = field(default=None, metadata=AMOUNT)
    pooled: float | None = field(default=None, metadata=AMOUNT)


def compared(task: Task, devices: Sequence[Measured]) -> dict[str, Compared]:
    """Each figure of the task's ``COMPARED`` that is known of one of the devices, by key, in order."""
    if not devices:
        return {}
    pooled, found = together(task, devices).compared, dict[str, Compared]()
    for figure in KINDS[task.kind].COMPARED:
        values = np.array([one.compared[figure.key] for one in devices if figure.key in one.compared])
        if values.size:
            low, high = float(values.min()), float(values.max())
            found[figure.key] = Compared(
                float(values.mean()), high if figure.lower else low, low if figure.lower else high,
                float(values.var()), pooled[figure.key],
            )
    return found


def confusion_accuracy(confusion: Sequence[Sequence[int]]) -> float | None:
    """Share of right answers, from counts [N, N] (row = true class); None without samples."""
    counts_NN = counts(confusion)
    total = int(counts_NN.sum())
    return float(np.trace(counts_NN)) / total if total else None


def macro_f1(confusion: Sequence[Sequence[int]], classes_present_only: bool) -> float | None:
    """Mean F1 from counts [N, N] (row = true class); None without samples.

    classes_present_only: over the true classes that occur (a device's figure); else over all N classes, and a class
    that does not occur or is never found counts 0 (the pooled figure). """
    counts_NN = counts(confusion)
    if not counts_NN.sum():
        return None
    f1_N = f1_by_class(counts_NN)
    return float((f1_N[counts_NN.sum(axis=1) > 0] if classes_present_only else f1_N).mean())


def f1_by_class(counts_NM: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """F1 = 2·TP / (2·TP + FP + FN) of each class, float64 [N]; 0 for a class that does not occur.

    counts_NM: row = true class, column = answer. M: N, or N + 1 with a column for answers that are no class.
    """
    truth_N, answers_N = counts_NM.sum(axis=1), counts_NM.sum(axis=0)[: len(counts_NM)]
    right_N = np.diagonal(counts_NM)
    return np.asarray(2 * right_N / np.maximum(truth_N + answers_N, 1e-12))


def counts(confusion: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    counts_NN = np.asarray(confusion, dtype=np.int64)
    if counts_NN.ndim != 2 or counts_NN.shape[0] != counts_NN.shape[1] or (counts_NN < 0).any():
        raise DataError(f"a confusion of shape {list(counts_NN.shape)} is not a table of counts",
                        expected="[N, N] counts of at least 0, row = true class")
    return counts_NN
