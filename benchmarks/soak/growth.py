"""What grows: the slope of each figure over the rounds, within the lives of its process, after the warm-up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

SETTLE = 10
"""Samples of each life that are left out: a process takes its memory at its first rounds."""
SHARE, SIGMAS = 0.02, 3.0
"""A figure grows if 100 rounds add more than this share of its level, and more than so many standard errors."""


@dataclass(frozen=True)
class Sample:
    """A figure after a round. life: which start of the process it is of."""

    round: int
    life: int
    value: float


@dataclass(frozen=True)
class Growth:
    """level: the mean. per_100: what 100 rounds add. error: standard error of that, from residuals that are taken as
    independent. samples: after the warm-up; with fewer than three in every life there is no slope."""

    level: float
    per_100: float | None
    error: float | None
    samples: int

    @property
    def grows(self) -> bool:
        if self.per_100 is None or self.error is None:
            return False
        return self.per_100 > SHARE * self.level and self.per_100 > SIGMAS * self.error


def growth(samples: Sequence[Sample], warm_up: int) -> Growth:
    """Least squares with one slope and a level for each life. warm_up: rounds that are left out."""
    lives: dict[int, list[Sample]] = {}
    for one in samples:
        lives.setdefault(one.life, []).append(one)
    kept = [late for life in lives.values() if len(late := [s for s in life[SETTLE:] if s.round > warm_up]) > 2]
    values = np.array([one.value for life in kept for one in life])
    if not kept:
        return Growth(float(np.mean([one.value for one in samples])) if samples else 0.0, None, None, 0)
    x = np.concatenate([_centred([one.round for one in life]) for life in kept])
    y = np.concatenate([_centred([one.value for one in life]) for life in kept])
    slope = float(x @ y / (x @ x))
    left = len(x) - len(kept) - 1
    error = math.sqrt(float(((y - slope * x) ** 2).sum()) / max(left, 1) / float(x @ x))
    return Growth(float(values.mean()), 100 * slope, 100 * error, len(x))


def _centred(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    found = np.array(values, np.float64)
    return found - found.mean()


def of_result(result: Mapping[str, object]) -> dict[str, Growth]:
    """Every figure of a result."""
    series, warm_up = result["series"], result["warm_up"]
    assert isinstance(series, Mapping)
    assert isinstance(warm_up, int)
    return {name: growth([Sample(int(r), int(life), float(v)) for r, life, v in points], warm_up)
            for name, points in series.items()}
