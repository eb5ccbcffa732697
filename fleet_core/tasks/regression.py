"""Regression: a model answers with one or several numbers in the user's unit.

A model is trained on targets that are standardized by the mean and deviation in the layout, so that learning rates do
not depend on the unit. Its answers are converted back.

Shapes: N samples, K outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleet_core.base.errors import ConfigError, DataError
from fleet_core.tasks.measured import Figure, Measured, Measures

Array = np.ndarray[Any, Any]

KIND = "regression"
LOSSES = ("huber", "squared")
MAX_OUTPUTS = 1000
MEASURE = "MAE"
"""The mean absolute error, which listings show."""
NAMES = {"mae": MEASURE, "r2": "R²"}
"""Of the measures, for people."""
COMPARED: tuple[Figure, ...] = (Figure("error", f"{MEASURE} in deviations", lower=True),)
"""Of all outputs together: ``Regression.distance``."""
SUMS = ("absolute", "squared", "total", "squares")
"""Names of the sums over samples from which the measures follow (``Errors``)."""


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

    def typed(self, text: str) -> list[float]:
        """A sample's targets, as ``numbers_of``."""
        return numbers_of(text)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of what samples come with to learn from."""
        return self.outputs

    @property
    def reading(self) -> dict[str, Any]:
        """As ``reading_of``."""
        return reading_of(self.outputs)

    @property
    def told(self) -> str:
        """What the model answers, for people."""
        return f"predicts {', '.join(self.outputs)}"

    def to_learn(self, y_NK: Array) -> tuple[Array, Array]:
        """(positions of the samples with the targets y_NK that a model learns from, its targets)."""
        return np.arange(len(y_NK)), y_NK

    def generated(self, rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        """For a rehearsal: (strength of each of some patterns in ``count`` samples, float64 [N, P], their targets)."""
        strength = rng.normal(size=(count, len(self.outputs)))
        return strength, self.in_units(strength)

    def measured(self, y_NK: Array, answers_NK: Array) -> Measured:
        """Of answers to samples, both in the user's unit. Raises DataError as ``Errors.of``."""
        return self._shown(Errors.of(self, y_NK, answers_NK))

    def of_sums(self, count: int, sums: Mapping[str, Sequence[float]]) -> Measured:
        """The inverse of ``Measured.sums``, for ``count`` samples. Raises DataError for sums that no samples have."""
        if count < 1 or sums.keys() != set(SUMS) or any(len(one) != len(self.outputs) for one in sums.values()):
            raise DataError(f"the sums {', '.join(sums)[:80]} over {count} samples",
                            expected=f"{', '.join(SUMS)}, each of {len(self.outputs)} numbers, over samples")
        arrays = {name: np.asarray(sums[name], np.float64) for name in SUMS}
        if not all(np.isfinite(one).all() for one in arrays.values()):
            raise DataError("the sums of errors are not finite")
        if any((arrays[name] < 0).any() for name in SUMS if name != "total"):
            raise DataError("the sums of errors are negative")
        return self._shown(Errors(self.mean, count, **arrays))

    def _shown(self, errors: Errors) -> Measured:
        figures = self.figures(errors)
        sums = {name: tuple(map(float, getattr(errors, name))) for name in SUMS}
        distance = self.distance(errors)
        return Measured(errors.count, sums, figures, text_of(figures), distance, compared={COMPARED[0].key: distance})

    def figures(self, errors: Errors) -> dict[str, dict[str, float]]:
        """``measures`` of ``errors``."""
        return measures(self.outputs, errors)

    def distance(self, errors: Errors) -> float:
        """By which models are compared, lower is better: the mean absolute error in deviations of the targets, over
        all outputs."""
        return float(np.mean(np.asarray(errors.mae or 0.0) / self.deviation))


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


def reading_of(names: Sequence[str]) -> dict[str, Any]:
    """Options with which ``samples.load`` reads the task's samples. names: of the numbers."""
    return {"outputs": tuple(names)}


def numbers_of(text: str, where: str | None = None) -> list[float]:
    """Those of ``1.5,20``. where: the text is from. Raises ConfigError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"'{text[:80]}' is not numbers", where=where, expected="such as 1.5,20") from error


def measures(outputs: Sequence[str], errors: Errors) -> dict[str, dict[str, float]]:
    """``mae`` and ``r2`` by output; an output without an R² has none."""
    found = {"mae": dict(zip(outputs, errors.mae or (), strict=False)),
             "r2": {name: r2 for name, r2 in zip(outputs, errors.r2, strict=True) if r2 is not None}}
    return {measure: values for measure, values in found.items() if values}


def pooled(outputs: Sequence[str], rows: Sequence[tuple[int, Mapping[str, Sequence[float]]]]) -> tuple[int, Measures]:
    """(samples, measures) of several devices' ``Measured.sums``, one or more, each with its number of samples."""
    arrays = {name: np.sum([np.asarray(sums[name], np.float64) for _, sums in rows], axis=0) for name in SUMS}
    errors = Errors((0.0,) * len(outputs), sum(count for count, _ in rows), **arrays)
    return errors.count, measures(outputs, errors)


def lower(measure: str, output: str) -> bool | None:
    """Whether less of a measure is better."""
    return measure == "mae"


def text_of(found: Measures) -> str:
    """The ``MEASURE`` by output, for people: ``speed 1.25, load 0.031``."""
    return ", ".join(f"{name} {value:.4g}" for name, value in found.get("mae", {}).items())


def whole_text(found: Measures) -> str:
    """All measures: ``MAE speed 1.25; R² speed 0.950``."""
    r2 = ", ".join(f"{name} {value:.3f}" for name, value in found.get("r2", {}).items())
    return f"{MEASURE} {text_of(found)}" + (f"; R² {r2}" if r2 else "")


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
