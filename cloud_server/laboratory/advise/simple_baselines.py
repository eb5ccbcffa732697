"""Scores on the evaluated samples without a fleet's model: of the most frequent class, and of a plain baseline.

A model's figures are compared with both.

Shapes: N classes, M devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloud_server.figures.formatting import share_text
from cloud_server.figures.scores import Score
from cloud_server.laboratory.plan.workload import Part, Workload
from cloud_server.results.verdict import ANOTHER_MODEL, LABELS, chance, learnable, near_chance, score, worse
from fleet_core.personalization import plain_baseline
from fleet_core.personalization.plain_baseline import Baseline

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class SimpleBaselines:
    """frequent: score if each device always answers its most frequent class (for macro-F1, or guesses, if that is
    better). plain: score of a plain baseline fitted to all training devices together, with its method in words; None
    for tokens. truth: int64 [N], the evaluated samples of each class."""

    frequent: Score
    plain: Score | None
    truth: Array

    def warnings(self, name: str, found: Score, loss: float | None, rounds: int) -> list[str]:
        """Warnings about a model that is no better than a baseline on the same samples, and what to try; else empty.
        loss: the model's training loss."""
        warnings = self.near_chance(name, found, loss, rounds)
        if self.plain is not None and worse(found, self.plain, self.truth):
            plain = f"a plain baseline ({self.plain.method}) reaches {share_text(self.plain.accuracy)}"
            warnings.append(f"{name}: {plain}, this model {share_text(found.accuracy)} after {rounds} rounds")
        if not warnings:
            return []
        unlearnable = self.plain is not None and not learnable(self.plain, self.frequent)
        return [*warnings, f"try {ANOTHER_MODEL}" + (f"; look {LABELS}" if unlearnable else "")]

    def near_chance(self, name: str, found: Score, loss: float | None, rounds: int) -> list[str]:
        """One warning if the figures are near chance, else empty."""
        text = near_chance(found, self.frequent, self.truth, loss)
        if not text:
            return []
        return [f"{name}: {text}: {share_text(found.accuracy)} after {rounds} rounds, where the most frequent class "
                f"has {share_text(self.frequent.accuracy)}"]


def on_test_samples(work: Workload) -> SimpleBaselines:
    """The baselines on the test samples of the devices that train."""
    return _measured(work, [(work.own(share), work.later(share)) for share in work.train])


def on_new_devices(work: Workload, support: float, seed: int) -> SimpleBaselines:
    """The baselines on the query samples of new devices, which learn from a share ``support`` of their samples."""
    return _measured(work, [work.divided(share, support, seed) for share in work.new])


def _measured(work: Workload, devices: Sequence[tuple[Part, Part]]) -> SimpleBaselines:
    """devices: (samples to learn from, samples to evaluate on) of each evaluated device."""
    n = len(work.classes)
    devices = [(own, asked) for own, asked in devices if len(asked.y)]
    truths_MN = np.array([np.bincount(asked.y, minlength=n) for _, asked in devices])
    frequent_NN = np.zeros((n, n))
    for (own, _), truth in zip(devices, truths_MN, strict=True):
        frequent_NN[:, int(np.bincount(own.y, minlength=n).argmax())] += truth
    return SimpleBaselines(chance(frequent_NN, truths_MN), _plain(work, devices), truths_MN.sum(0))


def _plain(work: Workload, devices: Sequence[tuple[Part, Part]]) -> Score | None:
    learned = [work.own(share) for share in work.train]
    if not plain_baseline.applies_to(learned[0].x):
        return None
    n = len(work.classes)
    made = Baseline.fit(np.concatenate([one.x for one in learned]), np.concatenate([one.y for one in learned]), n)
    counts = np.sum([plain_baseline.counted(asked.y, made.labels(asked.x), n) for _, asked in devices], axis=0)
    return score(counts, plain_baseline.described(made.name, work.samples.x.shape[1:]))
