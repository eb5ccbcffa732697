"""Accuracy and macro-F1 of confusion counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleet_core.base.errors import DataError

SHARE: dict[str, Any] = {"min": 0, "max": 1}
AMOUNT: dict[str, Any] = {"min": 0}


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of a device, over the classes that it holds; or pooled over devices, over all classes. method: of the answers."""

    accuracy: float = field(metadata=SHARE)
    macro_f1: float = field(metadata=SHARE)
    method: str | None = None


def confusion_accuracy(confusion: Sequence[Sequence[int]]) -> float | None:
    """Share of right answers of an [N, N] count (row = true class), None where there were no samples."""
    counts_NN = counts(confusion)
    total = int(counts_NN.sum())
    return float(np.trace(counts_NN)) / total if total else None


def macro_f1(confusion: Sequence[Sequence[int]], classes_present_only: bool) -> float | None:
    """Mean F1 = 2·TP / (2·TP + FP + FN) of an [N, N] count (row = true class), None where there were no samples.

    classes_present_only: over the classes of the truth (a device's figure); else over all N, where a class that was
    missed, or that nobody holds, counts 0 (the pooled figure).
    """
    counts_NN = counts(confusion)
    truth_N, answers_N = counts_NN.sum(axis=1), counts_NN.sum(axis=0)
    if not truth_N.sum():
        return None
    f1_N = 2 * np.diagonal(counts_NN) / np.maximum(truth_N + answers_N, 1)
    return float((f1_N[truth_N > 0] if classes_present_only else f1_N).mean())


def counts(confusion: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    counts_NN = np.asarray(confusion, dtype=np.int64)
    if counts_NN.ndim != 2 or counts_NN.shape[0] != counts_NN.shape[1] or (counts_NN < 0).any():
        raise DataError(f"a confusion of shape {list(counts_NN.shape)} is no table of counts",
                        expected="[N, N] counts of at least 0, row = true class")
    return counts_NN
