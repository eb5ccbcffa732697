"""Answers from a device's own samples, in numpy: by class means, or by nearest neighbours combined with a head.

Prototypes: Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017, eq. 1-2, with the
squared Euclidean distance (Acar et al., ICML 2021, §2). A new sample updates its class's mean, without a gradient.
Neighbours: Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local Memorization", ICML 2022, eq.
5-7 (kNN-Per); the authors' program weights by exp(−distance² / D) instead of exp(−distance).

Shapes: n samples, D embedding width, N classes, S stored samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fleet_core.base import storage
from fleet_core.base.errors import DataError, StateError
from fleet_core.base.trees import Params

Array = np.ndarray[Any, Any]

MAX_DIFFERENCES = 1 << 18
"""The most differences of samples from class means (1 to 2 MiB) in one array; one sample may exceed it."""
MAX_BYTES = 64 << 20
MAX_DISTANCES = 1 << 17
"""The most distances (1 MiB) in one array; one sample may exceed it."""
BLOCK = 1024
"""Stored samples that are made float64 at a time."""
FARTHEST = np.finfo(np.float32).max
"""Distances are clipped to it, so that only classes without samples have an infinite distance."""
SHARES = tuple(k / 10 for k in range(11))
"""The values of λ that are tried, as in the paper."""


@dataclass(frozen=True)
class Prototypes:
    """Class means.

    prototypes: float32 [N, D], 0 for a class without samples. counts: int64 [N], samples per class. weights: id of the
    encoder's weights; the means are valid only with these. distance: ``squared``, or ``norm`` for the distance itself
    (Lim et al. 2024), which changes the probabilities but not the nearest class. frequent: a class counts as likely
    beforehand as its share of the samples, in place of all alike: log(share) is added to −distance.
    """

    prototypes: Array
    counts: Array
    weights: str = ""
    distance: str = "squared"
    frequent: bool = False

    @classmethod
    def empty(
        cls, n_classes: int, width: int, weights: str = "", distance: str = "squared", frequent: bool = False
    ) -> Prototypes:
        counts = np.zeros(n_classes, np.int64)
        return cls(np.zeros((n_classes, width), np.float32), counts, weights, distance, frequent)

    @classmethod
    def from_support(
        cls, embed_fn: Callable[[Array], Array], x: Array, y: Array, n_classes: int, weights: str = "",
        distance: str = "squared",
    ) -> Prototypes:
        """Class means of ``embed_fn(x)`` for raw samples x [n, *shape] with labels y [n]. Raises DataError."""
        z_nD = embed_fn(x)
        return cls.empty(n_classes, z_nD.shape[1], weights, distance).add(z_nD, y)

    @classmethod
    def of_fleet(cls, params: Params, weights: str = "") -> Prototypes:
        """Class means from the totals and counts that a fleet shares (FedProto)."""
        total, count = params["prototypes"]["total"], params["prototypes"]["count"]
        means = (total / np.maximum(count, 1)[:, None]).astype(np.float32)
        return cls(means, np.ceil(count).astype(np.int64), weights)

    def add(self, z_nD: Array, y_n: Array) -> Prototypes:
        """These prototypes updated with more samples: mu + (z − mu)/n per class. Raises DataError for a label ≥ N."""
        if len(z_nD) != len(y_n):
            raise DataError(f"{len(z_nD)} samples and {len(y_n)} labels")
        if len(y_n) and not 0 <= y_n.min() <= y_n.max() < len(self.counts):
            raise DataError(f"a label is not in 0…{len(self.counts) - 1}", hint="name the class first")
        mean, counts = self.prototypes.astype(np.float64), self.counts.copy()
        for label in np.unique(y_n):
            of_class = z_nD[y_n == label]
            counts[label] += len(of_class)
            mean[label] += (of_class - mean[label]).sum(0) / counts[label]
        return replace(self, prototypes=mean.astype(np.float32), counts=counts)

    def probabilities(self, z_nD: Array) -> Array:
        """softmax(−distance) float32 [n, N]; 0 for a class without samples. Raises StateError when no class has any."""
        if not self._any:
            raise StateError("there is no labelled sample to personalize with", hint="add some: edge-agent samples add")
        rows = max(1, MAX_DIFFERENCES // max(1, self.prototypes.size))
        if len(z_nD) <= rows:
            return softmax(self._scores(z_nD))
        return np.concatenate([softmax(self._scores(z_nD[i : i + rows])) for i in range(0, len(z_nD), rows)])

    @cached_property
    def _any(self) -> bool:
        return bool(self.counts.any())

    @cached_property
    def _complete(self) -> bool:
        return bool(self.counts.all())

    def _scores(self, z_nD: Array) -> Array:
        with np.errstate(over="ignore"):
            difference_nND = z_nD[:, None] - self.prototypes
            distance_nN = np.add.reduce(np.multiply(difference_nND, difference_nND, out=difference_nND), axis=2)
        if self.distance == "norm":
            distance_nN = np.sqrt(distance_nN)
        scores_nN = np.negative(np.minimum(distance_nN, FARTHEST))
        if self.frequent:
            scores_nN += np.log(np.maximum(self.counts, 1) / self.counts.sum()).astype(np.float32)
        return scores_nN if self._complete else np.where(self.counts > 0, scores_nN, np.float32(-np.inf))

    def save(self, path: Path) -> None:
        """Writes a file with mode 0600, because prototypes reveal the device's data. Raises StateError."""
        arrays = {"prototypes": self.prototypes, "counts": self.counts}
        metadata = {"weights": self.weights, "distance": self.distance}
        storage.write_atomic(path, storage.pack(arrays, metadata), mode=0o600)

    @classmethod
    def load(cls, path: Path) -> Prototypes:
        """The prototypes in a file. Raises StateError when it cannot be read or holds none."""
        arrays, metadata = storage.unpack(storage.read_bytes(path, limit=MAX_BYTES), where=str(path))
        return cls.checked(arrays, metadata.get("weights", ""), metadata.get("distance", "squared"), where=str(path))

    @classmethod
    def checked(
        cls, arrays: Mapping[str, Array], weights: str = "", distance: str = "squared", *, where: str | None = None
    ) -> Prototypes:
        """Prototypes from the arrays of a file. Raises StateError when they are not valid prototypes."""
        prototypes, counts = (arrays.get(name, np.empty(0)) for name in ("prototypes", "counts"))
        found = cls(prototypes, counts, weights, distance)
        if not found._valid():
            raise StateError("holds no prototypes", where=where, hint="personalize again")
        return found

    def widened(self, n_classes: int) -> Prototypes:
        """These prototypes with ``n_classes`` classes; the added ones have no samples."""
        more = n_classes - len(self.counts)
        means, counts = np.pad(self.prototypes, ((0, more), (0, 0))), np.pad(self.counts, (0, more))
        return replace(self, prototypes=means, counts=counts)

    def _valid(self) -> bool:
        return (
            self.prototypes.ndim == 2
            and self.prototypes.dtype == np.float32
            and bool(np.isfinite(self.prototypes).all())
            and self.counts.shape == self.prototypes.shape[:1]
            and self.counts.dtype == np.int64
            and bool((self.counts >= 0).all())
        )


@dataclass(frozen=True)
class Neighbours:
    """The device's own embedded samples. z: float32 [S, D]. y: int64 [S]. classes: N. count: k, the number of
    neighbours that vote. share: λ, the weight of the neighbours in the answer."""

    z: Array
    y: Array
    classes: int
    count: int
    share: float

    @classmethod
    def of(cls, z_SD: Array, y_S: Array, head_SN: Array, count: int, share: float | None) -> Neighbours:
        """head_SN: the head's probabilities for these samples. share: None chooses from ``SHARES`` the smallest with
        the best leave-one-out accuracy on them. Raises StateError without a sample."""
        if not len(y_S):
            raise StateError("there is no labelled sample to personalize with", hint="add some: edge-agent samples add")
        found = cls(z_SD, y_S, head_SN.shape[1], count, 0.0 if share is None else share)
        if share is None and len(y_S) > 1:
            own_SN = found.votes(z_SD, without_self=True)
            accuracy = [float((_mixed(own_SN, head_SN, s).argmax(1) == y_S).mean()) for s in SHARES]
            found = cls(z_SD, y_S, found.classes, count, SHARES[int(np.argmax(accuracy))])
        return found

    def votes(self, z_nD: Array, *, without_self: bool = False) -> Array:
        """[n, N]: the votes of the k nearest samples, weighted by exp(−distance) and normalized to sum to 1.

        without_self: z_nD are the stored samples, and no sample votes for itself.
        """
        rows = max(1, MAX_DISTANCES // max(1, len(self.z)))
        parts = [self._votes(z_nD[i : i + rows], i if without_self else None) for i in range(0, len(z_nD), rows)]
        return np.concatenate(parts) if parts else np.zeros((0, self.classes), np.float32)

    @cached_property
    def _squares(self) -> Array:
        """float64 [S]: the squared norm of each stored sample."""
        return np.asarray(np.einsum("sd,sd->s", self.z, self.z, dtype=np.float64))

    def _votes(self, z_nD: Array, start: int | None) -> Array:
        squared_nS = self._squared_distances(z_nD.astype(np.float64))
        distance_nS = np.fmin(np.sqrt(squared_nS), np.inf)  # a sample that is not finite is the farthest
        rows = np.arange(len(z_nD))
        if start is not None:
            distance_nS[rows, start + rows] = np.inf
        near = _smallest(distance_nS, min(self.count, len(self.y) - (start is not None)))
        distance_nk = np.take_along_axis(distance_nS, near, 1)
        weight_nk = np.exp(distance_nk.min(1, keepdims=True) - distance_nk)
        votes = np.zeros((len(z_nD), self.classes))
        np.add.at(votes, (rows[:, None], self.y[near]), weight_nk)
        return np.asarray(votes / votes.sum(1, keepdims=True), dtype=np.float32)

    def _squared_distances(self, z_nD: Array) -> Array:
        """[n, S] by products of matrices. They round the distance of equal samples to about 1e-8 of their norm."""
        parts = [z_nD @ self.z[k : k + BLOCK].astype(np.float64).T for k in range(0, len(self.z), BLOCK)]
        squared_nS = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        squared_nS *= -2
        squared_nS += np.square(z_nD).sum(1)[:, None]
        squared_nS += self._squares
        return np.asarray(np.maximum(squared_nS, 0, out=squared_nS))

    def probabilities(self, z_nD: Array, head_nN: Array) -> Array:
        """λ · votes + (1 − λ) · head_nN (the head's probabilities), float32 [n, N]."""
        return _mixed(self.votes(z_nD), head_nN, self.share)


def _smallest(a_nS: Array, count: int) -> Array:
    """Columns [n, count], ascending, of the ``count`` smallest in each row; of equal ones the first."""
    last_n1 = np.partition(a_nS, count - 1, axis=1)[:, count - 1, None]
    smaller_nS, equal_nS = a_nS < last_n1, a_nS == last_n1
    still_n1 = count - smaller_nS.sum(1, keepdims=True)
    taken_nS = smaller_nS | (equal_nS & (np.cumsum(equal_nS, axis=1, dtype=np.int32) <= still_n1))
    return np.nonzero(taken_nS)[1].reshape(len(a_nS), count)


def _mixed(votes_nN: Array, head_nN: Array, share: float) -> Array:
    return np.asarray(share * votes_nN + (1 - share) * head_nN, dtype=np.float32)


def softmax(scores_nN: Array) -> Array:
    """Softmax of each row; −inf gives 0. Stable for scores of any size."""
    powers = np.exp(scores_nN - np.maximum.reduce(scores_nN, axis=1, keepdims=True))
    return np.asarray(powers / np.add.reduce(powers, axis=1, keepdims=True))
