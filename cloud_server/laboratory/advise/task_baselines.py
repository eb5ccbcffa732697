"""Figures on the evaluated samples without a fleet's model: of an answer that does not look at the sample, and of plain
models. The counterpart of ``simple_baselines`` for the tasks without classes.

- numbers: each device's mean; ridge regression on the values of all devices' samples;
- several labels: each device's most frequent labels; a logistic regression for each label on spectrum and statistics
  (``plain_baseline.features``), of all devices' samples and of each device's own;
- anomalies: each device's mean quiet sample, and its nearest quiet sample, each as a repetition of the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloud_server.laboratory.plan.workload import Part, Workload
from fleet_core.model.layout import InputSpec
from fleet_core.personalization import plain_baseline
from fleet_core.personalization.linear_head import LabelHead
from fleet_core.personalization.ridge_head import RidgeHead
from fleet_core.tasks import anomaly, labels, regression
from fleet_core.tasks.labels import sigmoid
from fleet_core.tasks.measured import Figure
from fleet_core.tasks.task import KINDS, together

Array = np.ndarray[Any, Any]
Answers = Callable[[Part, Array], Array]
"""(what a device learns from, samples x) -> answers to x, as the task's ``measured`` takes them."""

TITLES = {
    "own_mean": "each device's mean", "ridge": "ridge regression on the samples of all devices",
    "own_labels": "each device's most frequent labels", "logistic": "logistic regression on the samples of all devices",
    "own_logistic": "each device's own logistic regression", "guess": "guessing",
    "nearest": "each device's nearest quiet sample",
}
"""Of the baselines, by their keys."""
GUESS = "guess"
MOST_VALUES, MOST_SAMPLES = 2000, 5000
"""Values of a sample with which ridge regression is computed; samples that a plain model learns from, spread over
all."""
STEPS = 500
"""Of a logistic regression."""
NO_BETTER = 0.98
"""A model that is further from the best possible figure than this share of a constant answer's distance is no better
than that answer."""
AT_ONCE = 64
"""Samples whose distances are in memory."""


@dataclass(frozen=True)
class TaskBaselines:
    """figure: what is measured, over all samples of all devices. constant: key and figure of an answer that does not
    look at the sample. plain: figures of plain models. Keys are those of ``TITLES``."""

    figure: Figure
    constant: tuple[str, float]
    plain: Mapping[str, float]

    def facts(self) -> dict[str, Any]:
        return {"measure": self.figure.key, self.constant[0]: self.constant[1], **self.plain}

    def near_constant(self, value: float) -> bool:
        return self._short(value) > NO_BETTER * self._short(self.constant[1])

    def warnings(self, name: str, value: float, rounds: int, *, plain: bool) -> list[str]:
        """Warnings about a model that is no better than a constant answer. plain: also than a plain model."""
        after, (key, constant) = f"{name}: {self.figure.name} {value:.3f} after {rounds} rounds", self.constant
        found = [f"{after}, and {TITLES[key]} has {constant:.3f}"] if self.near_constant(value) else []
        best = min(self.plain, key=lambda one: self._short(self.plain[one]), default=None)
        if plain and best is not None and self._short(self.plain[best]) < self._short(value):
            found.append(f"{after}, and {TITLES[best]}, without a fleet, has {self.plain[best]:.3f}")
        return found

    def _short(self, value: float) -> float:
        """How far it is from the best possible one."""
        return value if self.figure.lower else 1 - value


def on_test_samples(work: Workload) -> TaskBaselines:
    """The baselines on the test samples of the devices that train."""
    return _measured(work, [(work.own(one), work.later(one)) for one in work.train])


def on_new_devices(work: Workload, support: float, seed: int) -> TaskBaselines:
    """The baselines on the query samples of new devices, which learn from a share ``support`` of their samples."""
    return _measured(work, [work.divided(one, support, seed) for one in work.new])


def _measured(work: Workload, devices: Sequence[tuple[Part, Part]]) -> TaskBaselines:
    """devices: (what it learns from, samples to evaluate on) of each evaluated device."""
    task = work.task
    assert task is not None
    found = dict[str, Mapping[str, float]]()
    for key, answers in MAKERS[task.kind](work, [work.own(one) for one in work.train]).items():
        measured = [task.measured(later.y, answers(own, later.x)) for own, later in devices]
        found[key] = together(task, [one for one in measured if one.samples]).compared
    figure = next(one for one in KINDS[task.kind].COMPARED if all(one.key in known for known in found.values()))
    (first, constant), *others = ((key, known[figure.key]) for key, known in found.items())
    if figure.chance is not None:
        return TaskBaselines(figure, (GUESS, figure.chance), {first: constant, **dict(others)})
    return TaskBaselines(figure, (first, constant), dict(others))


def _of_numbers(work: Workload, own: Sequence[Part]) -> dict[str, Answers]:
    found: dict[str, Answers] = {"own_mean": lambda own, x: np.tile(own.y.mean(0), (len(x), 1))}
    if work.samples.x.dtype != np.int64 and work.samples.x[0].size <= MOST_VALUES:
        x, y = _spread(own)
        head = RidgeHead.fit(_flat(x), y)
        found["ridge"] = lambda own, x: head.answers(_flat(x))
    return found


def _of_labels(work: Workload, own: Sequence[Part]) -> dict[str, Answers]:
    found: dict[str, Answers] = {"own_labels": lambda own, x: np.tile(own.y.mean(0), (len(x), 1))}
    if plain_baseline.applies_to(work.samples.x):
        every = _logistic(*_spread(own))
        found["logistic"] = lambda own, x: every(x)
        found["own_logistic"] = lambda own, x: _logistic(own.x, own.y)(x)
    return found


def _logistic(x: Array, y: Array) -> Callable[[Array], Array]:
    """Samples -> the probability of each label."""
    features_SF = plain_baseline.features(x)
    mean_F, deviation_F = plain_baseline.moments(features_SF)

    def standardized(features_nF: Array) -> Array:
        found: Array = (features_nF - mean_F) / deviation_F
        return found

    head = LabelHead.fit(standardized(features_SF), y, steps=STEPS)
    return lambda x: sigmoid(head.answers(standardized(plain_baseline.features(x))))


def _of_anomalies(work: Workload, own: Sequence[Part]) -> dict[str, Answers]:
    def scores(repeated: Callable[[Array, Array], Array]) -> Answers:
        """repeated: (quiet samples, samples), standardized, -> the samples' repetitions."""

        def answers(own: Part, x: Array) -> Array:
            quiet_SK, x_NK = _standardized(own.x, work.spec), _standardized(x, work.spec)
            found: Array = np.square(repeated(quiet_SK, x_NK) - x_NK).mean(1, keepdims=True)
            return found

        return answers

    return {"own_mean": scores(lambda quiet_SK, x_NK: quiet_SK.mean(0)), "nearest": scores(_nearest)}


def _nearest(quiet_SK: Array, x_NK: Array) -> Array:
    step = -(-len(quiet_SK) // MOST_SAMPLES)
    few_SK = quiet_SK[::step]
    length_S = np.square(few_SK).sum(1)
    parts = [few_SK[(length_S - 2 * x_NK[k : k + AT_ONCE] @ few_SK.T).argmin(1)] for k in range(0, len(x_NK), AT_ONCE)]
    return np.concatenate(parts)


MAKERS: Mapping[str, Callable[[Workload, Sequence[Part]], dict[str, Answers]]] = {
    regression.KIND: _of_numbers, labels.KIND: _of_labels, anomaly.KIND: _of_anomalies,
}
"""Of each task: the constant answer first, then the plain models that its samples allow."""


def _spread(own: Sequence[Part]) -> tuple[Array, Array]:
    """Samples and truths of all devices, at most ``MOST_SAMPLES``."""
    x, y = (np.concatenate(parts) for parts in zip(*((one.x, one.y) for one in own), strict=True))
    step = -(-len(x) // MOST_SAMPLES)
    return x[::step], y[::step]


def _flat(x: Array) -> Array:
    return x.reshape(len(x), -1).astype(np.float32)


def _standardized(x: Array, spec: InputSpec) -> Array:
    """Samples as a model gets them, float64 [N, K]."""
    channels = (-1, *[1] * (len(spec.shape) - 1))
    found = x.astype(np.float64) * spec.scale
    if spec.mean:
        found = found - np.reshape(spec.mean, channels)
    return (found / np.reshape(spec.std, channels) if spec.std else found).reshape(len(x), -1)
