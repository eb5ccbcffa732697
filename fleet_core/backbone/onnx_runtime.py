"""Imports onnxruntime, and opens ONNX files that have their weights inside."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from fleet_core.base.errors import BundleError

Array = np.ndarray[Any, Any]
Run = Callable[[Array], Array]

CPU = "CPUExecutionProvider"


def runtime() -> Any:
    """onnxruntime, imported at its first use: an agent that only trains saves its memory.

    From 1.29 on onnxruntime sends telemetry, unless ORT_DISABLE_TELEMETRY is set before the import.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnxruntime

    return onnxruntime


def open_on(data: bytes, provider: str, *, threads: int = 1) -> Run:
    """A function from the input ``x`` of an ONNX file to its first output, computed by ``provider``. Raises BundleError
    if this onnxruntime does not open the file on it."""
    onnxruntime = runtime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    options.enable_cpu_mem_arena, options.enable_mem_pattern = False, False  # a batch's memory is freed
    try:
        session = onnxruntime.InferenceSession(data, options, providers=list(dict.fromkeys([provider, CPU])))
    except Exception as error:  # onnxruntime raises errors of many classes, none of them documented
        raise BundleError(f"the file cannot be opened: {str(error)[:300]}", hint="update onnxruntime") from error
    if session.get_providers()[0] != provider:
        raise BundleError(f"onnxruntime does not load {provider} here")
    outputs = [session.get_outputs()[0].name]

    def run(x: Array) -> Array:
        found: Array = session.run(outputs, {"x": np.ascontiguousarray(x)})[0]
        return found

    return run
