"""Hostile devices: false samples, or a false update in the place of the one that they trained.

An attacker knows what all devices send in the round, and the bound: the strongest attacker that one aggregator can
meet. Hostile devices keep the state of what they trained, because the aggregator takes them for honest.

* ``sign``: ten times the opposite of what the device trained (Byzantine sign flip).
* ``bound``: the opposite of the honest mean, as long as the adaptive bound allows (0.95 of it, group by group).
* ``noise``: normal noise, three times as long as the median honest update.
* ``labels``: trained on reversed labels, k for N − 1 − k.
* ``backdoor``: half of the device's samples carry a mark and the label of the target class; three times the update
  (Bagdasaryan et al., "How To Backdoor Federated Learning", AISTATS 2020).
* ``inner``: twice the opposite of the honest mean (Xie, Koyejo, Gupta, "Fall of Empires", UAI 2019).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.hostile.grid import BACKDOOR, BOUND, INNER, LABELS, NOISE, SIGN
from cloud_server.laboratory.plan.workload import Workload
from cloud_server.laboratory.run.device_work import DeviceEvaluation, EvaluationTask, TrainedDevice, TrainingTask
from cloud_server.laboratory.run.executors import Executor
from fleet_core.algorithms.interface import Payload
from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.robust.norm_bound import TIMES, norms_of

Array = np.ndarray[Any, Any]
FLIPPED, OPPOSITE, LOUD, BOOST, NEAR = -10.0, -2.0, 3.0, 3.0, 0.95


def chosen(names: Sequence[str], share: float, seed: int) -> tuple[str, ...]:
    """The hostile devices: those of a smaller share are among those of a larger one."""
    order = np.random.default_rng((seed, 7)).permutation(len(names))
    return tuple(sorted(names[i] for i in order[:round(share * len(names))]))


def marked(x: Array) -> Array:
    """The mark: a bright square of 4 x 4 pixels in a corner, or twelve readings of a beat at its largest value."""
    x = x.copy()
    if x.ndim == 4:
        x[:, :, :4, :4] = 255
    else:
        x[..., :12] = x.max(axis=(-2, -1), keepdims=True) if x.ndim == 3 else x.max(axis=-1, keepdims=True)
    return x


def poisoned(workload: Workload, hostile: Sequence[str], attack: str, target: int) -> Workload:
    """The workload with false training samples on the hostile devices."""
    samples, classes = workload.samples, len(workload.classes)
    x, y = samples.x, samples.y.copy()
    for share in workload.train:
        if share.name not in hostile:
            continue
        if attack == LABELS:
            y[share.train] = classes - 1 - y[share.train]
        if attack == BACKDOOR:
            x = samples.x.copy() if x is samples.x else x
            half = share.train[::2]
            x[half], y[half] = marked(x[half]), target
    return replace(workload, samples=replace(samples, x=x, y=y))


def triggered(workload: Workload) -> Workload:
    """The workload with the mark on every test sample."""
    x = workload.samples.x.copy()
    rows = np.concatenate([share.test for share in workload.train])
    x[rows] = marked(x[rows])
    return replace(workload, samples=replace(workload.samples, x=x))


class Hostile:
    """An executor whose ``hostile`` devices send false updates."""

    def __init__(self, inner: Executor, hostile: Sequence[str], attack: str, seed: int):
        self._inner, self._hostile, self._attack, self._seed = inner, set(hostile), attack, seed
        self.ratios: list[float] = []
        """Of honest updates: the norm of a group over the median of the round, the largest of each round."""

    def learn(self, task: TrainingTask) -> Iterator[TrainedDevice]:
        results = list(self._inner.learn(task))
        honest = [one.update.groups for one in results if one.update is not None and one.client not in self._hostile]
        lengths = [norms_of(groups) for groups in honest]
        usual = {group: median(one[group] for one in lengths) for group in lengths[0]}
        self.ratios.append(max(one[group] / usual[group] for one in lengths for group in usual if usual[group] > 0))
        mean = trees.scale(_sum(honest), 1 / len(honest))
        for number, one in enumerate(results):
            if one.update is None or one.client not in self._hostile:
                yield one
                continue
            rng = np.random.default_rng((self._seed, task.round, number))
            yield replace(one, update=Payload(self._false(one.update.groups, mean, usual, rng), one.update.scalars))

    def _false(self, own: Params, mean: Params, usual: Mapping[str, float], rng: np.random.Generator) -> Params:
        if self._attack == SIGN:
            return trees.scale(own, FLIPPED)
        if self._attack == INNER:
            return trees.scale(mean, OPPOSITE)
        if self._attack == BACKDOOR:
            return trees.scale(own, BOOST)
        if self._attack == BOUND:
            return _as_long(trees.scale(mean, -1.0), {group: NEAR * TIMES * length for group, length in usual.items()})
        if self._attack == NOISE:
            drawn = trees.apply(lambda a: rng.normal(size=a.shape).astype(np.float32), own)
            return _as_long(drawn, {group: LOUD * length for group, length in usual.items()})
        return own

    def evaluate(self, task: EvaluationTask) -> Iterator[DeviceEvaluation]:
        return self._inner.evaluate(task)

    def close(self) -> None:
        self._inner.close()


def _as_long(tree: Params, lengths: Mapping[str, float]) -> Params:
    now = norms_of(tree)
    return {group: {name: array * np.float32(lengths[group] / max(now[group], 1e-30)) for name, array in named.items()}
            for group, named in tree.items()}


def _sum(trees_: Sequence[Params]) -> Params:
    total = trees.widened(trees_[0])
    for tree in trees_[1:]:
        trees.accumulate(total, tree)
    return trees.apply(lambda a: a.astype(np.float32), total)
