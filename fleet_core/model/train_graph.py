"""The graph ``train``: a model's gradient as ONNX, so that a device trains without torch; one safetensors container.

Parameters are inputs ``group/name``, so one session takes every step. Further inputs and the loss are those of
``TrainInfo.loss``:

| loss | inputs beside the parameters | outputs |
|---|---|---|
| entropy | ``x`` ``y`` | ``loss`` |
| proto | ``support_x`` ``support_y`` ``query_x`` ``query_y`` ``classes`` | ``loss`` |
| metavers | those of proto, ``margin`` ``share`` | ``loss`` ``own`` |
| joint | those of proto | ``loss`` |
| fedproto | ``x`` ``y`` ``total`` ``count`` | ``loss`` |

and ``gradient/group/name`` for each parameter. Samples are raw [N, *shape], labels int64 [N] for any N; ``classes`` is
int64 [K], of which only the length counts: one graph serves any number of classes and of samples of each. If the layout
has a task, ``entropy`` is the loss of the task, and ``y`` standardized targets float32 [N, outputs]. The graph
``product`` takes a direction ``along/group/name`` beside the inputs of the entropy, and has the outputs
``product/group/name``, the Hessian times the direction.

Container: ``graph/train``, ``graph/product`` uint8 [bytes]; ``golden/x``, ``golden/y`` of ``golden_inputs``, and
``golden/train``, ``golden/product`` float64 [outputs, 2], of each output its norm and its sum. ``first/group/name``:
the initial values of groups that stay on a device. Metadata ``train``: ``TrainInfo`` as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from fleet_core.base import schema, storage
from fleet_core.base.errors import BundleError, StateError
from fleet_core.base.trees import Params
from fleet_core.model.graph_bundle import MAX_BYTES, check_golden, first_weights, graph_bytes, truths_form
from fleet_core.model.layout import MODEL_GROUPS, Layout

Array = np.ndarray[Any, Any]

FORMAT = 1
LOSSES: Mapping[str, tuple[str, ...]] = {
    "entropy": MODEL_GROUPS, "proto": ("body",), "metavers": ("body",), "joint": MODEL_GROUPS,
    "fedproto": MODEL_GROUPS,
}  # fmt: skip
"""The losses, and the groups of parameters that each takes."""

NEEDS: Mapping[str, tuple[str, bool, tuple[str, ...]]] = {
    "none": ("entropy", False, ()),
    "maml-first-order": ("entropy", False, ()),
    "maml-hessian-free": ("entropy", False, ()),
    "maml-exact": ("entropy", True, ()),
    "meta-sgd": ("entropy", True, ()),
    "proto": ("proto", False, ("distance",)),
    "metavers": ("metavers", False, ("distance", "margin_distance", "margin_divisor", "triplet_sum", "negative",
                                      "fixed_margin")),
    "joint": ("joint", False, ("distance", "means_share")),
    "fedproto": ("fedproto", False, ("pull", "pull_form")),
}
"""{adaptation: (its loss, whether it needs ``product``, the hyper-parameters that are constants of the graph)}."""


@dataclass(frozen=True)
class TrainInfo:
    """layout: hash. seed: of the golden weights. loss: of ``LOSSES``. hyper: the constants of the graph. product:
    whether there is a graph ``product``. forward: floating-point operations of a sample's forward pass; None if they
    are not counted. rtol: tolerance of golden outputs. ir_version, opset, min_onnxruntime: as in ``GraphInfo``.
    pass_of: samples of a pass over a batch of the entropy, which bounds its memory; 0: all at once, as layers that mix
    samples need."""

    format: int = field(metadata={"min": FORMAT, "max": FORMAT})
    layout: str = field(metadata={"max_length": 64})
    seed: int = field(metadata={"min": 0, "max": 2**63})
    loss: str = field(metadata={"choices": tuple(LOSSES)})
    hyper: Mapping[str, Any]
    product: bool
    forward: int | None = field(metadata={"min": 0, "max": 1 << 60})
    rtol: float = field(metadata={"min": 0.0, "max": 1.0})
    ir_version: int = field(metadata={"min": 1, "max": 1000})
    opset: int = field(metadata={"min": 1, "max": 1000})
    min_onnxruntime: str = field(metadata={"pattern": r"\d+\.\d+\.\d+"})
    pass_of: int = field(default=0, metadata={"min": 0, "max": 1 << 20})

    def refuses(self, adaptation: str, hyper: Any) -> str:
        """Why this graph does not train with ``adaptation`` and ``hyper``, or empty."""
        if adaptation not in NEEDS:
            return f"there is no graph for the estimator {adaptation}"
        loss, product, constants = NEEDS[adaptation]
        if loss != self.loss or (product and not self.product):
            return f"the fleet's graph for training is not of the estimator {adaptation}"
        for name in constants:
            made, asked = self.hyper.get(name, _default_of_later(hyper, name)), schema.plain(getattr(hyper, name))
            if made is None:
                return f"the fleet's graph for training does not say its {name}, and the round has {asked!r}"
            if made != asked:
                return f"the fleet's graph for training was made with {name} = {made!r}, and the round has {asked!r}"
        return ""


def _default_of_later(hyper: Any, name: str) -> Any:
    """The value in graphs that were made before there was such a setting; None for a setting without one."""
    return {field.name: field.default for field in fields(hyper) if "sparse" in field.metadata}.get(name)


@dataclass(frozen=True)
class TrainGraph:
    """A graph ``train`` in memory. graphs: ONNX files ``train`` and maybe ``product``. golden: arrays ``x``, ``y`` and
    one for each graph. first: initial values of the groups that stay on a device."""

    layout: Layout
    info: TrainInfo
    graphs: Mapping[str, bytes]
    golden: Mapping[str, Array]
    first: Params = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """"group/name" -> shape of the parameters that the graphs take."""
        return self.layout.shapes(LOSSES[self.info.loss])

    def outputs(self, kind: str) -> list[str]:
        """The outputs of the graph ``kind``, in order."""
        if kind == "product":
            return [f"product/{key}" for key in self.parameters]
        more = ["own"] if self.info.loss == "metavers" else []
        return ["loss", *more, *(f"gradient/{key}" for key in self.parameters)]


def golden_inputs(graph: TrainGraph, kind: str, seed: int, x: Array, y: Array) -> dict[str, Array]:
    """Inputs of the graph ``kind``: seeded weights, and episodes of the samples x, y. The class means of ``fedproto``
    and the direction of ``product`` are of weights with another seed."""
    layout, loss = graph.layout, graph.info.loss
    feed = {key: a for key, a in storage.flatten(layout.seeded(seed)).items() if key in graph.parameters}
    if kind == "product":
        other = storage.flatten(layout.seeded(seed + 1))
        feed |= {f"along/{key}": other[key] for key in graph.parameters}
    if loss in ("entropy", "fedproto"):
        feed |= {"x": x, "y": y}
    else:
        feed |= episode(x, y, x[::-1].copy(), y[::-1].copy(), int(y.max()) + 1)
    if loss == "metavers":
        feed |= {"margin": np.array(0.5, np.float32), "share": np.array(0.5, np.float32)}
    if loss == "fedproto":
        wide = layout.extended(("prototypes",), ()).seeded(seed)["prototypes"]
        feed |= {"total": wide["total"], "count": np.abs(np.round(wide["count"] * 4))}
    return feed


def episode(sx: Array, sy: Array, qx: Array, qy: Array, classes: int) -> dict[str, Array]:
    """The inputs of an episode with labels below ``classes``."""
    parts = {"support_x": sx, "support_y": sy, "query_x": qx, "query_y": qy}
    return {**{k: np.ascontiguousarray(a) for k, a in parts.items()}, "classes": np.zeros(classes, np.int64)}


def digest(outputs: Mapping[str, Array], names: list[str]) -> Array:
    """float64 [outputs, 2]: the norm and the sum of each."""
    wide = [np.asarray(outputs[name], np.float64) for name in names]
    return np.array([[np.sqrt((a * a).sum()), a.sum()] for a in wide])


def pack(graph: TrainGraph) -> bytes:
    """The container as bytes; equal graphs give equal bytes."""
    arrays: dict[str, Any] = {f"graph/{kind}": np.frombuffer(data, np.uint8) for kind, data in graph.graphs.items()}
    arrays |= {f"golden/{name}": array for name, array in graph.golden.items()}
    arrays |= {f"first/{key}": array for key, array in storage.flatten(graph.first).items()}
    text = json.dumps(schema.plain(graph.info), sort_keys=True, separators=(",", ":"))
    return storage.pack({name: arrays[name] for name in sorted(arrays)}, {"train": text})


def unpack(data: bytes, layout: Layout) -> TrainGraph:
    """Reads the container of a graph for ``layout``, without parsing its ONNX files. Raises BundleError."""
    if len(data) > MAX_BYTES:
        raise BundleError(f"{len(data)} bytes are over the limit of {MAX_BYTES}")
    try:
        arrays, metadata = storage.unpack(data, where="graph train")
        info, problems = schema.read(TrainInfo, json.loads(metadata["train"]), unknown="ignore")
    except StateError as error:
        raise BundleError(error.what, where=error.where) from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BundleError("the metadata of the graph 'train' is malformed", hint="fetch the graph again") from error
    if info is None:
        raise BundleError("the metadata of the graph 'train' is malformed: " + "; ".join(map(str, problems[:5])))
    if info.layout != layout.hash:
        raise BundleError(f"the graph 'train' is for the layout {info.layout}", expected=layout.hash)
    kinds = ("train", "product") if info.product else ("train",)
    known = {"golden/x", "golden/y", *(f"{part}/{kind}" for kind in kinds for part in ("graph", "golden"))}
    found = {name for name in arrays if not name.startswith("first/")}
    if found != known:
        what = f"the graph 'train' holds {', '.join(sorted(found))[:200] or 'nothing'}"
        raise BundleError(what, expected=", ".join(sorted(known)))
    values = first_weights(arrays, layout)
    graphs = {kind: graph_bytes(arrays[f"graph/{kind}"]) for kind in kinds}
    golden = {name.removeprefix("golden/"): arrays[name] for name in known if name.startswith("golden/")}
    graph = TrainGraph(layout, info, graphs, golden, values)
    _check_golden(graph)
    return graph


def _check_golden(graph: TrainGraph) -> None:
    x, spec = graph.golden["x"], graph.layout.input
    number = len(x) if x.ndim else 0
    check_golden(graph.golden, number, {
        "x": ((number, *spec.shape), spec.dtype), "y": truths_form(graph.layout, number),
        **{kind: ((len(graph.outputs(kind)), 2), "float64") for kind in graph.graphs},
    })
    y = graph.golden["y"]
    if graph.layout.task is None and (y.min() < 0 or y.max() >= len(graph.layout.classes)):
        raise BundleError("a golden label is not a class of the layout")
