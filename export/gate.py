"""Checks an exported graph against torch: every parameter must be replaceable, and the outputs must be torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, numpy_helper

from export.loops import PASS
from fleet_core.base import storage, trees
from fleet_core.base.errors import BundleError
from fleet_core.base.trees import Params
from fleet_core.learning.gradient_estimators import entropy
from fleet_core.learning.gradients import leaves, value_and_gradient
from fleet_core.learning.models import Network, outputs, to_torch
from fleet_core.model.graph_bundle import GOLDEN_STEPS, GRAPH_GROUPS, Graph, golden_truths
from fleet_core.model.layout import MODEL_GROUPS
from fleet_core.training.round_plans import CHUNK

Array = np.ndarray[Any, Any]

MAX_DIFFERENCE = 1e-5
BATCHES = (1, 3, 8)
MAX_RELATIVE = {0: 0.0, 1: 1e-6, 10: 1e-3}
"""{steps: tolerated error of adapted weights against torch's, relative to each array's largest value}."""

TINY = 1e-30
SUPPORTS = (1, 3)


def check(graph: Graph, network: Network) -> None:
    """Raises BundleError unless every graph takes exactly its groups' parameters as external initializers and gives
    torch's outputs to 1e-5, with other weights and batch sizes than it was traced with. Calls ``check_adapt`` too."""
    for kind, data in graph.graphs.items():
        _check_file(graph, kind, data, _weights(graph, kind, 0))
        for round_, batch in enumerate(BATCHES):
            _check_numbers(graph, kind, data, network, seed=graph.info.seed + 100 + round_, batch=batch)
    if graph.info.adapt is not None:
        check_adapt(graph, network)


def check_adapt(graph: Graph, network: Network) -> None:
    """Raises BundleError unless ``adapt`` takes exactly its parameters as external initializers, gives torch's weights
    after 0, 1 and 10 steps within ``MAX_RELATIVE``, and gives its golden logits. Weights and support sizes differ from
    those it was traced with; one support needs more than one pass."""
    model = _check_file(graph, "adapt", graph.adapt, graph.adapt_weights(0))
    in_a_pass = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == PASS)
    for round_, size in enumerate((*SUPPORTS, int(in_a_pass) + 1)):
        _check_steps(graph, network, seed=graph.info.seed + 200 + round_, size=size)
    _check_golden_steps(graph)


def _check_file(graph: Graph, kind: str, data: bytes, weights: Params) -> onnx.ModelProto:
    model = onnx.load_model_from_string(data)
    external = {t.name for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL}
    wanted = set(storage.flatten(weights))
    if external != wanted:
        raise BundleError(
            f"the graph '{kind}' does not take {', '.join(sorted(wanted ^ external)[:5])} as the layout says",
            expected="every parameter of the layout as an external initializer, used and not folded into a constant",
        )
    versions = (model.ir_version, *(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")))
    stated = (graph.info.ir_version, graph.info.opset)
    if versions != stated:
        raise BundleError(f"the graph '{kind}' has IR and opset {versions}", expected=f"{stated}")
    return model


def _check_numbers(graph: Graph, kind: str, data: bytes, network: Network, *, seed: int, batch: int) -> None:
    weights = _weights(graph, kind, seed)
    x = _golden_x(graph, batch)
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


def _check_steps(graph: Graph, network: Network, *, seed: int, size: int) -> None:
    """Compares adapted weights with torch's on a support of ``size`` samples."""
    weights, x = graph.adapt_weights(seed), _golden_x(graph, size)
    y = golden_truths(graph.layout, size, start=1)
    wanted = steps_in_torch(graph, network, weights, x, y)
    try:
        got = run_adapt(graph, weights, x, y, tuple(MAX_RELATIVE))
    except Exception as error:  # onnxruntime raises errors of many classes, none of them documented
        raise BundleError(f"the graph 'adapt' does not run on {size} samples: {error}") from error
    for steps, arrays in wanted.items():
        for key, array in arrays.items():
            difference = _difference(got[steps].get(key), array)
            if not difference <= MAX_RELATIVE[steps]:
                raise BundleError(
                    f"the graph 'adapt' differs from torch by {difference:.1e} in {key} after {steps} steps on {size} "
                    "samples with other weights",
                    expected=f"at most {MAX_RELATIVE[steps]:.0e} of its largest value",
                )


def _difference(got: Array | None, wanted: Array) -> float:
    """The largest error relative to the largest value; infinite if the array is missing or of another shape."""
    if got is None or got.shape != wanted.shape:
        return float("inf")
    return float(np.abs(got - wanted).max(initial=0)) / max(float(np.abs(wanted).max(initial=0)), TINY)


def _check_golden_steps(graph: Graph) -> None:
    """Compares the golden logits by onnxruntime only, as a device does."""
    x, y, weights = graph.golden["x"], graph.golden["y"], graph.adapt_weights(graph.info.seed)
    adapted = run_adapt(graph, weights, x, y, GOLDEN_STEPS)
    for steps, wanted in zip(GOLDEN_STEPS, graph.golden["adapt"], strict=True):
        params = storage.unflatten({**storage.flatten(weights), **adapted[steps]})
        got = run(graph.graphs["predict"], trees.only(params, GRAPH_GROUPS["predict"]), x)
        if not np.allclose(got, wanted, atol=graph.info.atol, rtol=graph.info.rtol):
            raise BundleError(f"the graph 'adapt' does not give its golden outputs after {steps} steps")


def steps_in_torch(graph: Graph, network: Network, weights: Params, x: Array, y: Array) -> dict[int, dict[str, Array]]:
    """{steps: the adapted arrays ``group/name`` by torch} for each number of steps in ``MAX_RELATIVE``."""
    info = graph.info.adapt
    if info is None:
        raise BundleError("the bundle has no graph 'adapt'")
    w = to_torch(trees.only(weights, MODEL_GROUPS))
    rates = trees.apply(lambda _: info.lr, trees.only(w, info.groups))
    if info.rates:
        rates = {g: {n: torch.tensor(weights["rates"][f"{g}.{n}"]) for n in named} for g, named in rates.items()}
    adapted = {}
    for steps in range(max(MAX_RELATIVE) + 1):
        if steps:
            gradient = _gradient(network, leaves(w), torch.tensor(x), torch.tensor(y))
            w |= trees.apply(lambda a, rate, g: a - rate * g, trees.only(w, info.groups), rates, gradient)
        if steps in MAX_RELATIVE:
            adapted[steps] = {k: a.detach().numpy() for k, a in storage.flatten(trees.only(w, info.groups)).items()}
    return adapted


def _gradient(network: Network, w: Params, x: torch.Tensor, y: torch.Tensor) -> Params:
    """The gradient of the mean cross-entropy, summed over ``CHUNK`` samples at a time, as in
    ``fleet_core.learning.personal_model``."""
    total = trees.zeros_like(w)
    for start in range(0, len(y), CHUNK):
        chunk = slice(start, start + CHUNK)
        _, gradient = value_and_gradient(entropy(network, x[chunk], y[chunk]), w)
        total = trees.axpy(len(y[chunk]) / len(y), gradient, total)
    return total


def run(data: bytes, weights: Params, x: Array) -> Array:
    """The output of an ONNX file with ``weights`` for samples x."""
    return np.array(_session(data, weights).run(None, {"x": x})[0])


def run_adapt(
    graph: Graph, weights: Params, x: Array, y: Array, numbers: tuple[int, ...]
) -> dict[int, dict[str, Array]]:
    """{steps: the adapted arrays ``group/name``} for each of ``numbers`` of steps on the support x, y."""
    info = graph.info.adapt
    rate = {} if info is None or info.rates else {"lr": np.array(info.lr, np.float32)}
    session = _session(graph.adapt, weights)
    keys = [output.name.removeprefix("adapted/") for output in session.get_outputs()]
    adapted = {}
    for steps in numbers:
        arrays = session.run(None, {"support_x": x, "support_y": y, "steps": np.array(steps), **rate})
        adapted[steps] = {key: np.array(array) for key, array in zip(keys, arrays, strict=True)}
    return adapted


def _session(data: bytes, weights: Params) -> Any:
    flat = storage.flatten(weights)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in flat.values()]
    options.add_external_initializers(list(flat), values)
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def _golden_x(graph: Graph, number: int) -> Array:
    """``number`` samples: the golden ones in reverse order, repeated."""
    return np.resize(graph.golden["x"][::-1], (number, *graph.golden["x"].shape[1:]))


def _weights(graph: Graph, kind: str, seed: int) -> Params:
    return trees.only(graph.layout.seeded(seed), GRAPH_GROUPS[kind])
