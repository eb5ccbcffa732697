"""Detects that a model's inputs have moved, without classes, from statistics of each sample. ``drift`` has the test.

A sample's statistics are, for each channel, its mean, its standard deviation and its mean step from one reading to the
next; a sample without channels has its own numbers. Two measures follow: the squared distance to the mean of the
device's own samples in standard deviations, averaged over the statistics, and Mahalanobis' distance, which also sees
that statistics no longer move together (Hotelling, "Multivariate Quality Control", 1947). Mean and covariance come from
every second of the own samples, and the measures are ranked among those of the others, which they were not fitted to.

n: samples. S: statistics. m: ranked samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.personalization.drift import BATCH, LEAST, MOST, two_sided

Array = np.ndarray[Any, Any]

WIDEST = 128
"""With more statistics Mahalanobis' distance is left out, because its matrix takes memory."""
NAMES = ("drift_mean", "drift_deviation", "drift_inverse", "drift_distance", "drift_mahalanobis")


@dataclass(frozen=True, eq=False)
class InputReference:
    """mean, deviation: float32 [S]. inverse: of the covariance of the standardized statistics, float32 [S, S], or
    [0, 0]. distance, mahalanobis: float32 [m], each sorted; the latter is empty if it is left out."""

    mean: Array
    deviation: Array
    inverse: Array
    distance: Array
    mahalanobis: Array

    @classmethod
    def of(cls, x_n: Array) -> InputReference | None:
        """The reference of a model's inputs x_n [n, *shape]; None for tokens, or fewer samples than ``LEAST`` for each
        half."""
        if x_n.dtype.kind not in "fu" or len(x_n) < 2 * LEAST:
            return None
        count = min(len(x_n), 2 * MOST)
        found_nS = statistics(x_n[np.arange(count) * len(x_n) // count])
        fitted_nS, ranked_mS = found_nS[::2], found_nS[1::2]
        mean_S, deviation_S = fitted_nS.mean(0), fitted_nS.std(0)
        deviation_S = np.where(deviation_S > 1e-6 * (1 + np.abs(mean_S)), deviation_S, 1.0)
        inverse_SS = np.zeros((0, 0))
        if found_nS.shape[1] <= WIDEST:
            inverse_SS = _inverse((fitted_nS - mean_S) / deviation_S)
        blank = cls(*(one.astype(np.float32) for one in (mean_S, deviation_S, inverse_SS)), *np.zeros((2, 0)))
        distance_m, mahalanobis_m = (np.sort(one).astype(np.float32) for one in blank.measures(ranked_mS))
        return cls(blank.mean, blank.deviation, blank.inverse, distance_m, mahalanobis_m)

    @classmethod
    def stored(cls, arrays: Mapping[str, Array]) -> InputReference | None:
        """The reference in a personalization's arrays; None if it has none."""
        found = [arrays.get(name, np.zeros(0)) for name in NAMES]
        width, ranked = len(found[0]), len(found[3])
        shapes = ((width,), (width,), (width, width), (ranked,), (ranked,))
        if width > WIDEST:
            shapes = (*shapes[:2], (0, 0), (ranked,), (0,))
        sound = ranked >= LEAST and all(one.dtype == np.float32 for one in found)
        return cls(*map(np.asarray, found)) if sound and tuple(one.shape for one in found) == shapes else None

    def arrays(self) -> dict[str, Array]:
        """As ``stored`` reads them."""
        return dict(zip(NAMES, (self.mean, self.deviation, self.inverse, self.distance, self.mahalanobis), strict=True))

    @property
    def made_of(self) -> tuple[Array, ...]:
        """As in ``Reference``."""
        return tuple(self.arrays().values())

    def measures(self, found_nS: Array) -> tuple[Array, Array]:
        """(squared distance, Mahalanobis' distance) float64 [n] of samples with these statistics; the latter is empty
        if it is left out."""
        standard_nS = (found_nS - self.mean) / self.deviation
        distance_n = np.square(standard_nS).mean(1)
        if not self.inverse.size:
            return distance_n, np.zeros(0)
        return distance_n, np.einsum("ni,ij,nj->n", standard_nS, self.inverse.astype(np.float64), standard_nS)

    def surprise(self, x_n: Array) -> Array:
        """float64 [n, 2]: −ln p of both measures of each input; the second is 1, its mean without drift, if it is left
        out."""
        distance_n, mahalanobis_n = self.measures(statistics(x_n))
        second_n = (-np.log(two_sided(mahalanobis_n, self.mahalanobis)) if len(mahalanobis_n) else
                    np.ones(len(distance_n)))
        return np.stack([-np.log(two_sided(distance_n, self.distance)), second_n], axis=1)


def statistics(x_n: Array) -> Array:
    """float64 [n, S] of inputs [n, *shape]."""
    return np.concatenate([_statistics(x_n[i : i + BATCH].astype(np.float64)) for i in range(0, len(x_n), BATCH)])


def _statistics(x_n: Array) -> Array:
    if x_n.ndim == 2:
        return x_n
    inside = tuple(range(2, x_n.ndim))
    step_n = np.abs(np.diff(x_n, axis=-1)) if x_n.shape[-1] > 1 else np.zeros_like(x_n)
    return np.concatenate([x_n.mean(inside), x_n.std(inside), step_n.mean(inside)], axis=1)


def _inverse(standard_nS: Array) -> Array:
    """Of the covariance, shrunk towards its diagonal by S / (n + S), so that it exists for few samples too."""
    count, width = standard_nS.shape
    covariance_SS = standard_nS.T @ standard_nS / count
    share = width / (count + width)
    diagonal_S = np.diag(covariance_SS)
    shrunk_SS = (1 - share) * covariance_SS + share * np.diag(diagonal_S) + 1e-6 * np.eye(width)
    return np.asarray(np.linalg.inv(shrunk_SS))
