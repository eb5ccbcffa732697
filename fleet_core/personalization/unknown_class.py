"""Whether a sample is of none of a device's classes: farther from every class mean than the device's own samples are.

Each labelled sample is set against the mean of its class without it. With d its squared distance to the mean of all n
samples of its class, that to the mean of the other n − 1 is d · (n / (n − 1))², of which (n² − 1) / n² is what a sample
that the mean never held lies from it on average, samples being independent: d · (n + 1) / (n − 1). The threshold is a
quantile of these over all classes, the ⌈quantile · (m + 1)⌉-th smallest of m as in split conformal prediction (Vovk,
Gammerman, Shafer, "Algorithmic Learning in a Random World", 2005), so that about 1 − quantile of the samples of known
classes are called unknown; with few samples it is the largest. Deviation: the samples are not exchangeable with new
ones, because they made the means themselves, and a device's own recordings drift.

Where every class has one sample there is nothing to leave out: the threshold is then half of what the means lie apart
on average, each from its nearest. One class with one sample says nothing, and nothing is unknown.

Shapes: n samples, D embedding width, N classes. Distances are squared Euclidean, whichever the prototypes answer by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.base.errors import DataError
from fleet_core.personalization.nearest import Prototypes

Array = np.ndarray[Any, Any]

MAX_DIFFERENCES = 1 << 20
"""Numbers at once in the differences between samples and class means (8 MiB), unless a single sample takes more."""
APART = 0.5
"""Share of the distance between class means that is the threshold where every class has one sample."""


@dataclass(frozen=True, eq=False)
class Thresholds:
    """distances: float32 [N], the squared distance from the mean of each class beyond which a sample is none of it;
    infinite where the samples say nothing about it."""

    distances: Array

    @classmethod
    def calibrate(cls, z_nD: Array, y_n: Array, prototypes: Prototypes, quantile: float) -> Thresholds:
        """Thresholds from the samples that ``prototypes`` are the means of, embedded, with their labels int64 [n].

        quantile: the share of known samples that is to stay known, above 0 and at most 1. Raises DataError.
        """
        _check(z_nD, y_n, prototypes, quantile)
        n_classes = len(prototypes.counts)
        own_n = _left_out(z_nD, y_n, prototypes)
        limit = _quantile(own_n, quantile) if len(own_n) else _between(prototypes)
        with np.errstate(over="ignore"):
            return cls(np.full(n_classes, limit, np.float64).astype(np.float32))

    def unknown(self, z_nD: Array, prototypes: Prototypes) -> Array:
        """bool [n]: whether each sample lies beyond the threshold of its nearest class. A value that is not finite is
        unknown; with no prototype at all everything is."""
        distance_n, class_n = nearest(z_nD, prototypes)
        return np.asarray(~((distance_n <= self.distances[class_n]) & np.isfinite(distance_n)))


def nearest(z_nD: Array, prototypes: Prototypes) -> tuple[Array, Array]:
    """(squared distance float64 [n] to the nearest class mean, its class int64 [n]); inf and 0 where no class has
    samples."""
    rows = max(1, MAX_DIFFERENCES // max(1, prototypes.prototypes.size))
    distance_n, class_n = np.full(len(z_nD), np.inf), np.zeros(len(z_nD), np.int64)
    if prototypes.counts.any():
        for i in range(0, len(z_nD), rows):
            distance_nN = np.square(z_nD[i : i + rows, None].astype(np.float64) - prototypes.prototypes).sum(2)
            distance_nN[:, prototypes.counts == 0] = np.inf
            distance_n[i : i + rows], class_n[i : i + rows] = distance_nN.min(1), distance_nN.argmin(1)
    return distance_n, class_n


def _left_out(z_nD: Array, y_n: Array, prototypes: Prototypes) -> Array:
    """Of every sample of a class that has more than one: its squared distance to its class, as a new sample's would be.
    Samples that equal their mean say nothing about how far others lie and are left out."""
    count_n = prototypes.counts[y_n]
    several = count_n > 1
    own_n = np.square(z_nD[several].astype(np.float64) - prototypes.prototypes[y_n[several]]).sum(1)
    own_n *= (count_n[several] + 1) / (count_n[several] - 1)
    return np.asarray(own_n[own_n > 0])


def _quantile(values_m: Array, quantile: float) -> float:
    """The ⌈quantile · (m + 1)⌉-th smallest, or the largest where that is none of them."""
    place = min(len(values_m), math.ceil(quantile * (len(values_m) + 1)))
    return float(np.sort(values_m)[place - 1])


def _between(prototypes: Prototypes) -> float:
    """``APART`` times the mean over classes of the squared distance to the nearest other mean; inf for one class."""
    means_ND = prototypes.prototypes[prototypes.counts > 0].astype(np.float64)
    if len(means_ND) < 2:
        return math.inf
    total = 0.0
    for k, mean_D in enumerate(means_ND):
        total += float(np.square(np.delete(means_ND, k, axis=0) - mean_D).sum(1).min())
    return APART * total / len(means_ND)


def _check(z_nD: Array, y_n: Array, prototypes: Prototypes, quantile: float) -> None:
    if not 0 < quantile <= 1:
        raise DataError(f"a quantile of {quantile}", expected="a number above 0, at most 1")
    if len(z_nD) != len(y_n) or z_nD.shape[1:] != prototypes.prototypes.shape[1:]:
        raise DataError(f"samples {list(z_nD.shape)} with {len(y_n)} labels",
                        expected=f"as many labels as samples [n, {prototypes.prototypes.shape[1]}]")
    if len(y_n) and not 0 <= y_n.min() <= y_n.max() < len(prototypes.counts):
        raise DataError(f"a label is not in 0…{len(prototypes.counts) - 1}", hint="name the class first")
