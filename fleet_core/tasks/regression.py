"""Regression: a model answers with one or several numbers in the user's unit.

A model is trained on targets that are standardized by the mean and deviation in the layout, so that learning rates do
not depend on the unit. Its answers are converted back.

Shapes: N samples, K outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleet_core.base.errors import DataError

Array = np.ndarray[Any, Any]

KIND = "regression"
LOSSES = ("huber", "squared")
MAX_OUTPUTS = 1000


@dataclass(frozen=True)
class Regression:
    """outputs: names of the numbers. mean, deviation: of each in the user's unit, over the samples that fitted them.
    loss: ``squared``, or ``huber``, which is linear beyond one deviation."""

    outputs: tuple[str, ...] = field(metadata={"max_length": MAX_OUTPUTS})
    mean: tuple[float, ...] = field(metadata={"max_length": MAX_OUTPUTS})
    deviation: tuple[float, ...] = field(metadata={"max_length": MAX_OUTPUTS, "above": 0.0})
    loss: str = field(default="huber", metadata={"choices": LOSSES})
    kind: str = field(default=KIND, metadata={"choices": (KIND,)})

    def __post_init__(self) -> None:
        names = self.outputs
        if not names or not all(names) or len(set(names)) != len(names):
            raise DataError(f"the outputs are {list(names)}", expected="one or more names, each once")
        if not len(names) == len(self.mean) == len(self.deviation):
            raise DataError(
                f"{len(names)} outputs with {len(self.mean)} means and {len(self.deviation)} deviations",
                expected="one mean and one deviation for each output",
            )

    @classmethod
    def of(cls, outputs: Sequence[str], y_NK: Array, loss: str = "huber") -> Regression:
        """The task of these targets, float [N, K] or [N]. An output that never changes has the deviation 1. Raises
        DataError."""
        y_NK = _targets(y_NK, len(outputs))
        if not len(y_NK):
            raise DataError("there are no targets", expected="at least one sample")
        deviation_K = y_NK.std(0)
        deviation_K[deviation_K == 0] = 1.0
        return cls(tuple(outputs), tuple(y_NK.mean(0).tolist()), tuple(deviation_K.tolist()), loss)

    def standardized(self, y_NK: Array) -> Array:
        """float32 [N, K] of targets [N, K] or [N] in the user's unit. Raises DataError for another shape, or values
        that are not finite."""
        found: Array = ((_targets(y_NK, len(self.outputs)) - self.mean) / self.deviation).astype(np.float32)
        return found

    def in_units(self, answers_NK: Array) -> Array:
        """A model's answers [N, K] in the user's unit, float64."""
        found: Array = np.asarray(answers_NK, np.float64) * self.deviation + self.mean
        return found


@dataclass(frozen=True, eq=False)
class Errors:
    """Sums over samples from which the measures follow; those of several devices are added. count: samples. absolute,
    squared: of answer − target, float64 [K]. total, squares: of target − ``centre``, float64 [K]; errors that are
    added have the same centre, which the sums need to be exact for targets far from 0."""

    centre: tuple[float, ...]
    count: int
    absolute: Array
    squared: Array
    total: Array
    squares: Array

    @classmethod
    def of(cls, task: Regression, y_NK: Array, answers_NK: Array) -> Errors:
        """The errors of answers [N, K] to targets [N, K] or [N], both in the user's unit. Raises DataError for another
        shape, or values that are not finite."""
        width = len(task.outputs)
        y_NK, answers_NK = _targets(y_NK, width), _targets(answers_NK, width)
        if len(y_NK) != len(answers_NK):
            raise DataError(f"{len(answers_NK)} answers to {len(y_NK)} targets", expected="one answer for each")
        error_NK, from_NK = answers_NK - y_NK, y_NK - task.mean
        return cls(
            task.mean,
            len(y_NK),
            np.abs(error_NK).sum(0),
            np.square(error_NK).sum(0),
            from_NK.sum(0),
            np.square(from_NK).sum(0),
        )

    def __add__(self, other: Errors) -> Errors:
        if self.centre != other.centre:
            raise DataError("errors around different centres cannot be added", expected="errors of one task")
        return Errors(
            self.centre,
            self.count + other.count,
            self.absolute + other.absolute,
            self.squared + other.squared,
            self.total + other.total,
            self.squares + other.squares,
        )

    @property
    def mae(self) -> tuple[float, ...] | None:
        """The mean absolute error of each output, in its unit; lower is better. None without a sample."""
        return tuple((self.absolute / self.count).tolist()) if self.count else None

    @property
    def r2(self) -> tuple[float | None, ...]:
        """R² of each output, the share of the targets' variance that the answers explain: 1 is best, 0 is as good as
        their mean. None where all targets are equal."""
        if not self.count:
            return (None,) * len(self.centre)
        spread_K = self.squares - np.square(self.total) / self.count
        known_K = spread_K > 1e-12 * self.squares
        return tuple(
            float(1 - wrong / spread) if known else None
            for wrong, spread, known in zip(self.squared, spread_K, known_K, strict=True)
        )


def _targets(y_NK: Array, width: int) -> Array:
    """float64 [N, K]. Raises DataError."""
    found = np.asarray(y_NK)
    if found.dtype.kind not in "iuf":
        raise DataError(f"the targets are {found.dtype}", expected="numbers")
    shape = found.shape
    if found.ndim == 1 and width == 1:
        found = found[:, None]
    if found.ndim != 2 or found.shape[1] != width:
        raise DataError(f"the targets have shape {list(shape)}", expected=f"[N, {width}], a number for each output")
    wide = found.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(wide).all(1))
    if bad.size:
        raise DataError(f"row {bad[0] + 1} of the targets holds {wide[bad[0]].tolist()}", expected="finite numbers")
    return wide
