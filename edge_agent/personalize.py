"""Personalized answers without torch: what stands behind a raw sample's probabilities on a device.

Shapes: n samples, N classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_agent.session import Session, open_kind
from fleet_core.algorithms import trees
from fleet_core.algorithms.trees import Params
from fleet_core.bundle import Graph
from fleet_core.nearest import Neighbours, Prototypes, softmax

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Predictor:
    """Raw samples -> answers: an encoder with prototypes, a model with a head, or both with neighbours."""

    session: Session
    prototypes: Prototypes | None = None
    encoder: Session | None = None
    neighbours: Neighbours | None = None

    @classmethod
    def proto(cls, graph: Graph, params: Params, prototypes: Prototypes, *, threads: int = 1) -> Predictor:
        """Nearest prototype under the encoder's weights ``params``. Raises BundleError, CodecError."""
        return cls(open_kind(graph, "embed", params, threads=threads), prototypes)

    @classmethod
    def head(cls, graph: Graph, params: Params, *, threads: int = 1) -> Predictor:
        """The head's softmax under the weights ``params``. Raises BundleError, CodecError."""
        return cls(open_kind(graph, "predict", params, threads=threads))

    @classmethod
    def knn(
        cls, graph: Graph, params: Params, x: Array, y: Array, count: int, share: float | None, *, threads: int = 1
    ) -> Predictor:
        """The head, and the ``count`` nearest of the device's own samples x, y. Raises BundleError, CodecError."""
        encoder = open_kind(graph, "embed", trees.only(params, ("body",)), threads=threads)
        head = open_kind(graph, "predict", params, threads=threads)
        return cls(head, None, encoder, Neighbours.of(encoder.run(x), y, softmax(head.run(x)), count, share))

    def probabilities(self, x: Array) -> Array:
        """float32 [n, N] of raw samples [n, *shape]. Raises DataError, and StateError while there is no prototype."""
        out = self.session.run(x)
        if self.neighbours is not None and self.encoder is not None:
            return self.neighbours.probabilities(self.encoder.run(x), softmax(out))
        return softmax(out) if self.prototypes is None else self.prototypes.probabilities(out)

    def labels(self, x: Array) -> Array:
        """The most probable class of each raw sample, int64 [n]."""
        return np.asarray(self.probabilities(x).argmax(1))
