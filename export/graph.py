"""Exports a layout's model as a graph bundle: ONNX files (opset 18, IR 10) whose parameters are external initializers.

The parameter ``weight`` of group ``body`` is the initializer ``body/weight``, the key that it has in safetensors.
torch's exporter runs without its optimizer and on weights that all differ. Otherwise it would merge parameters of equal
values (GroupNorm's ones and zeros), and new weights would then reach only a part of the graph.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from onnxscript.values import TracedOnnxFunction
from torch import Tensor, fx, nn

from export import gate
from fleet_core.base.errors import BundleError
from fleet_core.learning.models import Network, build, outputs, to_torch
from fleet_core.model.graph_bundle import FORMAT, GRAPH_GROUPS, Graph, GraphInfo
from fleet_core.model.layout import InputSpec, Layout

OPSET = 18
IR_VERSION = 10
MIN_ONNXRUNTIME = "1.23.2"
GOLDEN_SAMPLES = 4
TRACED_SAMPLES = 5
_UNNOTED = "do_not_emit_stack_traces"

# At each export the exporter asks for this property of some 500 operators, and onnxscript reads and parses the source
# of each: as much work as the export of a small model. Here the first result is kept.
_PARSED = "function_ir"
_parse = vars(TracedOnnxFunction).get(_PARSED)
if isinstance(_parse, property) and _parse.fget is not None:
    _once = functools.cached_property(_parse.fget)
    _once.__set_name__(TracedOnnxFunction, _PARSED)
    setattr(TracedOnnxFunction, _PARSED, _once)


class Output(nn.Module):
    """One output of a network, as a module."""

    def __init__(self, network: Network, kind: str) -> None:
        super().__init__()
        self.network, self.kind = network, kind

    def forward(self, x: Tensor) -> Any:
        out = self.network(x, self.kind)
        return out.clone() if out is x else out  # a graph's output must not be its input


def export_graph(layout: Layout, *, kinds: tuple[str, ...] = ("embed",), seed: int = 0) -> Graph:
    """The checked bundle of ``layout``'s model. seed: of the golden weights and samples. Raises BundleError."""
    network = build(layout).eval()
    info = GraphInfo(FORMAT, seed, 1e-4, 1e-3, IR_VERSION, OPSET, MIN_ONNXRUNTIME)
    graphs = {kind: _onnx_file(network, layout, kind, seed) for kind in kinds}
    graph = Graph(layout, graphs, _golden(network, layout, kinds, seed), info)
    gate.check(graph, network)
    return graph


def samples(spec: InputSpec, number: int, seed: int) -> np.ndarray[Any, Any]:
    """Random raw samples [number, *shape] in the range that the preprocessing expects."""
    rng = np.random.default_rng(seed)
    if spec.dtype == "uint8":
        return rng.integers(0, 256, (number, *spec.shape), dtype=np.uint8)
    if spec.dtype == "int64":
        return rng.integers(0, 2, (number, *spec.shape), dtype=np.int64)
    ones = (1,) * (len(spec.shape) - 1)
    std, mean = (np.reshape(v or (d,), (-1, *ones)) for v, d in ((spec.std, 1.0), (spec.mean, 0.0)))
    x = (rng.standard_normal((number, *spec.shape)) * std + mean) / (spec.scale or 1.0)
    return np.asarray(x, dtype=np.float32)


def _golden(network: Network, layout: Layout, kinds: tuple[str, ...], seed: int) -> dict[str, np.ndarray[Any, Any]]:
    x, weights = samples(layout.input, GOLDEN_SAMPLES, seed), to_torch(layout.seeded(seed))
    with torch.no_grad():
        return {"x": x, **{kind: outputs(network, weights, torch.tensor(x), kind).numpy() for kind in kinds}}


def _onnx_file(network: Network, layout: Layout, kind: str, seed: int) -> bytes:
    _set_weights(network, layout, seed + 1)
    x = torch.tensor(samples(layout.input, TRACED_SAMPLES, seed + 1))
    dynamic = ({0: torch.export.Dim("batch", min=1)},)
    try:
        with quiet():
            program = torch.onnx.export(
                Output(network, kind).eval(), (x,), dynamo=True, opset_version=OPSET, optimize=False, verbose=False,
                input_names=["x"], output_names=[kind], dynamic_shapes=dynamic,
            )  # fmt: skip
    except Exception as error:  # torch.export raises whatever the model's code makes it raise
        raise BundleError(
            f"the model '{layout.model}' cannot be exported ({kind}): {root_cause(error)}",
            hint="embed(x) must not branch on the values of x",
        ) from error
    if program is None:
        raise BundleError(f"the model '{layout.model}' cannot be exported ({kind})")
    _make_external(program.model, layout, kind)
    return bytes(ir.to_proto(program.model).SerializeToString(deterministic=True))


def _set_weights(network: Network, layout: Layout, seed: int) -> None:
    """Random weights that all differ."""
    parameters = dict(network.core.named_parameters())
    with torch.no_grad():
        for named in to_torch(layout.seeded(seed)).values():
            for name, array in named.items():
                parameters[name].copy_(array)


def _make_external(model: ir.Model, layout: Layout, kind: str) -> None:
    """Makes parameters external initializers ``group/name``, and names other initializers ``constant/name``."""
    ClearMetadataAndDocStringPass()(model)
    model.ir_version = min(model.ir_version, IR_VERSION)
    wanted = {f"network.core.{t.name}": f"{t.group}/{t.name}" for t in layout.tensors if t.group in GRAPH_GROUPS[kind]}
    for old, value in list(model.graph.initializers.items()):
        value.name = wanted.get(old, f"constant/{old}")
        tensor = value.const_value
        if old in wanted and tensor is not None:
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(
                "weights", 0, tensor.nbytes, tensor.dtype, shape=shape, name=value.name
            )


def root_cause(error: BaseException) -> str:
    """The first line of the exception at the end of the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses the exporter's log lines, warnings and prints, and the lines of code that torch notes for each
    operation, which cost it time and are in no graph. A torch that has no such setting ignores it."""
    level = logging.root.manager.disable
    unnoted = getattr(fx.config, _UNNOTED, False)
    logging.disable(logging.WARNING)
    setattr(fx.config, _UNNOTED, True)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        setattr(fx.config, _UNNOTED, unnoted)
