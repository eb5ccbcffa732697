"""Detects without labels that a device's samples have moved away from those that it was personalized on.

Each answered sample has two measures from its embedding and the class means: its squared distance to the nearest mean,
and its margin, (d₂ − d₁) / (d₂ + d₁) of its two smallest distances, which says how much nearer the nearest mean is. A
measure's p-value is its two-sided rank among the same measures of the samples that the means were made of, each left
out of its own class's mean. Without drift −ln p has a mean of about 1. For each measure Page's cumulative sum (Page,
"Continuous Inspection Schemes", Biometrika 1954) adds −ln p − 1 − ``SLACK`` and never falls below 0; above ``LIMIT``
the samples have moved. Both constants were chosen on validation devices (``benchmarks/drift``).

n: samples. D: embedding width. N: classes. m: samples of the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fleet_core.personalization.nearest import Prototypes

Array = np.ndarray[Any, Any]

SLACK, LIMIT = 1.0, 30.0
LEAST, MOST = 20, 1000
"""The fewest and the most samples of a reference."""
NAMES = ("drift_distance", "drift_margin")
BATCH = 256


@dataclass(frozen=True, eq=False)
class Reference:
    """means: of the classes. distance, margin: float32 [m], each sorted, of the samples that they were made of."""

    means: Prototypes
    distance: Array
    margin: Array

    @classmethod
    def of(cls, z_nD: Array, y_n: Array, means: Prototypes) -> Reference | None:
        """The reference of the embedded samples, with labels int64 [n], that ``means`` were made of; None if samples
        of classes with more than one are fewer than ``LEAST``, or of one class."""
        several = np.flatnonzero(means.counts[y_n] > 1)
        if len(several) < LEAST or len(np.unique(y_n[several])) < 2:
            return None
        kept = several[np.arange(min(len(several), MOST)) * len(several) // min(len(several), MOST)]
        both = measures(z_nD[kept], means, y_n[kept])
        return cls(means, *(np.sort(one).astype(np.float32) for one in both))

    @classmethod
    def stored(cls, arrays: Mapping[str, Array], means: Prototypes) -> Reference | None:
        """The reference in a personalization's arrays; None if it has none."""
        found = [arrays.get(name) for name in NAMES]
        sound = all(one is not None and one.ndim == 1 and len(one) >= LEAST and one.dtype == np.float32
                    for one in found)
        return cls(means, np.asarray(found[0]), np.asarray(found[1])) if sound else None

    def arrays(self) -> dict[str, Array]:
        """As ``stored`` reads them."""
        return dict(zip(NAMES, (self.distance, self.margin), strict=True))

    @property
    def made_of(self) -> tuple[Array, ...]:
        """Arrays by which this reference is known from any other."""
        return self.means.prototypes, self.distance, self.margin

    def surprise(self, z_nD: Array) -> Array:
        """float64 [n, 2]: −ln p of distance and margin of each embedded sample."""
        pairs = zip(measures(z_nD, self.means), (self.distance, self.margin), strict=True)
        return np.stack([-np.log(two_sided(values, known)) for values, known in pairs], axis=1)


def measures(z_nD: Array, means: Prototypes, y_n: Array | None = None) -> tuple[Array, Array]:
    """(squared distance float64 [n] to the nearest mean, margin float64 [n]). y_n: labels of samples that the means
    were made of: each is left out of the mean of its class, which has at least two."""
    found = [_measures(z_nD[i : i + BATCH], means, None if y_n is None else y_n[i : i + BATCH])
             for i in range(0, len(z_nD), BATCH)]
    return np.concatenate([one[0] for one in found]), np.concatenate([one[1] for one in found])


def _measures(z_nD: Array, means: Prototypes, y_n: Array | None) -> tuple[Array, Array]:
    known = np.flatnonzero(means.counts)
    distance_nN = np.stack([np.square(z_nD.astype(np.float64) - means.prototypes[k]).sum(1) for k in known], axis=1)
    if y_n is not None:
        count = means.counts[y_n].astype(np.float64)
        distance_nN[np.arange(len(y_n)), np.searchsorted(known, y_n)] *= np.square(count / (count - 1))
    nearest = np.sort(distance_nN, axis=1)[:, :2]
    total = nearest.sum(1)
    return nearest[:, 0], np.divide(nearest[:, -1] - nearest[:, 0], total, out=np.zeros(len(z_nD)), where=total > 0)


def two_sided(values_n: Array, known_m: Array) -> Array:
    """p-values: twice the smaller tail of each value among the sorted known ones, at most 1."""
    below = (np.searchsorted(known_m, values_n, side="right") + 1) / (len(known_m) + 1)
    above = (len(known_m) - np.searchsorted(known_m, values_n, side="left") + 1) / (len(known_m) + 1)
    return np.asarray(np.minimum(1.0, 2 * np.minimum(below, above)))


@dataclass(frozen=True)
class Sums:
    """The cumulative sums after ``answered`` samples. moved_at: number of samples answered when a sum first passed
    ``LIMIT``; 0: none has."""

    distance: float = 0.0
    margin: float = 0.0
    answered: int = 0
    moved_at: int = 0

    @property
    def moved(self) -> bool:
        return self.moved_at > 0

    def after(self, surprise_n2: Array, slack: float = SLACK, limit: float = LIMIT) -> Sums:
        """These sums after more samples, as ``Reference.surprise`` gives them. ``moved_at`` never changes again once it
        is set."""
        distance, margin, answered, moved_at = self.distance, self.margin, self.answered, self.moved_at
        for one, other in surprise_n2:
            distance, margin = (max(0.0, old + float(new) - 1 - slack)
                                for old, new in ((distance, one), (margin, other)))
            answered += 1
            if not moved_at and max(distance, margin) > limit:
                moved_at = answered
        return replace(self, distance=distance, margin=margin, answered=answered, moved_at=moved_at)
