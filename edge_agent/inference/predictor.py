"""Answers to raw samples from a personalized model, without torch: class probabilities, or what a task answers.

Shapes: n samples, N classes (the fleet's, then the device's own) or outputs, K classes of the head, D embedding width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_agent.compute.onnx_session import Session, open_kind
from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.model.graph_bundle import Graph
from fleet_core.personalization.linear_head import Head, LabelHead
from fleet_core.personalization.mixture import Mixture
from fleet_core.personalization.nearest import Neighbours, Prototypes, softmax
from fleet_core.personalization.unknown_class import Thresholds
from fleet_core.tasks.task import Task

if TYPE_CHECKING:
    from fleet_core.personalization.gaussian_process import Processes
    from fleet_core.personalization.ridge_head import RidgeHead

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class UnknownDetector:
    """Recognizes samples of unknown classes by their distance to the class means."""

    means: Prototypes
    thresholds: Thresholds

    def unknown(self, z_nD: Array) -> Array:
        """bool [n]: whether each embedded sample is of an unknown class."""
        return self.thresholds.unknown(z_nD, self.means)


@dataclass(frozen=True, eq=False)
class Predictor:
    """Raw samples -> probabilities, or with a ``task`` numbers or probabilities of labels, float64 [n, N].

    session: an encoder, used with ``prototypes``, a ``fitted`` head, ``neighbours`` or Gaussian ``processes``; or a
    model with a head. encoder: embeds samples for these if ``session`` is a model with a head. of_task: a fitted head
    of a task. mixture: of all that are there.
    """

    session: Session
    prototypes: Prototypes | None = None
    encoder: Session | None = None
    neighbours: Neighbours | None = None
    fitted: Head | None = None
    processes: Processes | None = None
    unknown_detector: UnknownDetector | None = None
    of_task: RidgeHead | LabelHead | None = None
    task: Task | None = None
    mixture: Mixture | None = None

    @classmethod
    def proto(cls, graph: Graph, params: Params, prototypes: Prototypes, *, threads: int = 1) -> Predictor:
        """Nearest prototype under the encoder's weights ``params``. Raises BundleError, CodecError."""
        return cls(open_kind(graph, "embed", params, threads=threads), prototypes)

    @classmethod
    def head(cls, graph: Graph, params: Params, *, threads: int = 1) -> Predictor:
        """The head's softmax, or numbers, under the weights ``params``. Raises BundleError, CodecError."""
        return cls(open_kind(graph, "predict", params, threads=threads), task=graph.layout.task)

    @classmethod
    def knn(
        cls, graph: Graph, params: Params, x: Array, y: Array, count: int, share: float | None, *, threads: int = 1
    ) -> Predictor:
        """The head, and the ``count`` nearest of the device's own samples x, y. Raises BundleError, CodecError."""
        encoder = open_kind(graph, "embed", trees.only(params, ("body",)), threads=threads)
        head = open_kind(graph, "predict", params, threads=threads)
        return cls(head, None, encoder, Neighbours.of(encoder.run(x), y, softmax(head.run(x)), count, share))

    @property
    def embedder(self) -> Session:
        """The session that embeds samples, for answers from embeddings."""
        return self.encoder or self.session

    def answers(self, x: Array) -> tuple[Array, Array | None]:
        """(probabilities float32 [n, N], bool [n] whether each sample is unknown) of raw samples [n, *shape]; None
        without a detector. Raises DataError, and StateError if there is no prototype."""
        return self.of_outputs(*self.outputs(x))

    def outputs(self, x: Array) -> tuple[Array, Array]:
        """(the session's output, the embedding where answers come from one) of raw samples, as ``of_outputs`` takes
        them. Raises DataError."""
        out = self.session.run(x)
        return out, out if self.encoder is None else self.encoder.run(x)

    def of_outputs(self, out: Array, z: Array) -> tuple[Array, Array | None]:
        """``answers`` from outputs. out: the session's output. z: the encoder's output, or ``out`` without an
        encoder."""
        if self.task is not None:
            return self.task.in_units(out if self.of_task is None else self.of_task.answers(z)), None
        unknown = None if self.unknown_detector is None else self.unknown_detector.unknown(z)
        if self.mixture is not None:
            return self.mixture.answer({way: self._of_way(way, out, z) for way in self.mixture.ways}), unknown
        ways = {"knn": self.neighbours, "head": self.fitted, "gp": self.processes, "proto": self.prototypes}
        return self._of_way(next((way for way, there in ways.items() if there is not None), "none"), out, z), unknown

    def _of_way(self, way: str, out: Array, z: Array) -> Array:
        """The probabilities by one of the ways that are there, as ``of_outputs``."""
        if way == "head" and self.fitted is not None:
            return self.fitted.probabilities(z)
        if way == "gp" and self.processes is not None:
            return self.processes.probabilities(z)
        if way == "proto" and self.prototypes is not None:
            return self.prototypes.probabilities(z)
        if self.neighbours is None:
            return softmax(out)
        has_head = self.encoder is not None
        of_head = widened(softmax(out), self.neighbours.classes) if has_head else np.zeros((), np.float32)
        return of_head if way == "none" else self.neighbours.probabilities(z, of_head)

    def probabilities(self, x: Array) -> Array:
        """float32 [n, N] of raw samples [n, *shape]. Raises DataError, and StateError if there is no prototype."""
        return self.answers(x)[0]

    def labels(self, x: Array) -> Array:
        """The most probable class of each raw sample, int64 [n]."""
        return np.asarray(self.probabilities(x).argmax(1))


def widened(probabilities_nK: Array, n_classes: int) -> Array:
    """[n, N]: zeros appended for the device's own classes, which the head lacks."""
    return np.pad(probabilities_nK, ((0, 0), (0, n_classes - probabilities_nK.shape[1])))
