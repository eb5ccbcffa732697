"""Opens an ONNX Runtime session from a graph and weights in memory, without torch.

Every parameter of a graph is an external initializer that ``add_external_initializers`` fills, so nothing is read from
disk (onnxruntime 1.23.2 and 1.31.1) and the runtime optimizes the graph with the weights in it. An OrtValue aliases the
numpy array that it was made from. A session therefore keeps its weights alive, and copies arrays that others could
write to.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

from fleet_core.backbone.onnx_runtime import runtime
from fleet_core.base import storage, trees
from fleet_core.base.errors import BundleError, DataError
from fleet_core.base.trees import Params
from fleet_core.data import model_input
from fleet_core.model.graph_bundle import GRAPH_GROUPS, Graph
from fleet_core.model.layout import InputSpec

Array = np.ndarray[Any, Any]

BATCH = 4
"""Samples per call. More need more memory, and for a large model more time (benchmarks/on_device/batches.json)."""

Steps = Callable[[dict[str, Array]], dict[str, Array]]

_DTYPES = {"tensor(float)": "float32", "tensor(uint8)": "uint8", "tensor(int64)": "int64"}


class Session:
    """One graph with one set of weights. Made by ``open_session``."""

    def __init__(self, inner: Any, weights: dict[str, Array]) -> None:
        self._inner, self._weights = inner, weights
        x, output = inner.get_inputs()[0], inner.get_outputs()[0]
        self._shape, self._dtype = tuple(x.shape[1:]), np.dtype(_DTYPES.get(x.type, "void"))
        self._outputs = [output.name]

    def run(self, x: Array) -> Array:
        """Raw samples [n, *shape] in the layout's dtype -> float32 [n, width]. Raises DataError for other input."""
        if x.shape[1:] != self._shape or x.dtype != self._dtype or not len(x):
            wanted = f"{self._dtype} {list(self._shape)}"
            hint = model_input.hint(x, InputSpec(self._shape, self._dtype.name))
            raise DataError(f"the input is {x.dtype} {list(x.shape)}", expected=f"one or more samples {wanted}",
                            hint=hint)
        if self._dtype.kind == "f" and not np.isfinite(x).all():
            raise DataError("the input holds a value that is not finite")
        if len(x) <= BATCH:
            return self._run_batch(x)
        return np.concatenate([self._run_batch(x[i : i + BATCH]) for i in range(0, len(x), BATCH)])

    def _run_batch(self, x: Array) -> Array:
        try:
            output: Array = self._inner.run(self._outputs, {"x": np.ascontiguousarray(x)})[0]
        except Exception as error:  # of many undocumented classes, as for a token that the model does not know
            raise DataError(f"the model does not take these samples: {str(error)[-200:]}") from error
        return output


def open_session(graph_bytes: bytes, params: Params, *, threads: int = 1) -> Session:
    """A session of an ONNX file with the numpy weights ``params``, exactly the groups that the graph takes.

    Raises BundleError if this onnxruntime does not run the file, or if it takes other parameters.
    """
    weights = {name: _immutable(array) for name, array in storage.flatten(params).items()}
    return Session(_inference_session(graph_bytes, weights, threads), weights)


def _immutable(array: Array) -> Array:
    """float32, copied unless it is a read-only view of a memory-mapped file."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = None if base.flags.writeable else base.base
    mapped = isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap)
    if mapped and array.dtype == np.float32 and array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.array(array, dtype=np.float32, order="C")


def open_steps(graph_bytes: bytes, params: Params, *, threads: int = 1) -> Steps:
    """A bundle's graph ``adapt`` with ``params``: a function from its inputs to the adapted arrays ``group/name``.

    Raises BundleError as ``open_session`` does.
    """
    weights = {name: _immutable(array) for name, array in storage.flatten(params).items()}
    inner = _inference_session(graph_bytes, weights, threads, arena=True)
    names = [output.name.removeprefix("adapted/") for output in inner.get_outputs()]

    def run(inputs: dict[str, Array]) -> dict[str, Array]:
        assert weights  # the closure keeps them alive for the session
        return {name: np.array(array) for name, array in zip(names, inner.run(None, inputs), strict=True)}

    return run


def open_function(graph_bytes: bytes, *, threads: int = 1, flushed: bool = False) -> Steps:
    """A function from the inputs to the outputs of a graph without weights. flushed: its threads treat subnormal
    numbers as zero. Raises BundleError."""
    inner = _inference_session(graph_bytes, {}, threads, flushed=flushed)
    names = [output.name for output in inner.get_outputs()]
    return lambda inputs: dict(zip(names, inner.run(None, inputs), strict=True))


def _inference_session(
    graph_bytes: bytes, weights: dict[str, Array], threads: int, *, arena: bool = False, flushed: bool = False
) -> Any:
    """The runtime's session. It aliases ``weights``, which the caller must keep alive. arena: freed memory stays with
    the session, for gradient steps, which need the same arrays again and again until their process ends."""
    onnxruntime = runtime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    options.enable_cpu_mem_arena, options.enable_mem_pattern = arena, False  # off: a batch's memory is freed
    if arena:  # the full level would block channels for pools only, and reordering costs more than that gains
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    if flushed:
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    options.add_external_initializers(list(weights), values)
    try:
        return onnxruntime.InferenceSession(graph_bytes, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises errors of many classes, none of them documented
        raise BundleError(
            f"the graph cannot be opened with these weights: {str(error)[:300]}",
            hint="fetch the graph and the weights again; both must belong to one layout",
        ) from error


def open_kind(graph: Graph, kind: str, params: Params, *, threads: int = 1) -> Session:
    """The session of a bundle's graph ``kind``; ``params`` may hold more groups than it takes. Raises BundleError, and
    CodecError for weights of another layout."""
    if kind not in graph.graphs:
        raise BundleError(f"the bundle has no graph '{kind}'", expected=", ".join(sorted(graph.graphs)))
    needed = trees.only(params, GRAPH_GROUPS[kind])
    graph.layout.check(needed, GRAPH_GROUPS[kind])
    return open_session(graph.graphs[kind], needed, threads=threads)


def check_golden(graph: Graph) -> None:
    """Runs every graph of a bundle on its golden input. Raises BundleError unless it gives the golden outputs."""
    onnxruntime = runtime()
    seeded = graph.layout.seeded(graph.info.seed)
    for kind in graph.graphs:
        try:
            got = open_kind(graph, kind, seeded).run(graph.golden["x"])
        except DataError as error:
            raise BundleError(f"the graph '{kind}' does not take the layout's samples: {error}") from error
        wanted = graph.golden[kind]
        if got.shape != wanted.shape or not np.allclose(got, wanted, atol=graph.info.atol, rtol=graph.info.rtol):
            raise BundleError(
                f"the graph '{kind}' does not give its golden outputs under onnxruntime {onnxruntime.__version__}",
                expected=f"onnxruntime {graph.info.min_onnxruntime} or newer, and the graph as it was published",
                hint="fetch the graph again, then update onnxruntime",
            )


def runtime_version() -> str:
    return str(runtime().__version__)
