"""Device folders without a fleet: a graph, a served model, samples with eight values and three classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.compute.onnx_session import Session
from edge_agent.device.state import DeviceState, Weights
from edge_agent.inference.service import Service, service_of
from export.adapt_graph import with_adapt
from export.graph import export_graph
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.board.device_settings import settings_of
from fleet_core.data import samples as stored
from fleet_core.data.samples import Samples
from fleet_core.learning import models
from fleet_core.model import graph_bundle, payloads
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import InputSpec, Layout

CLASSES = ("a", "b", "c")
DEVICE = f'[device]\nname = "d0"\nfleet = "t"\nkey = "{"0" * 64}"\n'

SENSORS = """
[unlabelled]
max_age_s = 60.0

[alarm]
command = ["sh", "ring.sh"]

[privacy]
secure_aggregation = true

[[source]]
kind = "command"
name = "pump"
command = ["python3", "read_bus.py"]
gain = [0.5, 2.0]

[[source]]
kind = "folder"
path = "incoming"

[[button]]
kind = "gpio"
line = 17
label = "a"
source = "pump"
"""
"""Tables of device.toml."""


def counted_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which every run of a session from now on appends its number of samples."""
    seen: list[int] = []
    run = Session.run

    def counted(self: Session, x: Any) -> Any:
        seen.append(len(x))
        return run(self, x)

    monkeypatch.setattr(Session, "run", counted)
    return seen


@cache
def layout() -> Layout:
    """The layout of ``tests.support.inprocess.config_text``."""
    return models.describe("mlp", InputSpec((8,)), CLASSES, {"hidden": [6]})


@cache
def plain() -> Graph:
    """A graph without gradient steps."""
    return export_graph(layout(), kinds=("embed", "predict"))


@cache
def stepping(rates: bool = False) -> Graph:
    """A graph with gradient steps."""
    return with_adapt(plain(), rates=rates)


def graph_for(method: str) -> Graph:
    """The graph that a fleet makes for the method, with gradient steps if it takes any."""
    made = METHODS[method]
    if made.personalizer not in ("sgd", "meta-sgd", "own"):
        return plain()
    graph = stepping(made.personalizer == "meta-sgd")
    return replace(graph, first=trees.only(models.initial(layout(), 0), made.personal))


def served_weights(method: str, seed: int = 1, factor: float = 2.0) -> Params:
    """Weights that give confident answers, as a trained model does; learned rates differ."""
    shared = METHODS[method].shared
    wire = layout().extended(shared, ("body", "head"))
    rng = np.random.default_rng(seed)
    drawn = {"rates": {n: rng.uniform(0.1, 0.3, a.shape).astype(np.float32)
                       for n, a in wire.zeros(("rates",)).get("rates", {}).items()}}
    tree = {**trees.scale(models.initial(layout(), seed), np.float32(factor)), **drawn}
    return wire.ordered(trees.only(tree, shared))


def weights_of(params: Params, round_number: int = 1) -> Weights:
    return Weights(payloads.identity(params), round_number, {g: dict(named) for g, named in params.items()})


def home(folder: Path, samples: Samples | None = None, *, toml: str = "") -> Path:
    """A device's folder, with recorded samples if given."""
    folder.mkdir(parents=True)
    (folder / "device.toml").write_text(DEVICE + toml)
    if samples is not None:
        stored.save(folder / "samples.npz", samples)
    return folder


def reopened(place: Path) -> Service:
    """A service that reads the folder as a new process does."""
    return service_of(place, settings_of(place))


def restored(place: Path) -> Service:
    service = reopened(place)
    service.restore()
    return service


def service_with_model(
    place: Path, method: str, *, params: Params | None = None, hyper: Mapping[str, Any] | None = None,
    graph: Graph | None = None, load: bool = True,
) -> Service:
    """A service that has loaded the served model of round 1."""
    made = graph or graph_for(method)
    data, name = graph_bundle.pack(made), f"{METHODS[method].personalizer:0>32}"
    DeviceState(place).save_graph(name, data)
    service = reopened(place)
    service.install(name, graph_bundle.unpack(data))
    if load:
        service.load(METHODS[method], hyper or {}, weights_of(params or served_weights(method)))
    return service
