"""Anomaly detection: a model learns to repeat quiet samples, and answers with how badly it repeats a sample, its score.

The network's output is the difference between its repetition and the standardized sample. In training the targets are
0, so no labels are needed. A score above the device's threshold is an alarm; the threshold comes from the device's own
quiet samples that were held back, for a wanted share of alarms among quiet samples.

Where samples have labels, those that ``normal`` names are quiet. The others are anomalies: they are never learned from,
and show how well anomalies are found.

Shapes: N samples, K numbers of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleet_core.base.errors import DataError
from fleet_core.tasks.measured import Figure, Measured, Measures

Array = np.ndarray[Any, Any]

KIND = "anomaly"
MAX_WIDTH = 4096
LABELS = QUIET, ANOMALY = "quiet", "anomaly"
"""Names of the labels 0 and 1 of a device's samples."""
SCORE = "score"
MEASURE = "false alarms"
"""The share of quiet samples that raise an alarm, which listings show."""
NAMES = {"alarms": "alarms", "score": "score", "auroc": "AUROC"}
"""Of the measures, for people."""
COMPARED: tuple[Figure, ...] = (
    Figure("auroc", "AUROC", chance=0.5), Figure("difference", "difference in deviations", lower=True))
"""Without labelled anomalies only the second is known: how badly a model repeats a quiet sample, ``_shown``'s distance.
It says nothing about the anomalies that a model finds."""
SUMS = {QUIET: 4, ANOMALY: 4, "pairs": 2}
"""The sums over samples from which the measures follow (``Alarms``), and how many numbers each has."""
NO_THRESHOLD = "no quiet sample is held back on this device, so there is no threshold and no alarm"
DAY_S = 86_400.0
SHARE = 0.01
"""Of quiet samples that may raise an alarm, by default."""
PATTERNS = 8
"""Of which generated samples are made."""
TAIL = 0.1
"""The share of the highest quiet scores that a threshold above all of them is extrapolated from."""


@dataclass(frozen=True)
class Anomaly:
    """width: K, the numbers of a sample. normal: labels of quiet samples, where samples have labels. share: of quiet
    samples that may raise an alarm. false_alarms_per_day: in place of ``share`` if it is above 0. seconds: from one
    sample to the next; 0: not known."""

    width: int = field(metadata={"min": 1, "max": MAX_WIDTH})
    normal: tuple[str, ...] = field(default=(), metadata={"max_length": 10_000})
    share: float = field(default=SHARE, metadata={"above": 0.0, "max": 0.5})
    false_alarms_per_day: float = field(default=0.0, metadata={"min": 0.0, "max": 1e9})
    seconds: float = field(default=0.0, metadata={"min": 0.0, "max": 1e9})
    kind: str = field(default=KIND, metadata={"choices": (KIND,)})

    def __post_init__(self) -> None:
        if self.false_alarms_per_day and not self.seconds:
            raise DataError("false_alarms_per_day without seconds", expected="the seconds from one sample to the next")
        if self.allowed > 0.5:
            raise DataError(f"{self.false_alarms_per_day:g} false alarms of {DAY_S / self.seconds:g} samples a day",
                            expected="at most half of the samples")

    @classmethod
    def of(cls, shape: Sequence[int], normal: Sequence[str], share: float = SHARE) -> Anomaly:
        """The task of samples of this shape. Raises DataError if they are too large to be repeated."""
        width = math.prod(shape)
        if width > MAX_WIDTH:
            raise DataError(f"samples of {width} numbers are too large to be repeated",
                            expected=f"at most {MAX_WIDTH} numbers in a sample",
                            hint="a shorter window, smaller images, or a backbone")
        return cls(width, tuple(normal), share)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The one number of an answer."""
        return (SCORE,)

    @property
    def differences(self) -> tuple[str, ...]:
        """Names of the numbers that the network outputs."""
        return tuple(map(str, range(self.width)))

    @property
    def loss(self) -> str:
        """Of the differences, as in ``Regression``."""
        return "squared"

    @property
    def allowed(self) -> float:
        """The share of quiet samples that may raise an alarm."""
        return self.false_alarms_per_day * self.seconds / DAY_S if self.false_alarms_per_day else self.share

    @property
    def text_allowed(self) -> str:
        """How many false alarms there may be, for people."""
        per_day = f", {self.allowed * DAY_S / self.seconds:.3g} a day" if self.seconds else ""
        return f"false alarms: {100 * self.allowed:.3g} % of quiet samples{per_day}"

    def targets(self, count: int) -> Array:
        """What a model learns to answer to ``count`` quiet samples: no difference, float32 [N, K]."""
        return np.zeros((count, self.width), np.float32)

    def standardized(self, y_NK: Array) -> Array:
        """The targets y_NK as float32. Raises DataError for another shape."""
        if y_NK.shape[1:] != (self.width,):
            raise DataError(f"the targets have shape {list(y_NK.shape)}", expected=f"[N, {self.width}]")
        return y_NK.astype(np.float32)

    def in_units(self, answers_NK: Array) -> Array:
        """The scores float64 [N, 1] of a model's answers, the differences [N, K]: the mean of their squares."""
        found: Array = np.square(np.asarray(answers_NK, np.float64)).mean(1, keepdims=True)
        return found

    def threshold(self, scores_N: Array) -> float | None:
        """The score above which a sample is an alarm, from scores of quiet samples; None without any.

        It is the score that the share ``allowed`` of them exceeds. A share of less than one sample is extrapolated: the
        highest ``TAIL`` of the scores are taken to fall exponentially.
        """
        if not len(scores_N):
            return None
        ordered = np.sort(np.asarray(scores_N, np.float64))
        if self.allowed * len(ordered) >= 1:
            return float(np.quantile(ordered, 1 - self.allowed, method="higher"))
        begin = max(0, len(ordered) - max(2, round(TAIL * len(ordered))))
        excess = float((ordered[begin:] - ordered[begin]).mean())
        share = (len(ordered) - begin) / len(ordered)
        return max(float(ordered[-1]), float(ordered[begin] + excess * np.log(share / self.allowed)))

    def quiet_for_threshold(self, y_N: Array) -> Array:
        """The positions of held-back samples with the labels y_N, in the order of time, that the threshold comes from:
        the earlier half of the quiet ones. Both halves have a sample where there are two."""
        quiet = np.flatnonzero(y_N == 0)
        return quiet[: (len(quiet) + 1) // 2]

    def typed(self, text: str) -> str:
        """A sample's label."""
        return text

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of what samples come with to learn from: nothing."""
        return ()

    @property
    def reading(self) -> dict[str, Any]:
        """As ``reading_of``."""
        return reading_of(self.normal)

    @property
    def told(self) -> str:
        """What the model answers, for people."""
        return f"detects anomalies, {self.text_allowed}"

    def to_learn(self, y_N: Array) -> tuple[Array, Array]:
        """(positions of the samples with the labels y_N that a model learns from, the quiet ones, its targets)."""
        quiet = np.flatnonzero(y_N == 0)
        return quiet, self.targets(len(quiet))

    def generated(self, rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        """For a rehearsal: (strength of each of some patterns in ``count`` samples, float64 [N, P], their labels)."""
        return rng.normal(size=(count, PATTERNS)) / np.sqrt(PATTERNS), np.zeros(count, np.int64)

    def measured(self, y_N: Array, scores_N1: Array) -> Measured:
        """Of held-back samples in the order of time. Raises DataError as ``Alarms.of``."""
        return self._shown(Alarms.of(self, y_N, scores_N1))

    def of_sums(self, count: int, sums: Mapping[str, Sequence[float]]) -> Measured:
        """The inverse of ``Measured.sums``, for ``count`` samples. Raises DataError for sums that no samples have."""
        if count < 1 or {name: len(one) for name, one in sums.items()} != SUMS:
            raise DataError(f"the sums {', '.join(sums)[:80]} over {count} samples", expected=", ".join(SUMS))
        quiet, anomaly, pairs = (np.asarray(sums[name], np.float64) for name in SUMS)
        found = Alarms(count, quiet, anomaly, pairs)
        every = np.concatenate([found.quiet, found.anomaly, found.pairs])
        if not np.isfinite(every).all() or (every < 0).any():
            raise DataError("the sums of alarms are negative or not finite")
        counts = np.array([found.quiet[0], found.anomaly[0], found.pairs[0], found.quiet[1], found.anomaly[1]])
        if (counts != np.floor(counts)).any() or found.quiet[0] + found.anomaly[0] != count:
            raise DataError(f"the sums count {found.quiet[0]:g} quiet samples and {found.anomaly[0]:g} anomalies",
                            expected=f"{count} together")
        if found.quiet[1] > found.quiet[0] or found.anomaly[1] > found.anomaly[0] or found.pairs[1] > found.pairs[0]:
            raise DataError("the sums count more alarms than samples")
        return self._shown(found)

    def _shown(self, alarms: Alarms) -> Measured:
        """Models are compared by the root of a quiet sample's mean squared difference, in deviations of the samples;
        the mean over quiet samples."""
        figures = measures(alarms)
        sums = {name: tuple(map(float, getattr(alarms, name))) for name in SUMS}
        distance = float(alarms.quiet[3] / alarms.quiet[0]) if alarms.quiet[0] else 0.0
        known = {COMPARED[0].key: figures.get("auroc", {}).get("all"),
                 COMPARED[1].key: distance if alarms.quiet[0] else None}
        return Measured(alarms.count, sums, figures, text_of(figures), distance,
                        () if alarms.threshold is None else (alarms.threshold,),
                        {key: value for key, value in known.items() if value is not None})


@dataclass(frozen=True, eq=False)
class Alarms:
    """Sums over samples from which the measures follow; those of several devices are added. count: samples. quiet,
    anomaly: of the quiet samples and of the anomalies: number, alarms, scores, roots of the scores, [4]. pairs: of a
    quiet sample and an anomaly of the same device: number, and those in which the anomaly has the higher score, where
    equal scores count half, [2]. threshold: that raised the alarms, of one device."""

    count: int
    quiet: Array
    anomaly: Array
    pairs: Array
    threshold: float | None = None

    @classmethod
    def of(cls, task: Anomaly, y_N: Array, scores_N1: Array) -> Alarms:
        """Of held-back samples in the order of time, with labels and scores. The threshold comes from the earlier half
        of the quiet ones, which are not counted. Raises DataError for another shape, or scores that are not finite."""
        scores_N = np.asarray(scores_N1, np.float64).reshape(-1)
        if scores_N.shape != y_N.shape or not np.isfinite(scores_N).all():
            raise DataError(f"{scores_N.size} scores of {len(y_N)} samples", expected="a finite one for each")
        used = task.quiet_for_threshold(y_N)
        threshold = task.threshold(scores_N[used])
        quiet = np.setdiff1d(np.flatnonzero(y_N == 0), used)
        parts = scores_N[quiet], scores_N[y_N == 1]
        quiet_4, anomaly_4 = (
            np.array([len(one), 0 if threshold is None else (one > threshold).sum(), one.sum(), np.sqrt(one).sum()])
            for one in parts
        )
        pairs = np.array([len(parts[0]) * len(parts[1]), _above(*parts)])
        return cls(len(parts[0]) + len(parts[1]), quiet_4, anomaly_4, pairs, threshold)


def reading_of(names: Sequence[str]) -> dict[str, Any]:
    """Options with which ``samples.load`` reads the task's samples. names: labels of quiet samples."""
    return {"normal": tuple(names)}


def measures(alarms: Alarms) -> dict[str, dict[str, float]]:
    """``alarms``, the share that raises one, and ``score``, the mean, of quiet samples and of anomalies; ``auroc``, the
    chance that an anomaly has a higher score than a quiet sample of its device. What is not defined is left out."""
    parts = {name: getattr(alarms, name) for name in LABELS}
    known = {name: one for name, one in parts.items() if one[0]}
    found = {"alarms": {name: float(one[1] / one[0]) for name, one in known.items()},
             "score": {name: float(one[2] / one[0]) for name, one in known.items()},
             "auroc": {"all": float(alarms.pairs[1] / alarms.pairs[0])} if alarms.pairs[0] else {}}
    return {name: values for name, values in found.items() if values}


def pooled(outputs: Sequence[str], rows: Sequence[tuple[int, Mapping[str, Sequence[float]]]]) -> tuple[int, Measures]:
    """(samples, measures) of several devices' ``Measured.sums``, one or more, each with its number of samples."""
    quiet, anomaly, pairs = (np.sum([np.asarray(sums[name], np.float64) for _, sums in rows], axis=0) for name in SUMS)
    alarms = Alarms(sum(count for count, _ in rows), quiet, anomaly, pairs)
    return alarms.count, measures(alarms)


def lower(measure: str, output: str) -> bool | None:
    """Whether less of a measure is better; None of the score of anomalies, which only means something beside that of
    quiet samples."""
    return None if (measure, output) == ("score", ANOMALY) else output == QUIET


def text_of(found: Measures) -> str:
    """The ``MEASURE`` for people; with labelled anomalies also the share of them that raises an alarm, and AUROC."""
    alarms = found.get("alarms", {})
    parts = [f"{100 * alarms[QUIET]:.2f} %"] if QUIET in alarms else []
    parts += [f"{100 * alarms[ANOMALY]:.1f} % of anomalies found"] if ANOMALY in alarms else []
    parts += [f"AUROC {value:.3f}" for value in found.get("auroc", {}).values()]
    return ", ".join(parts)


def whole_text(found: Measures) -> str:
    """All measures."""
    scores = ", ".join(f"{name} {value:.4g}" for name, value in found.get("score", {}).items())
    return f"{MEASURE} {text_of(found)}; mean score {scores}"


def _above(quiet_N: Array, anomaly_M: Array) -> float:
    """The pairs in which the anomaly has the higher score; equal scores count half."""
    ordered = np.sort(quiet_N)
    places = np.searchsorted(ordered, anomaly_M, "left") + np.searchsorted(ordered, anomaly_M, "right")
    return float(places.sum() / 2)
