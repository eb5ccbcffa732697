"""A bundle from a fleet's graph and served weights, compared with torch before it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from export import gate
from export.int8 import quantized
from export.method_steps import with_steps
from fleet_core.algorithms.interface import Method
from fleet_core.base import schema, trees
from fleet_core.base.errors import BundleError
from fleet_core.base.trees import Params
from fleet_core.data.samples import Samples
from fleet_core.learning.models import build
from fleet_core.model import codecs
from fleet_core.model.graph_bundle import Graph
from fleet_core.personalization import device_bundle
from fleet_core.personalization.bundle_format import FORMAT, Bundle, Manifest, ModelInfo
from fleet_core.personalization.gradient_steps import Steps, steps_of, trains
from fleet_core.protocol.round_messages import MethodRef


@dataclass(frozen=True)
class Served:
    """What a fleet has come to. fleet: its name. key: its public key, in hex. params: the served model, float32, after
    ``round``. initial: the model's first weights."""

    fleet: str
    key: str
    method: Method
    hyper: Any
    round: int
    params: Params
    initial: Params


def whole(served: Served, graph: Graph, *, stored: str, data: Samples | None, say: Callable[[str], None]) -> Bundle:
    """The bundle, gated. stored: of ``bundle_files.STORED``. data: to calibrate a quantized encoder with, None for
    none.

    Raises BundleError for a graph that fails its check, or where a device without torch would have no answers.
    """
    method = served.method
    if not graph.adapt and not trains(method):
        graph = with_steps(graph, method, served.hyper, served.initial, say)
    if graph.first:
        graph = replace(graph, first=device_bundle.as_stored(graph.first, stored))
    how = _adaptation(served, graph)
    graph = graph if how else _without_steps(graph)
    _check_answers(served, graph, how)
    say("comparing the graphs with torch …")
    gate.check(graph, build(graph.layout).eval())
    params = device_bundle.as_stored(served.params, stored)
    int8, info = (b"", None) if data is None else quantized(graph, trees.only(params, ("body",)), data, say)
    manifest = Manifest(
        format=FORMAT, fleet=served.fleet, key=served.key,
        method=MethodRef(method.name, method.version, schema.plain(served.hyper)),
        model=ModelInfo(codecs.identity(params), served.round, stored), adaptation=how, graph=graph.info, int8=info,
        layout=graph.layout, layout_hash=graph.layout.hash,
    )  # fmt: skip
    return Bundle(manifest, graph, params, int8)


def _adaptation(served: Served, graph: Graph) -> Steps | None:
    """The steps of the graph ``adapt``, which moves the head alone where the method's whole does not become a graph."""
    how, traced = steps_of(served.method, served.hyper), graph.info.adapt
    if traced is None or how is None:
        return None
    return replace(how, groups=traced.groups, rates=traced.rates)


def _without_steps(graph: Graph) -> Graph:
    """Without ``adapt``, for a method that was told not to step since the graph was made."""
    golden = {name: array for name, array in graph.golden.items() if name not in ("y", "adapt")}
    return replace(graph, adapt=b"", golden=golden, info=replace(graph.info, adapt=None))


def _check_answers(served: Served, graph: Graph, how: Steps | None) -> None:
    """Raises BundleError where nothing of it answers."""
    method = served.method
    as_it_is = {tensor.group for tensor in graph.layout.tensors} <= set(method.shared)
    if not (as_it_is or how or method.personalizer in ("proto", "gp", "knn")):
        raise BundleError(
            f"a device without torch has no answers by {method.name}: its own model comes of training alone",
            hint="take a method whose personalization becomes a graph: metafleet methods",
        )
