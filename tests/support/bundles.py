"""Small bundles, each made once per test run, and fleets with a served model that ran no round."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from cloud_server.choices.first_settings import fleet_toml
from cloud_server.identity.create_fleet import create_fleet
from cloud_server.records.checkpoint import Checkpoint, Checkpoints, ServedModel
from cloud_server.records.fleet_folder import Fleet
from export.adapt_graph import with_adapt
from export.first_model import first
from export.full_bundle import Served, whole
from export.graph import export_graph
from fleet_core.algorithms.interface import Method, ServerState
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.data.samples import Samples, save
from fleet_core.learning import models
from fleet_core.model import graph_bundle
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import InputSpec, Layout
from fleet_core.personalization.bundle_format import Bundle
from fleet_core.personalization.gradient_steps import steps_of
from fleet_core.protocol.signing import Signer

CLASSES = ("a", "b", "c")
LAYOUT = models.describe("mlp", InputSpec((8,), mean=(0.1,) * 8), CLASSES, {"hidden": [6]})
SIGNER = Signer(b"\x0f" * 32)
KEY = SIGNER.public


def samples(number: int = 60, seed: int = 0) -> Samples:
    """Three separable classes in eight dimensions, ten seconds apart."""
    rng = np.random.default_rng(seed)
    y = np.arange(number) % 3
    x = (np.eye(3, 8)[y] * 3 + rng.normal(size=(number, 8)) / 2).astype(np.float32)
    return Samples(x, y, np.array(["d0"] * number), np.arange(number, dtype=np.float64) * 10, CLASSES)


def served_params(method: Method, layout: Layout, seed: int = 9) -> Params:
    """Random weights of the shared groups; learned rates are small and positive."""
    params = trees.only(layout.extended(method.down, method.shared).seeded(seed), method.shared)
    if "rates" in params:
        params["rates"] = {name: np.abs(array) / 100 for name, array in params["rates"].items()}
    return params


@cache
def plain() -> Graph:
    return export_graph(LAYOUT, kinds=("embed", "predict"), seed=3)


@cache
def stepping(rates: bool, groups: tuple[str, ...]) -> Graph:
    return with_adapt(plain(), rates=rates, groups=groups)


@cache
def graph_of(name: str) -> Graph:
    """The graph that ``metafleet init`` makes for this method."""
    method, initial = METHODS[name], models.initial(LAYOUT, 1)
    how = steps_of(method, method.hyper())
    if how is None:
        return plain()
    return replace(stepping(how.rates, how.groups), first=trees.only(initial, method.personal))


@cache
def bundle_of(name: str, *, stored: str = "fp32", int8: bool = False) -> Bundle:
    """The bundle that ``metafleet export`` makes for this method after round 7."""
    method = METHODS[name]
    served = Served("desk", KEY, method, method.hyper(), 7, served_params(method, LAYOUT), models.initial(LAYOUT, 1))
    data = samples() if int8 else None
    return whole(served, graph_of(name), stored=stored, data=data, say=lambda line: None)


def served_fleet(folder: Path, name: str = "pfldyn-proto", **hyper: Any) -> Fleet:
    """A fleet with the model served after round 2, and a checkpoint of round 3 with a different served model."""
    folder.mkdir(parents=True, exist_ok=True)
    save(folder.with_name("all.npz"), samples())
    text = fleet_toml(samples(), "desk", name, "mlp", rounds=3, seed=0, min_devices=1)
    text += "".join(f"{key} = {value}\n" for key, value in hyper.items())
    fleet = create_fleet(folder, text, lambda settings, head: _first(settings.model.name, settings.model.input))
    layout = graph_bundle.unpack(fleet.graph_bytes()).layout
    states = Checkpoints(folder / "state")
    states.save_served(ServedModel(2, served_params(fleet.method, layout)))
    later = trees.widened(served_params(fleet.method, layout, 10))
    states.save(Checkpoint(3, ServerState(trees.scale(later, 2.0), later), facts={"method": name}))
    return fleet


def node_of(model: onnx.ModelProto, output: str) -> onnx.NodeProto:
    """The node that computes a value, in whichever loop."""
    graphs, found = [model.graph], []
    for graph in graphs:
        found += [node for node in graph.node if output in node.output]
        graphs += [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    (node,) = found
    return node


def one_batch_size(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 5


def newer(model: onnx.ModelProto) -> None:
    model.ir_version = 14


@cache
def _first(model: str, spec: InputSpec) -> tuple[bytes, bytes]:
    return first(model, spec, CLASSES, {}, head=True, seed=0)
