"""A device's personalization of a served model: made from its samples, stored, extended, and opened as a predictor.

Arrays of class means, a fitted head and neighbours: ``prototypes`` [N, D] and ``counts`` [N] by class, ``limit`` [N],
the distance beyond which a sample is unknown, ``drift_distance`` and ``drift_margin`` to notice drift, ``weight`` and
``bias`` of a fitted head, and ``z``, ``y``, ``marks`` of the embedded samples. Of a task only the latter. Arrays of
gradient steps: the weights, as ``group/name``. Of a task also those of ``InputReference``. None of them leaves the
device.

Queries are embedded by the encoder that embedded the support samples, fp32 or int8: class means of one encoder are
meaningless to the other.
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
from edge_agent.inference.mixed_plans import mixed_plans, needs_head
from edge_agent.inference.personalizers import EMBEDS, Plan
from edge_agent.inference.predictor import Predictor, UnknownDetector, widened
from fleet_core.algorithms.methods.pfedgp import Gaussian
from fleet_core.base import schema, storage, trees
from fleet_core.base.errors import StateError
from fleet_core.data.samples import Samples
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import MODEL_GROUPS, Layout
from fleet_core.personalization.drift import NAMES, Reference
from fleet_core.personalization.input_drift import NAMES as INPUT_NAMES
from fleet_core.personalization.input_drift import InputReference
from fleet_core.personalization.linear_head import Head, LabelHead
from fleet_core.personalization.mixture import Mixture
from fleet_core.personalization.nearest import Neighbours, Prototypes, softmax
from fleet_core.personalization.ridge_head import RidgeHead
from fleet_core.personalization.unknown_class import Thresholds
from fleet_core.tasks.anomaly import Anomaly
from fleet_core.tasks.labels import MultiLabel
from fleet_core.tasks.task import Task

if TYPE_CHECKING:
    from fleet_core.personalization.gaussian_process import Processes

Array = np.ndarray[Any, Any]

AGAIN = "personalize again"


@dataclass(frozen=True, eq=False)
class Personalization:
    """how: ``proto``, ``head``, ``knn``, ``gp``, their mixture ``auto``, the personalizer that took gradient steps, or
    ``none`` if the device itself chose to answer with the served model as it is. model, round: id and round of the
    served model; the personalization is invalid for any other. classes: names of the labels, the fleet's first.
    settings: plain values that answering needs."""

    how: str
    model: str
    round: int
    classes: tuple[str, ...]
    arrays: Mapping[str, Array]
    settings: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Writes atomically, readable by the owner only. Raises StateError."""
        facts = {"format": str(FORMAT), "how": self.how, "weights": self.model, "round": str(self.round),
                 "classes": json.dumps(self.classes), "settings": json.dumps(dict(self.settings), sort_keys=True)}
        storage.write_arrays(path, self.arrays, facts, mode=0o600)

    @classmethod
    def load(cls, path: Path) -> Personalization:
        """Raises StateError if the file is absent or holds no personalization."""
        arrays, facts = storage.map_file(path, limit=MAX_STATE_BYTES)
        try:
            classes, settings = json.loads(facts["classes"]), json.loads(facts["settings"])
            return cls(facts["how"], facts["weights"], int(facts["round"]), tuple(map(str, classes)), arrays, settings)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise StateError("holds no personalization", where=str(path), hint=AGAIN) from error

    @property
    def embeds(self) -> bool:
        return self.how in EMBEDS

    @property
    def int8(self) -> bool:
        """Whether the quantized encoder embedded the samples."""
        return bool(self.settings.get("int8"))

    @property
    def graph(self) -> str:
        """As ``Answering.graph``."""
        if self.embeds:
            return "embed-int8" if self.int8 else "embed"
        return "embed" if self.how == "fleet-proto" else "predict"

    @property
    def support(self) -> Support | None:
        """The embedded samples, if they are stored."""
        return Support.from_arrays(dict(self.arrays))

    def reference(self, task: Task | None) -> Reference | InputReference | None:
        """Of the samples that this personalization was made of, to notice drift; None if it has none."""
        if task is not None:
            return InputReference.stored(self.arrays)
        return Reference.stored(self.arrays, self.prototypes) if self.embeds else None

    @property
    def prototypes(self) -> Prototypes:
        """The class means. Raises StateError if they are missing or invalid."""
        found = Prototypes.checked(self.arrays, self.model, str(self.settings.get("distance", "squared")))
        return replace(found, frequent=bool(self.settings.get("frequent")))


# Make -----------------------------------------------------------------------------------------------------------------


def from_weights(
    how: str, weights: Weights, classes: tuple[str, ...], arrays: Mapping[str, Array], x: Array | None = None, *,
    added: int,
) -> Personalization:
    """A personalization by gradient steps. arrays: the device's personal weights, as ``group/name``. x: of a task, the
    inputs that the steps were taken on. added: how many samples had been added."""
    return Personalization(how, weights.model, weights.round, classes, {**arrays, **_reference(x)}, {"added": added})


def _reference(x: Array | None) -> dict[str, Array]:
    """The arrays to notice drift of a task's inputs x; empty if they are too few."""
    found = None if x is None else InputReference.of(x)
    return {} if found is None else found.arrays()


def from_samples(
    plan: Plan, graph: Graph, weights: Weights, samples: Samples, cached: Personalization | None = None, *,
    quantile: float, int8: bytes = b"",
) -> Personalization:
    """A personalization by class means, a fitted head, neighbours or Gaussian processes, from raw samples; for a task
    by its head; or by a mixture of ``plan.candidates``, with its figures in ``settings["auto"]``.

    cached: an earlier personalization, whose embeddings are reused if the same encoder made them. quantile: sets
    the threshold for unknown samples. int8: the quantized encoder, used in place of the graph's.
    Raises StateError, DataError, BundleError, CodecError.
    """
    encoder = open_encoder(graph, weights, int8)
    same_encoder = cached is not None and (cached.model, cached.int8) == (weights.model, bool(int8))
    y = np.zeros(len(samples), np.int64) if isinstance(graph.layout.task, Anomaly) else samples.y
    support = Support.of(encoder.run, samples.x, y, cached.support if cached is not None and same_encoder else None)
    if graph.layout.task is not None:
        truths = _truths(graph.layout, samples.x, support.y)
        head = _head_of_task(graph.layout.task, support.z, truths, plan.steps)
        arrays = {**support.arrays(), **_reference(samples.x), "weight": head.weight, "bias": head.bias}
        about = {"int8": bool(int8), **({"decay": head.decay} if isinstance(head, RidgeHead) else {})}
        return Personalization("head", weights.model, weights.round, (), arrays, about)
    classes = samples.classes or graph.layout.classes
    plans, head_SN = plan.candidates or (plan,), np.zeros((len(samples.y), len(classes)), np.float32)
    if any(map(needs_head, plan.candidates)) or (plan.kind == "knn" and plan.mixture is None):
        head_SN = _of_fleets_head(graph, weights, samples, len(classes))
    settings: dict[str, Any] = {"quantile": quantile, "int8": bool(int8)}
    for one in plans:
        settings |= _settings(one, support, head_SN)
    if plan.candidates:
        settings["auto"] = schema.plain(mixed_plans(plan, support.z, support.y, len(classes), head_SN))
    return _fitted(Personalization(plan.kind, weights.model, weights.round, classes, {}, settings), support, None)


def _truths(layout: Layout, x: Array, y: Array) -> Array:
    """What a task's head learns to answer; of anomalies the samples themselves, because the graph takes the
    difference."""
    if not isinstance(layout.task, Anomaly):
        return layout.truths(y)
    axes, spec = (-1, *(1,) * (x.ndim - 2)), layout.input
    found = x.astype(np.float32) * np.float32(spec.scale)
    found = found - np.reshape(spec.mean, axes) if spec.mean else found
    found = found / np.reshape(spec.std, axes) if spec.std else found
    return found.reshape(len(x), -1)


def _head_of_task(task: Task, z: Array, truths: Array, steps: int) -> RidgeHead | LabelHead:
    return LabelHead.fit(z, truths, steps=steps) if isinstance(task, MultiLabel) else RidgeHead.fit(z, truths)


def _settings(plan: Plan, support: Support, head_SN: Array) -> dict[str, Any]:
    """What answering by ``plan`` needs. head_SN: as in ``Neighbours.of``."""
    if plan.kind == "proto":
        return {"distance": plan.distance, "frequent": plan.frequent}
    if plan.kind == "head":
        return {"steps": plan.steps}
    if plan.kind == "knn":
        near = Neighbours.of(support.z, support.y, head_SN, plan.neighbours, plan.mixture)
        return {"neighbours": plan.neighbours, "mixture": plan.mixture, "share": near.share}
    return {} if plan.gaussian is None else {"gaussian": schema.plain(plan.gaussian)}


def open_encoder(graph: Graph, weights: Weights, int8: bytes = b"") -> Session:
    """Raw samples -> embeddings, by the quantized encoder ``int8`` if given (its weights are inside), else by the
    graph ``embed``. Raises BundleError, CodecError."""
    if int8:
        return open_session(int8, {})
    return open_kind(graph, "embed", trees.only(weights.params, ("body",)))


def _of_fleets_head(graph: Graph, weights: Weights, samples: Samples, n_classes: int) -> Array:
    """The probabilities [S, N] of the served model's head; 0 for the device's own classes."""
    head = open_kind(graph, "predict", trees.only(weights.params, MODEL_GROUPS))
    return widened(softmax(head.run(samples.x)), n_classes)


def extended(personal: Personalization, embed: Embed, new: Samples) -> Personalization | None:
    """``personal`` with more raw samples; embeds only these. ``new.classes`` must start with ``personal.classes``.

    None if the embeddings of earlier samples are needed and not stored, and for a mixture, whose weights may change;
    the whole personalization must then be made again.
    """
    support = personal.support
    lacking = support is None and personal.how != "proto"
    if not personal.embeds or personal.how == "auto" or lacking or new.outputs:
        return None
    classes = new.classes or personal.classes
    z = embed(new.x)
    means = personal.prototypes.widened(len(classes)).add(z, new.y)
    wider = replace(personal, classes=classes)
    if support is None:
        kept = {name: personal.arrays[name] for name in NAMES if name in personal.arrays}
        limit = _padded(personal.arrays["limit"], len(classes))
        return replace(wider, arrays={**kept, **_named(means), "limit": limit})
    return _fitted(wider, support.extended(z, new.x, new.y), means)


def _fitted(personal: Personalization, support: Support, means: Prototypes | None) -> Personalization:
    """``personal`` with all its arrays. means: the class means of ``support``, if known."""
    settings, n_classes = dict(personal.settings), len(personal.classes)
    if means is None:
        distance = str(settings.get("distance", "squared"))
        means = Prototypes.empty(n_classes, support.z.shape[1], personal.model, distance)
        means = means.add(support.z, support.y)
    limit = Thresholds.calibrate(support.z, support.y, means, settings["quantile"]).distances
    arrays = {**support.arrays(), **_named(means), "limit": limit}
    reference = Reference.of(support.z, support.y, means)
    arrays |= {} if reference is None else reference.arrays()
    if "steps" in settings and personal.how in ("head", "auto"):
        head = Head.fit(support.z, support.y, n_classes, steps=settings["steps"])
        arrays |= {"weight": head.weight, "bias": head.bias}
    return replace(personal, arrays=arrays)


def _named(means: Prototypes) -> dict[str, Array]:
    return {"prototypes": means.prototypes, "counts": means.counts}


def _padded(limit_N: Array, n_classes: int) -> Array:
    """Gives new classes the threshold of the others, which is the same for all classes."""
    return np.pad(limit_N, (0, n_classes - len(limit_N)), mode="edge")


# Open -----------------------------------------------------------------------------------------------------------------


def open_predictor(
    personal: Personalization, graph: Graph, weights: Weights, *, unknown: bool, samples: Samples | None = None,
    int8: bytes = b"", before: Predictor | None = None,
) -> Predictor:
    """The predictor of a personalization.

    unknown: detect samples of unknown classes, if the personalizer embeds. samples: the device's own, if their
    embeddings are not stored. int8: the quantized encoder, if it embedded the samples. before: a predictor with the
    same encoder and weights, whose sessions are reused.
    Raises StateError, BundleError, CodecError.
    """
    if not personal.embeds:
        return _from_weights(personal, graph, weights)
    if isinstance(graph.layout.task, Anomaly):
        return _repeating(personal, graph, weights)
    if graph.layout.task is not None:
        return _of_task(personal, graph, weights, int8, before)
    means = personal.prototypes
    thresholds = Thresholds(_checked(personal.arrays, "limit", (len(means.counts),)))
    detector = UnknownDetector(means, thresholds) if unknown else None
    encoder = _encoder(personal, graph, weights, int8, before)
    predictor = Predictor(encoder, unknown_detector=detector)
    mixture = _mixture(personal) if personal.how == "auto" else None
    ways = (personal.how,) if mixture is None else tuple(mixture.ways)
    if "proto" in ways:
        predictor = replace(predictor, prototypes=means)
    if "head" in ways:
        shape = means.prototypes.shape
        head = Head(_checked(personal.arrays, "weight", shape), _checked(personal.arrays, "bias", shape[:1]))
        predictor = replace(predictor, fitted=head)
    if "gp" in ways:
        predictor = replace(predictor, processes=_processes(personal, encoder, samples))
    if "knn" in ways:
        predictor = replace(predictor, neighbours=_neighbours(personal, encoder, samples))
    if "none" in ways or ("knn" in ways and personal.settings["mixture"] != 1.0):
        head_session = None if before is None or before.encoder is None else before.session
        head_session = head_session or open_kind(graph, "predict", trees.only(weights.params, MODEL_GROUPS))
        predictor = replace(predictor, session=head_session, encoder=encoder)
    return replace(predictor, mixture=mixture)


def _encoder(
    personal: Personalization, graph: Graph, weights: Weights, int8: bytes, before: Predictor | None
) -> Session:
    """The encoder that embedded the samples of ``personal``. Raises StateError, BundleError, CodecError."""
    if before is None and personal.int8 and not int8:
        raise StateError("the int8 encoder that it was made with is not here", hint=AGAIN)
    return open_encoder(graph, weights, int8 if personal.int8 else b"") if before is None else before.embedder


def _of_task(
    personal: Personalization, graph: Graph, weights: Weights, int8: bytes, before: Predictor | None
) -> Predictor:
    """The head of a task, on the encoder."""
    layout = graph.layout
    shape = len(layout.answers), layout.embedding
    weight, bias = _checked(personal.arrays, "weight", shape), _checked(personal.arrays, "bias", shape[:1])
    head = LabelHead(weight, bias) if isinstance(layout.task, MultiLabel) else RidgeHead(
        weight, bias, float(personal.settings.get("decay", 0.0)))
    return Predictor(_encoder(personal, graph, weights, int8, before), of_task=head, task=layout.task)


def _repeating(personal: Personalization, graph: Graph, weights: Weights) -> Predictor:
    """The served model with the fitted head in place of its own."""
    head = {t.name: _checked(personal.arrays, t.name.removeprefix("head."), t.shape) for t in graph.layout.tensors
            if t.group == "head"}
    return Predictor.head(graph, graph.layout.ordered({**trees.only(weights.params, ("body",)), "head": head}))


def _from_weights(personal: Personalization, graph: Graph, weights: Weights) -> Predictor:
    weights_alone = {name: array for name, array in personal.arrays.items() if name not in INPUT_NAMES}
    params = graph.layout.ordered(storage.unflatten(weights_alone))
    if personal.how != "fleet-proto":
        return Predictor.head(graph, params)
    means = Prototypes.of_fleet(weights.params, weights.model)
    return Predictor.proto(graph, trees.only(params, ("body",)), means)


def _neighbours(personal: Personalization, encoder: Session, samples: Samples | None) -> Neighbours:
    support, settings = _support(personal, encoder, samples), personal.settings
    count, share = int(settings["neighbours"]), float(settings["share"])
    return Neighbours(support.z, support.y, len(personal.classes), count, share)


def _mixture(personal: Personalization) -> Mixture:
    mixture, _ = schema.read(Mixture, personal.settings.get("auto"))
    if mixture is None or not mixture.ways:
        raise StateError("the weights of the ways are not here", hint=AGAIN)
    return mixture


def _support(personal: Personalization, encoder: Session, samples: Samples | None) -> Support:
    """The stored embeddings, or those of ``samples``."""
    if personal.support is not None:
        return personal.support
    if samples is None:
        raise StateError("the embedded samples are not here", hint=AGAIN)
    return Support.of(encoder.run, samples.x, samples.y)


def _processes(personal: Personalization, encoder: Session, samples: Samples | None) -> Processes:
    from fleet_core.personalization.gaussian_process import Processes  # 1.5 MB that no other personalizer needs

    settings, _ = schema.read(Gaussian, personal.settings.get("gaussian"))
    if settings is None:
        raise StateError("the Gaussian processes' settings are not here", hint=AGAIN)
    support = _support(personal, encoder, samples)
    return Processes.of(support.z, support.y, len(personal.classes), settings)


def _checked(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    array = arrays.get(name)
    if array is None or array.shape != shape or array.dtype != np.float32:
        raise StateError(f"the array '{name}' of the personalization is missing or of another shape or dtype",
                         hint=AGAIN)
    return array
