"""The ways to personalize on a device: onnxruntime and numpy, no torch.

A way takes a bundle's graphs, the served model's weights and a support set, and returns a predictor: ``edge_agent``'s
own for class means, neighbours and heads; gradient steps are those of the graph ``adapt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.compute.onnx_session import open_kind
from edge_agent.inference.predictor import Predictor
from fleet_core.backbone.onnx_runtime import runtime
from fleet_core.base import storage, trees
from fleet_core.base.trees import Params
from fleet_core.model import graph_bundle
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import MODEL_GROUPS
from fleet_core.personalization.linear_head import Head
from fleet_core.personalization.nearest import Prototypes

Array = np.ndarray[Any, Any]
Setting = Mapping[str, float]

NOTHING: tuple[Setting, ...] = ({},)
STEPS: tuple[Setting, ...] = tuple({"lr": lr, "steps": s} for lr in (0.03, 0.1, 0.3) for s in (1, 5, 20))
LONGER: tuple[Setting, ...] = tuple({"lr": lr, "steps": s} for lr in (0.02, 0.1) for s in (5, 20, 50))
NEAR: tuple[Setting, ...] = tuple({"neighbours": k} for k in (1, 3, 10))


@dataclass(frozen=True)
class Way:
    """method: trains the model. graph: the bundle. settings: to choose from."""

    name: str
    method: str
    graph: str
    settings: tuple[Setting, ...] = NOTHING


WAYS = (
    Way("Proto", "pfldyn-proto", "plain"),
    Way("MAML", "per-fedavg-fo", "all", STEPS),
    Way("Meta-SGD", "fedmeta-metasgd", "rates"),
    Way("fine-tuned FedAvg", "fedavg", "all", LONGER),
    Way("head only", "fedavg", "plain"),
    Way("kNN", "fedavg", "plain", NEAR),
    Way("not personalized", "fedavg", "plain"),
)


def predictor(way: Way, graph: Graph, weights: Params, x: Array, y: Array, setting: Setting) -> Predictor:
    """The predictor after personalizing on the raw samples x with labels y int64. Raises FleetError."""
    model = trees.only(weights, MODEL_GROUPS)
    if way.name == "Proto":
        own = Predictor.proto(graph, model, Prototypes.empty(len(graph.layout.classes), graph.layout.embedding))
        return Predictor(own.session, Prototypes.from_support(own.session.run, x, y, len(graph.layout.classes)))
    if way.name == "head only":
        encoder = open_kind(graph, "embed", model)
        return Predictor(encoder, fitted=Head.fit(encoder.run(x), y, len(graph.layout.classes)))
    if way.name == "kNN":
        return Predictor.knn(graph, model, x, y, int(setting["neighbours"]), None)
    if way.name == "not personalized":
        return Predictor.head(graph, model)
    return Predictor.head(graph, Stepping(graph, weights).after(x, y, setting))


class Stepping:
    """The graph ``adapt`` with the served model's weights in it."""

    def __init__(self, graph: Graph, weights: Params) -> None:
        assert graph.info.adapt is not None
        self._rates, self._weights = graph.info.adapt.rates, weights
        groups = (*MODEL_GROUPS, "rates") if self._rates else MODEL_GROUPS
        self._session = _open(graph.adapt, trees.only(weights, groups))
        self._keys = [output.name.removeprefix("adapted/") for output in self._session.get_outputs()]

    def after(self, x: Array, y: Array, setting: Setting) -> dict[str, dict[str, Any]]:
        """The model's weights after the setting's steps; learned rates take one step."""
        rate = {} if self._rates else {"lr": np.array(setting["lr"], np.float32)}
        steps = np.array(int(setting.get("steps", 1)), np.int64)
        found = self._session.run(None, {"support_x": x, "support_y": y, "steps": steps, **rate})
        moved = {key: np.array(array) for key, array in zip(self._keys, found, strict=True)}
        return storage.unflatten({**storage.flatten(trees.only(self._weights, MODEL_GROUPS)), **moved})


def _open(data: bytes, weights: Params) -> Any:
    """Like ``edge_agent.compute.onnx_session.open_session``, for a graph of several inputs."""
    onnxruntime = runtime()
    flat = storage.flatten(weights)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = 1, 1, 4
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.add_external_initializers(list(flat), [onnxruntime.OrtValue.ortvalue_from_numpy(a) for a in flat.values()])
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def load(graph: Path, weights: Path) -> tuple[Graph, dict[str, dict[str, Any]]]:
    """A bundle and weights from their files."""
    arrays, _ = storage.unpack(weights.read_bytes(), where=str(weights))
    return graph_bundle.unpack(graph.read_bytes()), storage.unflatten(arrays)


def drawn(y: Array, number: int, rng: np.random.Generator) -> Array:
    """Rows of ``number`` random samples of each class; all of a class that has fewer."""
    rows = [rng.permutation(np.flatnonzero(y == label))[:number] for label in np.unique(y)]
    return np.sort(np.concatenate(rows))

