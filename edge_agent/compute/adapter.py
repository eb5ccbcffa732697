"""Gradient steps on a device without torch: a child process runs the graph ``adapt`` once and ends.

Its peak memory is freed when it ends. Like the trainer (``worker``) it reads a job on standard input and writes the
result on standard output. It reads weights, graph and samples from the device's folder, and sends the adapted weights
through the pipe.

It uses at most ``MAX_SUPPORT`` samples, spread evenly over the recording: about as many of each class.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.compute.onnx_session import open_steps
from edge_agent.compute.worker import Child, Done, Job, parse_frame, write_result
from edge_agent.device.local_samples import LocalData
from edge_agent.device.state import DeviceState, Weights
from fleet_core.base import storage, trees
from fleet_core.base.errors import BundleError, DataError, FleetError, StateError
from fleet_core.data import model_input
from fleet_core.data.samples import Samples, stratified
from fleet_core.model import graph_bundle
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import MODEL_GROUPS

Array = np.ndarray[Any, Any]

MAX_SUPPORT = 1000


class AdapterProcess(Child):
    """``python -m edge_agent.compute.adapter``, which ends after each job."""

    def __init__(self) -> None:
        super().__init__("adapter", ["edge_agent.compute.adapter"], {})


def job(graph: Path, weights: str, model: str, data: LocalData, steps: int, rate: float | None) -> Job:
    """weights: a name for ``DeviceState.weights``, which must have the id ``model``. rate None: learned rates."""
    return Job("adapt", {
        "home": str(graph.parent), "graph": graph.name, "weights": weights, "model": model, "samples": str(data.path),
        "split": data.split(), "steps": steps, "rate": rate,
    })


def run(order: Job, stopped: Callable[[], bool] = lambda: False) -> Done:
    """Runs a job in a child process and waits for its result. stopped: checked every half second."""
    adapter = AdapterProcess()
    try:
        adapter.submit(order)
        while (done := adapter.poll()) is None:
            if stopped():
                return Done(order.kind, {}, error="stopped")
            select.select(adapter.descriptors(), [], [], 0.5)
        return done
    finally:
        adapter.stop()


def handle(order: Job) -> Done:
    """Runs a job in this process; an exception becomes ``Done.error``."""
    try:
        started_cpu = time.process_time()
        facts, arrays = _adapted(order.header)
        return Done(order.kind, {**facts, "cpu_s": time.process_time() - started_cpu}, arrays)
    except FleetError as error:
        return Done(order.kind, {"disk": storage.is_disk_error(error)}, error=str(error))
    except Exception as error:  # onnxruntime raises errors of many classes
        return Done(order.kind, {}, error=f"{type(error).__name__}: {str(error)[:500]}")


def _adapted(header: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Array]]:
    """(numbers of samples used and available, adapted weights as ``group/name``)."""
    home = DeviceState(Path(header["home"]))
    graph = graph_bundle.unpack(storage.read_bytes(home.folder / header["graph"], limit=graph_bundle.MAX_BYTES))
    weights = home.weights(header["weights"])
    if weights is None or weights.model != header["model"]:
        raise StateError(f"the weights {header['model']} are not here", where=str(home.folder))
    layout = graph.layout
    data = LocalData.of(home.folder, header["samples"], layout, header["split"])
    every = data.own()
    support = every.take(stratified(every.y, MAX_SUPPORT))
    arrays = after_steps(graph, weights, support, header["steps"], header["rate"])
    return {"samples": len(support), "of": len(every)}, arrays


def after_steps(graph: Graph, weights: Weights, support: Samples, steps: int, rate: float | None) -> dict[str, Array]:
    """The model's arrays ``group/name`` after gradient steps on the raw support samples. rate None: learned rates.
    Raises BundleError, DataError, and CodecError for weights of another layout."""
    info = graph.info.adapt
    if info is None:
        raise BundleError("the bundle has no graph 'adapt'",
                          hint="its model or method takes no gradient steps on a device")
    params = graph.adapt_inputs(weights.params)
    take_steps = open_steps(graph.adapt, params)
    lr = {} if info.rates else {"lr": np.array(rate, np.float32)}
    _check_samples(graph, support)
    y = graph.layout.truths(support.y)
    adapted = take_steps({"support_x": support.x, "support_y": y, "steps": np.array(steps, np.int64), **lr})
    if not all(np.isfinite(array).all() for array in adapted.values()):
        raise DataError(f"{steps} gradient steps diverged on these samples", hint="fewer steps, or a smaller rate")
    return {**storage.flatten(trees.only(params, MODEL_GROUPS)), **adapted}


def _check_samples(graph: Graph, support: Samples) -> None:
    spec = graph.layout.input
    if support.x.shape[1:] != tuple(spec.shape) or str(support.x.dtype) != spec.dtype:
        raise DataError(f"the samples are {support.x.dtype} {list(support.x.shape[1:])}",
                        expected=f"{spec.dtype} {list(spec.shape)}", hint=model_input.hint(support.x, spec))


def main() -> int:
    """Runs one job."""
    source, sink, buffer = sys.stdin.buffer, os.fdopen(os.dup(1), "wb"), bytearray()
    os.dup2(2, 1)  # prints of a library must not mix with the frames
    while data := os.read(source.fileno(), 1 << 20):
        buffer += data
        frame = parse_frame(buffer)
        if frame is not None:
            write_result(sink, handle(Job(frame[0]["kind"], frame[0])))
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
