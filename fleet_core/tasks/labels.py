"""Multi-label classification: a sample carries any number of labels at once, or none.

A model answers with a logit for each label, whose sigmoid is the label's probability. A label is answered if its
probability is the label's threshold or more: ``THRESHOLD``, or one that a device chooses on samples that were held back
(``thresholds``).

Shapes: N samples, K labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleet_core.base.errors import DataError
from fleet_core.tasks.measured import Figure, Measured, Measures

Array = np.ndarray[Any, Any]

KIND = "multi-label"
THRESHOLD = 0.5
GRID = tuple(k / 20 for k in range(1, 20))
"""Thresholds that are tried, in place of ``THRESHOLD``."""
LEAST = 3
"""A label has a threshold of its own if so many samples carry it and so many do not, in both halves of those that were
held back. Chosen in benchmarks/tasks/LABELS.md."""
NONE = "-"
"""Typed for a sample that carries none of the labels."""
MAX_LABELS = 1000
MEASURE = "micro-F1"
"""The F1 of all labels' counts together, which listings show."""
OVERALL = {"micro_f1": MEASURE, "macro_f1": "macro-F1", "exact_match": "exact match"}
"""Measures of all labels together, under the key ``all``, and their names for people."""
NAMES = {**OVERALL, "f1": "F1"}
COMPARED: tuple[Figure, ...] = (Figure("micro_f1", MEASURE),)
SUMS = ("both", "answered", "true", "exact")
"""Names of the counts over samples from which the measures follow (``LabelCounts``)."""


@dataclass(frozen=True)
class MultiLabel:
    """outputs: names of the labels."""

    outputs: tuple[str, ...] = field(metadata={"max_length": MAX_LABELS})
    kind: str = field(default=KIND, metadata={"choices": (KIND,)})

    def __post_init__(self) -> None:
        names = self.outputs
        if not names or not all(names) or len(set(names)) != len(names):
            raise DataError(f"the labels are {list(names)}", expected="one or more names, each once")

    def standardized(self, y_NK: Array) -> Array:
        """float32 [N, K] of 0 and 1. y_NK: bool or numbers. Raises DataError for another shape or other values."""
        return checked(y_NK, self.outputs).astype(np.float32)

    def in_units(self, answers_NK: Array) -> Array:
        """The probabilities float64 [N, K] of a model's logits."""
        return sigmoid(answers_NK)

    def chosen(self, probabilities_K: Sequence[float], thresholds_K: Sequence[float] = ()) -> tuple[str, ...]:
        """The labels that are answered. thresholds_K: ``THRESHOLD`` without any."""
        limits = thresholds_K or (THRESHOLD,) * len(self.outputs)
        return tuple(name for name, p, limit in zip(self.outputs, probabilities_K, limits, strict=True) if p >= limit)

    def typed(self, text: str) -> list[str]:
        """A sample's labels, as ``names_of``."""
        return names_of(text)

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
        return f"labels {', '.join(self.outputs)}"

    def to_learn(self, y_NK: Array) -> tuple[Array, Array]:
        """(positions of the samples with the labels y_NK that a model learns from, its targets)."""
        return np.arange(len(y_NK)), y_NK

    def generated(self, rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        """For a rehearsal: (strength of each of some patterns in ``count`` samples, float64 [N, P], their labels)."""
        carried = (rng.random((count, len(self.outputs))) < 0.5).astype(np.float64)
        return carried, carried

    def measured(self, y_NK: Array, probabilities_NK: Array) -> Measured:
        """Of answers to samples with the labels y_NK. Raises DataError as ``LabelCounts.of``."""
        return self._shown(LabelCounts.of(self, y_NK, probabilities_NK))

    def of_sums(self, count: int, sums: Mapping[str, Sequence[float]]) -> Measured:
        """The inverse of ``Measured.sums``, for ``count`` samples. Raises DataError for counts that no samples
        have."""
        width = {name: 1 if name == "exact" else len(self.outputs) for name in SUMS}
        if count < 1 or {name: len(one) for name, one in sums.items()} != width:
            raise DataError(f"the sums {', '.join(sums)[:80]} over {count} samples",
                            expected=f"{', '.join(SUMS[:-1])}, each of {len(self.outputs)} numbers, and one exact")
        arrays = {name: np.asarray(sums[name], np.float64) for name in SUMS}
        if any((one != np.floor(one)).any() or (one < 0).any() or (one > count).any() for one in arrays.values()):
            raise DataError("the sums are not counts of samples", expected=f"whole numbers from 0 to {count}")
        if (arrays["both"] > np.minimum(arrays["answered"], arrays["true"])).any():
            raise DataError("the sums count more right answers than answers or labels")
        return self._shown(LabelCounts(count, **arrays))

    def _shown(self, counts: LabelCounts) -> Measured:
        """Models are compared by 1 − micro-F1."""
        figures = measures(self.outputs, counts)
        sums = {name: tuple(map(float, getattr(counts, name))) for name in SUMS}
        return Measured(counts.count, sums, figures, text_of(figures), 1 - counts.micro_f1,
                        () if counts.thresholds is None else tuple(map(float, counts.thresholds)),
                        {COMPARED[0].key: counts.micro_f1})


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """Counts over samples from which the measures follow; those of several devices are added. count: samples. true,
    answered, both: samples that carry each label, for which it is answered, and both, [K]. exact: samples [1] whose
    answer is right in all labels. thresholds: by which one device answers from now on, [K]."""

    count: int
    both: Array
    answered: Array
    true: Array
    exact: Array
    thresholds: Array | None = None

    @classmethod
    def of(cls, task: MultiLabel, y_NK: Array, probabilities_NK: Array, least: int = LEAST) -> LabelCounts:
        """Of held-back samples in the order of time. The earlier half is answered by the thresholds of the later half,
        and the reverse; ``thresholds`` are those of all. least: as ``LEAST``. Raises DataError for another shape or
        other values."""
        true_NK, p_NK = checked(y_NK, task.outputs) > 0, np.asarray(probabilities_NK)
        if true_NK.shape != p_NK.shape:
            raise DataError(f"{len(p_NK)} answers to {len(true_NK)} samples", expected="one answer for each")
        earlier, later = slice(len(true_NK) // 2), slice(len(true_NK) // 2, None)
        fewest_K = np.min([np.minimum(one.sum(0), (~one).sum(0)) for one in (true_NK[earlier], true_NK[later])], axis=0)
        of_earlier, of_later, of_all = (np.where(fewest_K >= least, thresholds(true_NK[part], p_NK[part]), THRESHOLD)
                                        for part in (earlier, later, slice(None)))
        answered_NK = np.concatenate([p_NK[earlier] >= of_later, p_NK[later] >= of_earlier])
        return cls(len(true_NK), (true_NK & answered_NK).sum(0), answered_NK.sum(0), true_NK.sum(0),
                   (true_NK == answered_NK).all(1).sum(keepdims=True), of_all)

    @property
    def f1(self) -> tuple[float | None, ...]:
        """2·TP / (2·TP + FP + FN) of each label; None of a label that no sample carries and no answer names."""
        return tuple(None if not met else float(2 * both / met)
                     for both, met in zip(self.both, self.answered + self.true, strict=True))

    @property
    def micro_f1(self) -> float:
        """The F1 of the summed counts of all labels; 1 if no sample carries a label and no answer names one."""
        met = float((self.answered + self.true).sum())
        return float(2 * self.both.sum() / met) if met else 1.0

    @property
    def macro_f1(self) -> float | None:
        """The mean of ``f1`` over the labels that have one."""
        known = [one for one in self.f1 if one is not None]
        return float(np.mean(known)) if known else None


def reading_of(names: Sequence[str]) -> dict[str, Any]:
    """Options with which ``samples.load`` reads the task's samples. names: of the labels."""
    return {"outputs": tuple(names), "labels": True}


def names_of(text: str) -> list[str]:
    """Those of ``speech,music``; none of an empty text, or of ``NONE``."""
    return [name for part in text.split(",") if (name := part.strip()) not in ("", NONE)]


def thresholds(true_NK: Array, probabilities_NK: Array) -> Array:
    """[K]: of each label the one in ``GRID`` with the highest F1; of several the one nearest to ``THRESHOLD``.
    true_NK: bool."""
    nearest = sorted(GRID, key=lambda one: abs(one - THRESHOLD))
    f1_TK = np.array([_f1(true_NK, probabilities_NK >= one) for one in nearest])
    found: Array = np.array(nearest)[f1_TK.argmax(0)]
    return found


def _f1(true_NK: Array, answered_NK: Array) -> Array:
    """[K]; 1 for a label that no sample carries and no answer names."""
    met_K = true_NK.sum(0) + answered_NK.sum(0)
    found: Array = np.where(met_K > 0, 2 * (true_NK & answered_NK).sum(0) / np.maximum(met_K, 1), 1.0)
    return found


def sigmoid(logits: Array) -> Array:
    """1 / (1 + e⁻ˣ), float64, without overflow."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * np.asarray(logits, np.float64))))


def measures(labels: Sequence[str], counts: LabelCounts) -> dict[str, dict[str, float]]:
    """``micro_f1``, ``macro_f1`` and ``exact_match`` of ``all`` labels, and ``f1`` by label; what is not defined is
    left out."""
    found: dict[str, dict[str, float | None]] = {
        "micro_f1": {"all": counts.micro_f1}, "macro_f1": {"all": counts.macro_f1},
        "exact_match": {"all": float(counts.exact[0] / counts.count)},
        "f1": dict(zip(labels, counts.f1, strict=True)),
    }
    known = {name: {key: value for key, value in of.items() if value is not None} for name, of in found.items()}
    return {name: of for name, of in known.items() if of}


def pooled(labels: Sequence[str], rows: Sequence[tuple[int, Mapping[str, Sequence[float]]]]) -> tuple[int, Measures]:
    """(samples, measures) of several devices' ``Measured.sums``, one or more, each with its number of samples."""
    arrays = {name: np.sum([np.asarray(sums[name], np.float64) for _, sums in rows], axis=0) for name in SUMS}
    counts = LabelCounts(sum(count for count, _ in rows), **arrays)
    return counts.count, measures(labels, counts)


def lower(measure: str, output: str) -> bool | None:
    """Whether less of a measure is better."""
    return False


def text_of(found: Measures) -> str:
    """The ``MEASURE`` for people."""
    return ", ".join(f"{value:.3f}" for value in found.get("micro_f1", {}).values())


def whole_text(found: Measures) -> str:
    """All measures: ``micro-F1 0.900, macro-F1 0.880, exact match 0.750; F1 music 0.910``."""
    overall = ", ".join(f"{name} {found[key]['all']:.3f}" for key, name in OVERALL.items() if key in found)
    by_label = ", ".join(f"{name} {value:.3f}" for name, value in found.get("f1", {}).items())
    return overall + (f"; F1 {by_label}" if by_label else "")


def checked(y_NK: Array, labels: Sequence[str]) -> Array:
    """y_NK, bool or numbers, if it has 0 or 1 for each sample and label. Raises DataError."""
    found = np.asarray(y_NK)
    if found.ndim != 2 or found.shape[1] != len(labels) or found.dtype.kind not in "biuf":
        raise DataError(f"the labels are {found.dtype} {list(found.shape)}",
                        expected=f"[N, {len(labels)}], 0 or 1 for each of {', '.join(labels[:20])}")
    bad = np.flatnonzero(~((found == 0) | (found == 1)).all(1))
    if bad.size:
        raise DataError(f"row {bad[0] + 1} of the labels holds {found[bad[0]].tolist()}",
                        expected="0 or 1 for each label")
    return found
