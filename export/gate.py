"""The gate: a graph is let out only when every parameter can be replaced and the numbers are torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto

from fleet_core import storage
from fleet_core.algorithms import trees
from fleet_core.algorithms.trees import Params
from fleet_core.bundle import GRAPH_GROUPS, Graph
from fleet_core.errors import BundleError
from fleet_core.learning.models import Network, outputs, to_torch

MAX_DIFFERENCE = 1e-5
BATCHES = (1, 3, 8)


def check(graph: Graph, network: Network) -> None:
    """Raises BundleError unless every graph takes exactly its groups' parameters as external initializers, and gives
    torch's outputs to 1e-5 under other weights than it was traced with, on batches of other sizes."""
    for kind, data in graph.graphs.items():
        _check_file(graph, kind, data)
        for round_, batch in enumerate(BATCHES):
            _check_numbers(graph, kind, data, network, seed=graph.info.seed + 100 + round_, batch=batch)


def _check_file(graph: Graph, kind: str, data: bytes) -> None:
    model = onnx.load_model_from_string(data)
    external = {t.name for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL}
    wanted = set(storage.flatten(_weights(graph, kind, 0)))
    if external != wanted:
        raise BundleError(
            f"the graph '{kind}' does not take {', '.join(sorted(wanted ^ external)[:5])} as the layout says",
            expected="every parameter of the layout as an external initializer, used and not folded into a constant",
        )
    versions = (model.ir_version, *(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")))
    stated = (graph.info.ir_version, graph.info.opset)
    if versions != stated:
        raise BundleError(f"the graph '{kind}' has IR and opset {versions}", expected=f"{stated}")


def _check_numbers(graph: Graph, kind: str, data: bytes, network: Network, *, seed: int, batch: int) -> None:
    weights = _weights(graph, kind, seed)
    x = np.resize(graph.golden["x"][::-1], (batch, *graph.golden["x"].shape[1:]))
    with torch.no_grad():
        wanted = outputs(network, to_torch(weights), torch.tensor(x), kind).numpy()
    try:
        got = run(data, weights, x)
    except Exception as error:  # onnxruntime raises errors of many classes, none of them documented
        raise BundleError(f"the graph '{kind}' does not run on {batch} samples: {error}") from error
    difference = float(np.abs(got - wanted).max()) if got.shape == wanted.shape else float("inf")
    if not difference <= MAX_DIFFERENCE:
        raise BundleError(
            f"the graph '{kind}' differs from torch by {difference:.1e} on {batch} samples with other weights",
            expected=f"at most {MAX_DIFFERENCE:.0e}",
        )


def run(data: bytes, weights: Params, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One output of an ONNX file under ``weights``."""
    flat = storage.flatten(weights)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in flat.values()]
    options.add_external_initializers(list(flat), values)
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return np.array(session.run(None, {"x": x})[0])


def _weights(graph: Graph, kind: str, seed: int) -> Params:
    return trees.only(graph.layout.seeded(seed), GRAPH_GROUPS[kind])
