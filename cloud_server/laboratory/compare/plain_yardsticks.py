"""What is known without any model about the samples that devices are evaluated on: how far chance and a plain baseline
get, so that a model's figures can be told from both.

Shapes: N classes, M devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloud_server.laboratory.run.workload import Part, Workload
from cloud_server.reports.formatting import share_text
from cloud_server.reports.scores import Score
from cloud_server.reports.verdict import ANOTHER_MODEL, LABELS, chance, learnable, near_chance, score, worse
from fleet_core.personalization import plain_baseline
from fleet_core.personalization.plain_baseline import Baseline

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Yardsticks:
    """frequent: each device's most frequent class, as it answers everything (by macro-F1 the better of it and of
    guessing). plain: a plain baseline that learned from all training devices together, its method in words; None for
    tokens. truth: int64 [N], the evaluated samples of each class."""

    frequent: Score
    plain: Score | None
    truth: Array

    def warnings(self, name: str, found: Score, loss: float | None, rounds: int) -> list[str]:
        """What is wrong with a model's figures on the same samples, and what to try; empty where nothing is. loss: of
        its training."""
        said = [*self.by_chance(name, found, loss, rounds)]
        if self.plain is not None and worse(found, self.plain, self.truth):
            said.append(f"{name}: a plain baseline ({self.plain.method}) reaches {share_text(self.plain.accuracy)}, "
                        f"this model {share_text(found.accuracy)} after {rounds} rounds")
        if not said:
            return []
        unlearnable = self.plain is not None and not learnable(self.plain, self.frequent)
        return [*said, f"try {ANOTHER_MODEL}" + (f"; look {LABELS}" if unlearnable else "")]

    def by_chance(self, name: str, found: Score, loss: float | None, rounds: int) -> list[str]:
        """Whether the figures are near chance, in a sentence; empty where they are not."""
        began = near_chance(found, self.frequent, self.truth, loss)
        if not began:
            return []
        return [f"{name}: {began}: {share_text(found.accuracy)} after {rounds} rounds, where the most frequent class "
                f"has {share_text(self.frequent.accuracy)}"]


def of_later(work: Workload) -> Yardsticks:
    """On the later samples of the devices that train."""
    return _measured(work, [(work.own(share), work.later(share)) for share in work.train])


def of_new(work: Workload, support: float, seed: int) -> Yardsticks:
    """On what new devices are evaluated on, which learn from a share ``support`` of theirs."""
    return _measured(work, [work.divided(share, support, seed) for share in work.new])


def _measured(work: Workload, devices: Sequence[tuple[Part, Part]]) -> Yardsticks:
    """devices: (what it learns from, what it is evaluated on) of each that is evaluated."""
    n = len(work.classes)
    devices = [(own, asked) for own, asked in devices if len(asked.y)]
    truths_MN = np.array([np.bincount(asked.y, minlength=n) for _, asked in devices])
    frequent_NN = np.zeros((n, n))
    for (own, _), truth in zip(devices, truths_MN, strict=True):
        frequent_NN[:, int(np.bincount(own.y, minlength=n).argmax())] += truth
    return Yardsticks(chance(frequent_NN, truths_MN), _plain(work, devices), truths_MN.sum(0))


def _plain(work: Workload, devices: Sequence[tuple[Part, Part]]) -> Score | None:
    learned = [work.own(share) for share in work.train]
    if not plain_baseline.applies_to(learned[0].x):
        return None
    n = len(work.classes)
    made = Baseline.fit(np.concatenate([one.x for one in learned]), np.concatenate([one.y for one in learned]), n)
    counts = np.sum([plain_baseline.counted(asked.y, made.labels(asked.x), n) for _, asked in devices], axis=0)
    return score(counts, plain_baseline.described(made.name, work.samples.x.shape[1:]))
