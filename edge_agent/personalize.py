"""Personalized answers without torch: class prototypes in numpy beside the encoder's session, or a head of one's own.

Prototypes: Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017, eq. 1-2, with the
squared Euclidean distance (Acar et al., ICML 2021, §2). A new sample moves its class's mean: no gradient is needed.

Shapes: n samples, D embedding width, N classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.session import BATCH, Session, open_kind
from fleet_core import storage
from fleet_core.algorithms.trees import Params
from fleet_core.bundle import Graph
from fleet_core.errors import DataError, StateError

Array = np.ndarray[Any, Any]

MAX_BYTES = 64 << 20
FARTHEST = np.finfo(np.float32).max
"""The distance of a class that has samples is finite, however far; that of one without is not."""


@dataclass(frozen=True)
class Prototypes:
    """Class means and the number of samples behind each.

    prototypes: float32 [N, D], 0 where there is no sample. counts: int64 [N].
    weights: what names the encoder's weights they were made with (they mean nothing under others).
    """

    prototypes: Array
    counts: Array
    weights: str = ""

    @classmethod
    def empty(cls, n_classes: int, width: int, weights: str = "") -> Prototypes:
        return cls(np.zeros((n_classes, width), np.float32), np.zeros(n_classes, np.int64), weights)

    @classmethod
    def from_support(
        cls, embed_fn: Callable[[Array], Array], x: Array, y: Array, n_classes: int, weights: str = ""
    ) -> Prototypes:
        """Class means of ``embed_fn`` over raw samples x [n, *shape] with labels y [n]. Raises DataError."""
        z_nD = embed_fn(x)
        return cls.empty(n_classes, z_nD.shape[1], weights).add(z_nD, y)

    def add(self, z_nD: Array, y_n: Array) -> Prototypes:
        """These prototypes with more samples: mu + (z − mu)/n, class by class. Raises DataError for a label ≥ N."""
        if len(z_nD) != len(y_n):
            raise DataError(f"{len(z_nD)} samples and {len(y_n)} labels")
        if len(y_n) and not 0 <= y_n.min() <= y_n.max() < len(self.counts):
            raise DataError(f"a label is not in 0…{len(self.counts) - 1}", hint="name the class first")
        mean, counts = self.prototypes.astype(np.float64), self.counts.copy()
        for label in np.unique(y_n):
            of_class = z_nD[y_n == label]
            counts[label] += len(of_class)
            mean[label] += (of_class - mean[label]).sum(0) / counts[label]
        return Prototypes(mean.astype(np.float32), counts, self.weights)

    def probabilities(self, z_nD: Array) -> Array:
        """softmax(−‖z − c‖²) float32 [n, N]; 0 for a class without samples. Raises StateError when all lack them."""
        if not self.counts.any():
            raise StateError("there is no labelled sample to personalize with", hint="add some: edge-agent samples add")
        parts = [softmax(self._scores(z_nD[i : i + BATCH])) for i in range(0, len(z_nD), BATCH)]
        return np.concatenate(parts) if parts else np.zeros((0, len(self.counts)), np.float32)

    def _scores(self, z_nD: Array) -> Array:
        with np.errstate(over="ignore"):
            distance_nN = np.square(z_nD[:, None] - self.prototypes).sum(2)
        return np.where(self.counts > 0, -np.minimum(distance_nN, FARTHEST), np.float32(-np.inf))

    def save(self, path: Path) -> None:
        """Written whole, readable by the owner only: prototypes tell about the device's data. Raises StateError."""
        arrays = {"prototypes": self.prototypes, "counts": self.counts}
        storage.write_atomic(path, storage.pack(arrays, {"weights": self.weights}), mode=0o600)

    @classmethod
    def load(cls, path: Path) -> Prototypes:
        """Raises StateError when the file is absent or holds no prototypes."""
        arrays, metadata = storage.unpack(storage.read_bytes(path, limit=MAX_BYTES), where=str(path))
        prototypes, counts = (arrays.get(name, np.empty(0)) for name in ("prototypes", "counts"))
        found = cls(prototypes, counts, metadata.get("weights", ""))
        if not found._sound():
            raise StateError("holds no prototypes", where=str(path), hint="personalize again")
        return found

    def _sound(self) -> bool:
        return (
            self.prototypes.ndim == 2
            and self.prototypes.dtype == np.float32
            and bool(np.isfinite(self.prototypes).all())
            and self.counts.shape == self.prototypes.shape[:1]
            and self.counts.dtype == np.int64
            and bool((self.counts >= 0).all())
        )


@dataclass(frozen=True)
class Predictor:
    """Raw samples -> answers: an encoder with prototypes, or a model with a head."""

    session: Session
    prototypes: Prototypes | None = None

    @classmethod
    def proto(cls, graph: Graph, params: Params, prototypes: Prototypes, *, threads: int = 1) -> Predictor:
        """Nearest prototype under the encoder's weights ``params``. Raises BundleError, CodecError."""
        return cls(open_kind(graph, "embed", params, threads=threads), prototypes)

    @classmethod
    def head(cls, graph: Graph, params: Params, *, threads: int = 1) -> Predictor:
        """The head's softmax under the weights ``params``. Raises BundleError, CodecError."""
        return cls(open_kind(graph, "predict", params, threads=threads))

    def probabilities(self, x: Array) -> Array:
        """float32 [n, N] of raw samples [n, *shape]. Raises DataError, and StateError while there is no prototype."""
        out = self.session.run(x)
        return softmax(out) if self.prototypes is None else self.prototypes.probabilities(out)

    def labels(self, x: Array) -> Array:
        """The most probable class of each raw sample, int64 [n]."""
        return np.asarray(self.probabilities(x).argmax(1))


def softmax(scores_nN: Array) -> Array:
    """Rows of positive numbers that sum to 1; −inf gives 0. Stable for scores of any size."""
    powers = np.exp(scores_nN - scores_nN.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))
