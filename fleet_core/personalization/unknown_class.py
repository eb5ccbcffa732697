"""Detects samples of no known class: those farther from every class mean than the device's own samples are.

Each labelled sample is compared with the mean of its class without it. With d its squared distance to the mean of all n
samples of its class, the distance to the mean of the other n − 1 is d · (n / (n − 1))². A new sample, which is not in
the mean of n, lies on average (n² − 1) / n² of that from it, for independent samples: d · (n + 1) / (n − 1). The
threshold is a quantile of these distances over all classes, the ⌈quantile · (m + 1)⌉-th smallest of m as in split
conformal prediction (Vovk, Gammerman, Shafer, "Algorithmic Learning in a Random World", 2005), so that about 1 −
quantile of the samples of known classes are called unknown. With few samples the threshold is the largest distance.
Deviation: the samples are not exchangeable with new ones, because the means were made of them and a device's recordings
drift.

When every class has one sample, no sample can be left out. The threshold is then half of the average distance from each
mean to the nearest other mean. With a single sample in a single class, nothing is unknown.

Shapes: n samples, D embedding width, N classes. Distances are squared Euclidean, whichever distance the prototypes use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.base.errors import DataError
from fleet_core.personalization.nearest import MAX_DIFFERENCES, Prototypes

Array = np.ndarray[Any, Any]

SHARE_BETWEEN_MEANS = 0.5
"""The threshold as a share of the distance between class means, when every class has one sample."""


@dataclass(frozen=True, eq=False)
class Thresholds:
    """distances: float32 [N], the squared distance from each class mean beyond which a sample is not of that class;
    infinite when the samples do not determine it."""

    distances: Array

    @classmethod
    def calibrate(cls, z_nD: Array, y_n: Array, prototypes: Prototypes, quantile: float) -> Thresholds:
        """Thresholds from the embedded samples that ``prototypes`` were made of, with their labels int64 [n].

        quantile: the share of samples of known classes that should count as known, above 0 and at most 1. Raises
        DataError.
        """
        _check(z_nD, y_n, prototypes, quantile)
        n_classes = len(prototypes.counts)
        own_n = _left_out_distances(z_nD, y_n, prototypes)
        limit = _quantile(own_n, quantile) if len(own_n) else _between_means(prototypes)
        with np.errstate(over="ignore"):
            return cls(np.full(n_classes, limit, np.float64).astype(np.float32))

    def unknown(self, z_nD: Array, prototypes: Prototypes) -> Array:
        """bool [n]: whether each sample lies beyond the threshold of its nearest class. Samples that are not finite are
        unknown, and without prototypes all samples are."""
        distance_n, class_n = nearest(z_nD, prototypes)
        return np.asarray(~((distance_n <= self.distances[class_n]) & np.isfinite(distance_n)))


def nearest(z_nD: Array, prototypes: Prototypes) -> tuple[Array, Array]:
    """(squared distance float64 [n] to the nearest class mean, its class int64 [n]); inf and 0 when no class has
    samples."""
    rows = max(1, MAX_DIFFERENCES // max(1, prototypes.prototypes.size))
    distance_n, class_n = np.full(len(z_nD), np.inf), np.zeros(len(z_nD), np.int64)
    if prototypes.counts.any():
        for i in range(0, len(z_nD), rows):
            distance_nN = np.square(z_nD[i : i + rows, None].astype(np.float64) - prototypes.prototypes).sum(2)
            distance_nN[:, prototypes.counts == 0] = np.inf
            distance_n[i : i + rows], class_n[i : i + rows] = distance_nN.min(1), distance_nN.argmin(1)
    return distance_n, class_n


def _left_out_distances(z_nD: Array, y_n: Array, prototypes: Prototypes) -> Array:
    """For each sample of a class with more than one: its squared distance to its class mean, corrected to that of a new
    sample. Samples that equal their mean do not tell how far others lie and are omitted."""
    count_n = prototypes.counts[y_n]
    several, rows = np.flatnonzero(count_n > 1), max(1, MAX_DIFFERENCES // z_nD.shape[1])
    own_n = np.empty(len(several))
    for i in range(0, len(several), rows):
        some = several[i : i + rows]
        own_n[i : i + rows] = np.square(z_nD[some].astype(np.float64) - prototypes.prototypes[y_n[some]]).sum(1)
    own_n *= (count_n[several] + 1) / (count_n[several] - 1)
    return np.asarray(own_n[own_n > 0])


def _quantile(values_m: Array, quantile: float) -> float:
    """The ⌈quantile · (m + 1)⌉-th smallest of m values, or the largest when that exceeds m."""
    place = min(len(values_m), math.ceil(quantile * (len(values_m) + 1)))
    return float(np.sort(values_m)[place - 1])


def _between_means(prototypes: Prototypes) -> float:
    """``SHARE_BETWEEN_MEANS`` times the average squared distance to the nearest other mean; inf for one class."""
    means_ND = prototypes.prototypes[prototypes.counts > 0].astype(np.float64)
    if len(means_ND) < 2:
        return math.inf
    total = 0.0
    for k, mean_D in enumerate(means_ND):
        total += float(np.square(np.delete(means_ND, k, axis=0) - mean_D).sum(1).min())
    return SHARE_BETWEEN_MEANS * total / len(means_ND)


def _check(z_nD: Array, y_n: Array, prototypes: Prototypes, quantile: float) -> None:
    if not 0 < quantile <= 1:
        raise DataError(f"a quantile of {quantile}", expected="a number above 0, at most 1")
    if len(z_nD) != len(y_n) or z_nD.shape[1:] != prototypes.prototypes.shape[1:]:
        raise DataError(f"samples {list(z_nD.shape)} with {len(y_n)} labels",
                        expected=f"as many labels as samples [n, {prototypes.prototypes.shape[1]}]")
    if len(y_n) and not 0 <= y_n.min() <= y_n.max() < len(prototypes.counts):
        raise DataError(f"a label is not in 0…{len(prototypes.counts) - 1}", hint="name the class first")
