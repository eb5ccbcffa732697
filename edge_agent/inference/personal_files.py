"""What makes answers a device's own, as it lies on its disk: made from its samples, extended, and opened to answer.

By class means, a fitted head or neighbours: arrays ``prototypes`` [N, D] and ``counts`` [N] of the classes, ``limit``
[N] beyond which a sample is unknown, ``weight`` and ``bias`` of a fitted head, and ``z``, ``y``, ``marks`` of the
embedded samples. By gradient steps: the weights, as ``group/name``. None of it leaves the device.

Samples that are asked for are embedded by the encoder that the device's own were embedded by, in fp32 or int8: the
class means of one mean nothing to the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_agent.compute.onnx_session import Session, open_kind, open_session
from edge_agent.device.state import FORMAT, MAX_STATE_BYTES, Weights
from edge_agent.inference.embedded_support import Embed, Support
from edge_agent.inference.personalizers import EMBEDS, Plan
from edge_agent.inference.predictor import Familiar, Predictor, widened
from fleet_core.algorithms.methods.pfedgp import Gaussian
from fleet_core.base import schema, storage, trees
from fleet_core.base.errors import StateError
from fleet_core.data.samples import Samples
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import MODEL_GROUPS
from fleet_core.personalization.linear_head import Head
from fleet_core.personalization.nearest import Neighbours, Prototypes, softmax
from fleet_core.personalization.unknown_class import Thresholds

if TYPE_CHECKING:
    from fleet_core.personalization.gaussian_process import Processes

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class PersonalFiles:
    """how: proto, head, knn, or the personalizer that took gradient steps. model, round: of the served model that it
    was made with, under which alone it means anything. classes: what the labels are, the fleet's first. settings: plain
    values that answering needs. quantile: of the threshold for unknown samples."""

    how: str
    model: str
    round: int
    classes: tuple[str, ...]
    arrays: Mapping[str, Array]
    settings: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Whole or not at all; readable by the owner only. Raises StateError."""
        facts = {"format": str(FORMAT), "how": self.how, "weights": self.model, "round": str(self.round),
                 "classes": json.dumps(self.classes), "settings": json.dumps(dict(self.settings), sort_keys=True)}
        storage.write_arrays(path, self.arrays, facts, mode=0o600)

    @classmethod
    def load(cls, path: Path) -> PersonalFiles:
        """Raises StateError for a file that is absent or none of these."""
        arrays, facts = storage.map_file(path, limit=MAX_STATE_BYTES)
        try:
            classes, settings = json.loads(facts["classes"]), json.loads(facts["settings"])
            return cls(facts["how"], facts["weights"], int(facts["round"]), tuple(map(str, classes)), arrays, settings)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise StateError("holds no personalization", where=str(path), hint="personalize again") from error

    @property
    def embeds(self) -> bool:
        return self.how in EMBEDS

    @property
    def int8(self) -> bool:
        """Whether the quantized encoder embedded the samples."""
        return bool(self.settings.get("int8"))

    @property
    def support(self) -> Support | None:
        """The embedded samples, where they are kept."""
        return Support.kept(dict(self.arrays))

    @property
    def prototypes(self) -> Prototypes:
        """Raises StateError."""
        return Prototypes.checked(self.arrays, self.model, str(self.settings.get("distance", "squared")))


# Made ---------------------------------------------------------------------------------------------------------------


def of_weights(how: str, weights: Weights, classes: tuple[str, ...], arrays: Mapping[str, Array]) -> PersonalFiles:
    """The device's own weights ``arrays``, as ``group/name``."""
    return PersonalFiles(how, weights.model, weights.round, classes, dict(arrays), {})


def of_samples(
    plan: Plan, graph: Graph, weights: Weights, own: Samples, known: PersonalFiles | None = None, *, quantile: float,
    int8: bytes = b"",
) -> PersonalFiles:
    """Class means, a fitted head or neighbours from the raw samples; ``known``: what was made before, whose embeddings
    are taken where they are by the same encoder. int8: the quantized encoder, in place of the graph's. Raises
    StateError, DataError, BundleError, CodecError."""
    encoder = encoder_of(graph, weights, int8)
    alike = known is not None and (known.model, known.int8) == (weights.model, bool(int8))
    support = Support.of(encoder.run, own.x, own.y, known.support if known is not None and alike else None)
    classes = own.classes or graph.layout.classes
    settings = {"distance": plan.distance, "neighbours": plan.neighbours, "mixture": plan.mixture, "steps": plan.steps,
                "quantile": quantile, "int8": bool(int8)}
    if plan.gaussian is not None:
        settings["gaussian"] = schema.plain(plan.gaussian)
    if plan.kind == "knn":
        settings["share"] = _share(plan, graph, weights, own, support, len(classes))
    return _fitted(PersonalFiles(plan.kind, weights.model, weights.round, classes, {}, settings), support, None)


def encoder_of(graph: Graph, weights: Weights, int8: bytes = b"") -> Session:
    """Raw samples -> embeddings; ``int8`` has its weights inside. Raises BundleError, CodecError."""
    if int8:
        return open_session(int8, {})
    return open_kind(graph, "embed", trees.only(weights.params, ("body",)))


def _share(plan: Plan, graph: Graph, weights: Weights, own: Samples, support: Support, n_classes: int) -> float:
    """Of the neighbours in the answer."""
    if plan.mixture is not None:
        return plan.mixture
    head = open_kind(graph, "predict", trees.only(weights.params, MODEL_GROUPS))
    known = widened(softmax(head.run(own.x)), n_classes)
    return Neighbours.of(support.z, support.y, known, plan.neighbours, None).share


def extended(own: PersonalFiles, embed: Embed, more: Samples) -> PersonalFiles | None:
    """``own`` with a few more raw samples, each of which is embedded once and none besides. ``more.classes`` are those
    of ``own``, and may go on. None where too much is stored to be kept, and everything must be made anew."""
    support = own.support
    if not own.embeds or (support is None and own.how != "proto"):
        return None
    classes = more.classes or own.classes
    z = embed(more.x)
    means = own.prototypes.widened(len(classes)).add(z, more.y)
    wider = replace(own, classes=classes)
    if support is None:
        return replace(wider, arrays={**_named(means), "limit": _padded(own.arrays["limit"], len(classes))})
    return _fitted(wider, support.more(z, more.x, more.y), means)


def _fitted(own: PersonalFiles, support: Support, means: Prototypes | None) -> PersonalFiles:
    """``own`` with all its arrays. means: of these samples, where they are known already."""
    settings, n_classes = dict(own.settings), len(own.classes)
    if means is None:
        means = Prototypes.empty(n_classes, support.z.shape[1], own.model, str(settings["distance"]))
        means = means.add(support.z, support.y)
    limit = Thresholds.calibrate(support.z, support.y, means, settings["quantile"]).distances
    arrays = {**support.arrays(), **_named(means), "limit": limit}
    if own.how == "head":
        head = Head.fit(support.z, support.y, n_classes, steps=settings["steps"])
        arrays |= {"weight": head.weight, "bias": head.bias}
    return replace(own, arrays=arrays)


def _named(means: Prototypes) -> dict[str, Array]:
    return {"prototypes": means.prototypes, "counts": means.counts}


def _padded(limit_N: Array, n_classes: int) -> Array:
    """The threshold is one for all classes; those that come have it too."""
    return np.pad(limit_N, (0, n_classes - len(limit_N)), mode="edge")


# Opened ---------------------------------------------------------------------------------------------------------------


def opened(
    own: PersonalFiles,
    graph: Graph,
    weights: Weights,
    *,
    unknown: bool,
    samples: Samples | None = None,
    int8: bytes = b"",
    before: Predictor | None = None,
) -> Predictor:
    """What answers. unknown: tell it where it can be told. samples: the device's own, for neighbours whose embeddings
    were too many to be kept. int8: the quantized encoder, where it embedded the samples. before: an answer from
    embeddings by the same encoder of the same weights, whose sessions are taken.

    Raises StateError, BundleError, CodecError.
    """
    if not own.embeds:
        return _with_weights(own, graph, weights)
    means = own.prototypes
    thresholds = Thresholds(_checked(own.arrays, "limit", (len(means.counts),)))
    familiar = Familiar(means, thresholds) if unknown else None
    if before is None and own.int8 and not int8:
        raise StateError("the int8 encoder that it was made with is not here", hint="personalize again")
    encoder = encoder_of(graph, weights, int8 if own.int8 else b"") if before is None else before.embedder
    if own.how == "proto":
        return Predictor(encoder, means, familiar=familiar)
    if own.how == "head":
        shape = means.prototypes.shape
        head = Head(_checked(own.arrays, "weight", shape), _checked(own.arrays, "bias", shape[:1]))
        return Predictor(encoder, fitted=head, familiar=familiar)
    if own.how == "gp":
        return Predictor(encoder, processes=_processes(own, encoder, samples), familiar=familiar)
    beside = None if before is None or before.encoder is None else before.session
    return _with_neighbours(own, graph, weights, encoder, beside, familiar, samples)


def _with_weights(own: PersonalFiles, graph: Graph, weights: Weights) -> Predictor:
    params = graph.layout.ordered(storage.unflatten(own.arrays))
    if own.how != "fleet-proto":
        return Predictor.head(graph, params)
    means = Prototypes.of_fleet(weights.params, weights.model)
    return Predictor.proto(graph, trees.only(params, ("body",)), means)


def _with_neighbours(
    own: PersonalFiles,
    graph: Graph,
    weights: Weights,
    encoder: Session,
    head: Session | None,
    familiar: Familiar | None,
    samples: Samples | None,
) -> Predictor:
    support = _support(own, encoder, samples)
    n_classes, settings = len(own.classes), own.settings
    near = Neighbours(support.z, support.y, n_classes, int(settings["neighbours"]), float(settings["share"]))
    if settings["mixture"] == 1.0:
        return Predictor(encoder, neighbours=near, familiar=familiar)
    head = head or open_kind(graph, "predict", trees.only(weights.params, MODEL_GROUPS))
    return Predictor(head, None, encoder, near, familiar=familiar)


def _support(own: PersonalFiles, encoder: Session, samples: Samples | None) -> Support:
    """The embedded samples that were kept; of ``samples`` where they were too many."""
    if own.support is not None:
        return own.support
    if samples is None:
        raise StateError("the embedded samples are not here", hint="personalize again")
    return Support.of(encoder.run, samples.x, samples.y)


def _processes(own: PersonalFiles, encoder: Session, samples: Samples | None) -> Processes:
    from fleet_core.personalization.gaussian_process import Processes  # a MB and a half that no other way needs

    how, _ = schema.read(Gaussian, own.settings.get("gaussian"))
    if how is None:
        raise StateError("the Gaussian processes' settings are not here", hint="personalize again")
    support = _support(own, encoder, samples)
    return Processes.of(support.z, support.y, len(own.classes), how)


def _checked(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    array = arrays.get(name)
    if array is None or array.shape != shape or array.dtype != np.float32:
        raise StateError(f"the array '{name}' of the personalization is not here", hint="personalize again")
    return array
