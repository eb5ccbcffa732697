"""Makes a bundle from a fleet's graph and served weights, and compares its graphs with torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from export import gate
from export.int8_encoder import quantized
from export.method_steps import with_steps
from fleet_core.algorithms.interface import Method
from fleet_core.base import schema, trees
from fleet_core.base.errors import BundleError
from fleet_core.base.trees import Params
from fleet_core.data.samples import Samples
from fleet_core.learning.models import build
from fleet_core.model import payloads
from fleet_core.model.graph_bundle import Graph
from fleet_core.personalization import device_bundle
from fleet_core.personalization.bundle_format import FORMAT, Bundle, Manifest, ModelInfo
from fleet_core.personalization.gradient_steps import Steps, steps_of, trains
from fleet_core.protocol.round_messages import MethodRef


@dataclass(frozen=True)
class Served:
    """A fleet's served model. fleet: the name. key: the fleet's public key, in hex. params: float32, after ``round``.
    initial: the model's first weights. backbone: its file, empty when the model has none."""

    fleet: str
    key: str
    method: Method
    hyper: Any
    round: int
    params: Params
    initial: Params
    backbone: bytes = b""


def whole(served: Served, graph: Graph, *, stored: str, data: Samples | None, say: Callable[[str], None]) -> Bundle:
    """The checked bundle. stored: one of ``bundle_format.STORED``. data: samples to calibrate a quantized encoder, None
    for a bundle without one.

    Raises BundleError if a graph fails its check, or if a device without torch could not answer.
    """
    method = served.method
    if not graph.adapt and not trains(method):
        graph = with_steps(graph, method, served.hyper, served.initial, say)
    if graph.first:
        graph = replace(graph, first=device_bundle.as_stored(graph.first, stored))
    steps = _exported_steps(served, graph)
    graph = graph if steps else _without_steps(graph)
    _check_can_answer(served, graph, steps)
    say("comparing the graphs with torch …")
    gate.check(graph, build(graph.layout).eval())
    params = device_bundle.as_stored(served.params, stored)
    int8, info = (b"", None) if data is None else quantized(graph, trees.only(params, ("body",)), data, say)
    manifest = Manifest(
        format=FORMAT, fleet=served.fleet, key=served.key,
        method=MethodRef(method.name, method.version, schema.plain(served.hyper)),
        model=ModelInfo(payloads.identity(params), served.round, stored), adaptation=steps, graph=graph.info, int8=info,
        layout=graph.layout, layout_hash=graph.layout.hash,
    )  # fmt: skip
    return Bundle(manifest, graph, params, int8, backbone=served.backbone)


def _exported_steps(served: Served, graph: Graph) -> Steps | None:
    """The steps of the graph ``adapt``, which may have fewer groups than the method."""
    steps, traced = steps_of(served.method, served.hyper), graph.info.adapt
    if traced is None or steps is None:
        return None
    return replace(steps, groups=traced.groups, rates=traced.rates)


def _without_steps(graph: Graph) -> Graph:
    """Without ``adapt``, for a method whose steps were set to 0 after the graph was made."""
    golden = {name: array for name, array in graph.golden.items() if name not in ("y", "adapt")}
    return replace(graph, adapt=b"", golden=golden, info=replace(graph.info, adapt=None))


def _check_can_answer(served: Served, graph: Graph, steps: Steps | None) -> None:
    """Raises BundleError if a device without torch could not answer."""
    method = served.method
    complete_model = {tensor.group for tensor in graph.layout.tensors} <= set(method.shared)
    if not (complete_model or steps or method.personalizer in ("proto", "gp", "knn")):
        raise BundleError(
            f"a device without torch cannot answer with {method.name}: only training makes its model",
            hint="take a method whose personalization becomes a graph: metafleet methods",
        )
