"""Graphs ``train`` of toy fleets, opened, each made once for all tests of a process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from cloud_server.records.fleet_folder import Fleet
from edge_agent.compute.onnx_session import open_function, open_kind
from export.graph import export_graph
from export.train_graph import export_train
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.learning import models
from fleet_core.model.layout import Layout
from fleet_core.model.train_graph import NEEDS, TrainGraph, pack
from fleet_core.training.graph_engine import Opened
from tests.support.simulation import SEED, hyper_of, toy_layout

ABLE = [name for name, method in METHODS.items() if method.adaptation in NEEDS]
"""The methods that train without torch."""

OF_LOSS = {"entropy": "per-fedavg-exact", "proto": "pfldyn-proto", "metavers": "metavers", "joint": "fedavg-joint",
           "fedproto": "fedproto"}


def train_graph(name: str, layout: Layout | None = None, *, narrow: bool = False) -> TrainGraph:
    """The checked graph for a method. One serves all methods of its loss: with initial values of body and head. narrow:
    without second derivatives, which take most of the time to export, unless the method needs them."""
    layout = toy_layout() if layout is None else layout
    loss, second, _ = NEEDS[METHODS[name].adaptation]
    made = _made("fedavg" if narrow and loss == "entropy" and not second else OF_LOSS[loss], layout.to_json())
    first = trees.only(models.initial(layout, SEED), METHODS[name].personal)
    return replace(made, first=first)


def packed(fleet: Fleet, layout: Layout, first: Params) -> bytes:
    """The graph for a new fleet, as ``create_fleet`` asks for it."""
    made = train_graph(fleet.method.name, layout, narrow=True)
    return pack(replace(made, first=trees.only(first, fleet.method.personal)))


@cache
def _made(name: str, layout: str) -> TrainGraph:
    found = Layout.from_json(layout)
    return export_train(found, METHODS[name], hyper_of(name), models.initial(found, SEED), seed=SEED)


@cache
def _embedding(layout: str) -> Any:
    return export_graph(Layout.from_json(layout))


def opened(graph: TrainGraph) -> Opened:
    def embed(params: Params, x: Any) -> Any:
        return open_kind(_embedding(graph.layout.to_json()), "embed", params).run(x)

    return Opened(graph, {kind: open_function(data) for kind, data in graph.graphs.items()}, embed)
