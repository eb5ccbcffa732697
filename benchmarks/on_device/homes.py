"""Devices with a served model and labelled samples, as folders for ``edge-agent``; and the same graphs and weights as
plain files, for the bare script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.on_device.cases import LR, STEPS, SUPPORT, Case, drawn, plain
from edge_agent.device.state import DeviceState, Weights
from edge_agent.inference import relearn
from edge_agent.inference.service import service_of
from export.adapt_graph import with_adapt
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage, trees
from fleet_core.board.device_settings import settings_of
from fleet_core.data import samples as stored
from fleet_core.data.samples import Samples
from fleet_core.learning import models
from fleet_core.model import graph_bundle, payloads
from fleet_core.model.graph_bundle import GRAPH_GROUPS, Graph

DEVICE = f'[device]\nname = "one"\nfleet = "bench"\nkey = "{"0" * 64}"\n'
METHODS_OF: dict[str, tuple[str, dict[str, Any]]] = {
    "proto": ("pfldyn-proto", {}),
    "maml": ("per-fedavg-fo", {"inner_steps": STEPS, "inner_lr": LR}),
}
"""The method and hyper-parameters of a device that answers by class means, or after gradient steps."""


@dataclass(frozen=True)
class Place:
    """homes: by ``METHODS_OF``. bare: the arguments of ``bare.py``, by command. x: ``.npy`` of one raw sample."""

    homes: dict[str, Path]
    bare: dict[str, list[str]]
    x: Path


def made(case: Case, folder: Path, graph: Graph | None = None, *, support: int = SUPPORT) -> Place:
    """Everything of one model, below ``folder``. graph: its bundle with ``adapt``, if there is one. support: number of
    labelled samples. Needs torch."""
    layout = case.layout()
    graph = graph or with_adapt(plain(layout), rates=False)
    weights = models.initial(layout, 0)
    x, y = drawn(layout, support, 1)
    one = folder / "one.npy"
    folder.mkdir(parents=True)
    np.save(one, x[0])
    np.savez(folder / "one.npz", x=x[:1])
    np.savez(folder / "support.npz", x=x, y=y)
    homes = {name: _home(folder / name, name, graph, weights, x, y) for name in METHODS_OF}
    predict = {name: _bare(folder, kind, graph.graphs[kind], trees.only(weights, GRAPH_GROUPS[kind]), "one.npz")
               for name, kind in (("proto", "embed"), ("maml", "predict"))}
    adapt = [*_bare(folder, "adapt", graph.adapt, weights, "support.npz"), str(STEPS), str(LR)]
    return Place(homes, {**{f"predict {name}": one for name, one in predict.items()}, "adapt": adapt}, one)


def _home(folder: Path, name: str, graph: Graph, weights: Any, x: Any, y: Any) -> Path:
    method_name, hyper = METHODS_OF[name]
    method = METHODS[method_name]
    folder.mkdir()
    (folder / "device.toml").write_text(DEVICE)
    DeviceState(folder).save_graph("0" * 32, graph_bundle.pack(graph))
    service = service_of(folder, settings_of(folder))
    service.known_classes()
    stored.append(service.local().added_path, Samples(x, y, classes=service.layout.classes))
    served = trees.only(weights, method.shared)
    service.load(method, hyper, Weights(payloads.identity(served), 1, served))
    relearn.personalize(service)
    return folder


def _bare(folder: Path, kind: str, data: bytes, weights: Any, samples: str) -> list[str]:
    """The arguments of ``bare.py`` after the command: the files."""
    (folder / f"{kind}.onnx").write_bytes(data)
    np.savez(folder / f"{kind}.npz", **storage.flatten(weights))
    return [str(folder / f"{kind}.onnx"), str(folder / f"{kind}.npz"), str(folder / samples)]
