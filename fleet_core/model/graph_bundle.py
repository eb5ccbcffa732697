"""The graph bundle: a model without its weights, in one safetensors container. Also weights as bytes.

A bundle holds the layout, ONNX graphs, and golden inputs and outputs. Graphs: ``embed`` (raw samples -> z), ``predict``
(raw samples -> logits, for methods with a head) and ``adapt`` (weights and a support set -> weights after gradient
steps). Every parameter of a graph is an external initializer named ``group/name``, so that one graph works with the
weights of every round. The golden outputs were computed with the weights ``layout.seeded(seed)``, so that a graph can
be checked before any weights arrive.

Container: tensors ``graph/<kind>`` uint8 [bytes], ``golden/x`` ``golden/<kind>``; metadata ``bundle``, a JSON object.
With ``adapt`` also ``golden/y``, labels or targets of x, and ``golden/adapt``, the answers to x after steps on x and y;
and ``first/<group>/<name>``, the initial values of the groups that stay on the device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fleet_core.base import schema, storage, trees
from fleet_core.base.errors import BundleError, CodecError, StateError
from fleet_core.base.trees import Params
from fleet_core.model.layout import MODEL_GROUPS, Layout
from fleet_core.tasks.labels import MultiLabel

GRAPH_GROUPS: Mapping[str, tuple[str, ...]] = {"embed": ("body",), "predict": ("body", "head")}
"""The graphs from samples to outputs, and the groups of arrays that each takes."""

GOLDEN_STEPS = (1, 10)
"""Numbers of gradient steps after which ``adapt`` has golden logits."""

FORMAT = 1
MAX_BYTES = 64 << 20
MAX_GOLDEN = 64
MAX_FIRST_BYTES = 16 << 20


@dataclass(frozen=True)
class AdaptInfo:
    """The gradient steps of ``adapt``. groups: the groups of the model that change. rates: whether it takes a learning
    rate per value, ``rates/group.name``, instead of one for all. lr: the learning rate of the golden steps."""

    groups: tuple[str, ...] = field(metadata={"choices": MODEL_GROUPS})
    rates: bool
    lr: float = field(metadata={"min": 0.0, "max": 1e30})


@dataclass(frozen=True)
class GraphInfo:
    """Metadata of a bundle.

    seed: of the golden weights. atol, rtol: tolerance of golden outputs (|got − wanted| ≤ atol + rtol·|wanted|).
    ir_version, opset: of the ONNX files. min_onnxruntime: the oldest release known to run them. adapt: None when the
    bundle has no graph ``adapt``.
    """

    format: int = field(metadata={"min": FORMAT, "max": FORMAT})
    seed: int = field(metadata={"min": 0, "max": 2**63})
    atol: float = field(metadata={"min": 0.0, "max": 1.0})
    rtol: float = field(metadata={"min": 0.0, "max": 1.0})
    ir_version: int = field(metadata={"min": 1, "max": 1000})
    opset: int = field(metadata={"min": 1, "max": 1000})
    min_onnxruntime: str = field(metadata={"pattern": r"\d+\.\d+\.\d+"})
    adapt: AdaptInfo | None = None


@dataclass(frozen=True)
class Graph:
    """A bundle in memory.

    graphs: the ONNX files ``embed`` and ``predict``, by kind. golden: ``x`` (raw samples) and, for every kind, the
    float32 outputs with the weights ``layout.seeded(info.seed)``. adapt: the ONNX file ``adapt``, empty when there is
    none; its golden arrays are ``y`` int64 [n], or targets float32 [n, K], and ``adapt`` float32 [GOLDEN_STEPS, n,
    K]. first: the initial values, the same on every device, of the groups that stay on the device.
    """

    layout: Layout
    graphs: Mapping[str, bytes]
    golden: Mapping[str, np.ndarray[Any, Any]]
    info: GraphInfo
    adapt: bytes = b""
    first: Params = field(default_factory=dict)

    def adapt_weights(self, seed: int) -> dict[str, dict[str, Any]]:
        """Seeded weights of all groups that ``adapt`` takes; learning rates lie around ``info.adapt.lr``."""
        steps = self.info.adapt
        if steps is None:
            raise BundleError("the bundle has no graph 'adapt'",
                              hint="its model or method takes no gradient steps on a device")
        if not steps.rates:
            return trees.only(self.layout.seeded(seed), MODEL_GROUPS)
        weights = trees.only(self.layout.extended(("rates",), steps.groups).seeded(seed), (*MODEL_GROUPS, "rates"))
        return {**weights, "rates": {n: np.float32(steps.lr) * (1 + a) for n, a in weights["rates"].items()}}

    def adapt_inputs(self, params: Params) -> dict[str, dict[str, Any]]:
        """The weights that ``adapt`` takes, from a served model's ``params``: the model, the initial values of groups
        that stay on the device, and the learned rates. Raises CodecError for weights of another layout."""
        model = self.layout.ordered({**self.first, **trees.only(params, MODEL_GROUPS)})
        self.layout.check(model, MODEL_GROUPS)
        if self.info.adapt is None or not self.info.adapt.rates:
            return model
        wide = self.layout.extended(("rates",), self.info.adapt.groups)
        rates = wide.ordered(trees.only(params, ("rates",)))
        wide.check(rates, ("rates",))
        return {**model, **rates}


def pack(graph: Graph) -> bytes:
    """The bundle as bytes; equal bundles give equal bytes."""
    files = {**graph.graphs, **({"adapt": graph.adapt} if graph.adapt else {})}
    arrays: dict[str, Any] = {f"graph/{kind}": np.frombuffer(data, np.uint8) for kind, data in files.items()}
    arrays |= {f"golden/{name}": array for name, array in graph.golden.items()}
    arrays |= {f"first/{key}": array for key, array in storage.flatten(graph.first).items()}
    head = {"info": schema.plain(graph.info), "layout": json.loads(graph.layout.to_json())}
    text = json.dumps(head, sort_keys=True, separators=(",", ":"))
    return storage.pack({name: arrays[name] for name in sorted(arrays)}, {"bundle": text})


def unpack(data: bytes) -> Graph:
    """Reads a bundle from bytes, without parsing its ONNX files. Raises BundleError."""
    if len(data) > MAX_BYTES:
        raise BundleError(f"{len(data)} bytes are over the limit of {MAX_BYTES}")
    try:
        arrays, metadata = storage.unpack(data, where="graph bundle")
    except StateError as error:
        raise BundleError(error.what, where=error.where) from error
    info, layout = _head(metadata)
    return assemble(layout, info, arrays)


def read(path: Path) -> Graph:
    """Reads a bundle from a file, as ``unpack`` does from bytes. Raises BundleError."""
    try:
        arrays, metadata = storage.map_file(path, limit=MAX_BYTES)
    except StateError as error:
        raise BundleError(error.what, where=error.where) from error
    info, layout = _head(metadata)
    return assemble(layout, info, arrays)


def assemble(layout: Layout, info: GraphInfo, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Graph:
    """A bundle from the container's ``arrays``. Raises BundleError unless they match ``layout`` and ``info``."""
    kinds = [kind for kind in GRAPH_GROUPS if f"graph/{kind}" in arrays]
    known = {"golden/x"} | {f"{part}/{kind}" for kind in kinds for part in ("graph", "golden")}
    if info.adapt is not None:
        known |= {"graph/adapt", "graph/predict", "golden/adapt", "golden/y"}
    if not kinds or {name for name in arrays if not name.startswith("first/")} != known:
        raise BundleError(
            f"the bundle holds {', '.join(sorted(arrays))[:200] or 'nothing'}",
            expected=", ".join(sorted(known | {"graph/embed", "golden/embed"})),
        )
    graphs = {kind: graph_bytes(arrays[f"graph/{kind}"]) for kind in kinds}
    golden = {name.removeprefix("golden/"): arrays[name] for name in sorted(known) if name.startswith("golden/")}
    _check_golden(golden, layout)
    adapt = b"" if info.adapt is None else graph_bytes(arrays["graph/adapt"])
    return Graph(layout, graphs, golden, info, adapt, first_weights(arrays, layout))


def golden_truths(layout: Layout, number: int, start: int = 0) -> np.ndarray[Any, Any]:
    """Labels [number], or of a task [number, K] standardized targets near and far from 0, or 0 and 1, with which graphs
    are checked. start: of the sequence."""
    rows = np.arange(start, start + number)
    if layout.task is None:
        return np.asarray(rows % len(layout.classes))
    wave = 2 * np.sin(rows[:, None] + np.arange(len(layout.answers)))
    return np.asarray(wave > 0 if isinstance(layout.task, MultiLabel) else wave, np.float32)


def truths_form(layout: Layout, number: int) -> tuple[tuple[int, ...], str]:
    """Shape and type of ``golden_truths``."""
    return ((number,), "int64") if layout.task is None else ((number, len(layout.answers)), "float32")


def first_weights(arrays: Mapping[str, Any], layout: Layout) -> Params:
    """The initial values that stay on a device, whole groups of the model, from a container's arrays. Raises
    BundleError."""
    first = {name.removeprefix("first/"): array for name, array in arrays.items() if name.startswith("first/")}
    try:
        return checked_weights(first, layout, tuple({key.partition("/")[0] for key in first}))
    except CodecError as error:
        what = f"the initial values do not match the layout: {error.what}"
        raise BundleError(what, expected=error.expected) from error


def weights_bytes(params: Params) -> bytes:
    """Weights (numpy) as safetensors bytes, named ``group/name``."""
    return storage.pack(storage.flatten(params))


def weights_from_bytes(data: bytes, layout: Layout, groups: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Float32 weights in the layout's order. Raises CodecError unless they are exactly the arrays of ``groups``."""
    try:
        arrays, _ = storage.unpack(data, where="weights")
    except StateError as error:
        raise CodecError(error.what, where=error.where) from error
    return checked_weights(arrays, layout, groups)


def checked_weights(
    arrays: Mapping[str, Any], layout: Layout, groups: tuple[str, ...], dtype: str = "float32"
) -> dict[str, dict[str, Any]]:
    """Arrays named ``group/name`` as float32 weights in the layout's order. Raises CodecError unless they are exactly
    the arrays of ``groups`` and all of ``dtype``."""
    for name, array in arrays.items():
        if array.dtype != dtype:
            raise CodecError(f"array {name[:200]} is {array.dtype}", where="weights", expected=dtype)
    try:
        params = storage.unflatten({name: array.astype(np.float32, copy=False) for name, array in arrays.items()})
    except StateError as error:
        raise CodecError(error.what, where="weights", expected=error.expected) from error
    layout.check(params, groups)
    return layout.ordered(params)


def _head(metadata: Mapping[str, str]) -> tuple[GraphInfo, Layout]:
    try:
        head = json.loads(metadata["bundle"])
        info, problems = schema.read(GraphInfo, head["info"], unknown="ignore")
        layout = Layout.from_json(json.dumps(head["layout"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BundleError("the bundle's metadata is malformed", hint="fetch the graph again") from error
    if info is None:
        raise BundleError("the bundle's metadata is malformed: " + "; ".join(map(str, problems[:5])))
    return info, layout


def graph_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """The ONNX file in a container's array. Raises BundleError."""
    if array.dtype != np.uint8 or array.ndim != 1 or not len(array):
        raise BundleError("a graph is not a one-dimensional uint8 array")
    return array.tobytes()


def _check_golden(golden: Mapping[str, np.ndarray[Any, Any]], layout: Layout) -> None:
    number = len(golden["x"]) if golden["x"].ndim else 0
    width = len(layout.answers)
    check_golden(golden, number, {
        "x": ((number, *layout.input.shape), layout.input.dtype),
        "embed": ((number, layout.embedding), "float32"),
        "predict": ((number, width), "float32"),
        "y": truths_form(layout, number),
        "adapt": ((len(GOLDEN_STEPS), number, width), "float32"),
    })


def check_golden(
    golden: Mapping[str, np.ndarray[Any, Any]], number: int, wanted: Mapping[str, tuple[tuple[int, ...], str]]
) -> None:
    """number: of samples. wanted: shape and type by name. Raises BundleError."""
    for name, array in golden.items():
        if not 0 < number <= MAX_GOLDEN or (array.shape, str(array.dtype)) != wanted[name]:
            raise BundleError(f"golden {name} is {array.dtype} {list(array.shape)}", expected=f"{wanted[name]}")
        if not np.isfinite(array).all():
            raise BundleError(f"golden {name} holds a value that is not finite")
