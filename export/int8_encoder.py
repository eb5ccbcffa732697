"""Quantizes the encoder to int8, calibrated on samples of the operator, and measures the loss of accuracy.

onnxruntime's static quantization: QDQ, signed weights with a scale per channel, activations calibrated by their minimum
and maximum. The file contains the weights, so it belongs to one served model.

The loss is measured on few-shot tasks with samples that were not used for calibration: class means of a few samples per
class (Snell et al. 2017), embedded by either encoder.

Shapes: n samples, D embedding width.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

from export import gate
from export.graph import IR_VERSION, OPSET, quiet
from fleet_core.base import storage
from fleet_core.base.errors import BundleError, DataError
from fleet_core.base.trees import Params
from fleet_core.data.samples import Samples
from fleet_core.model.graph_bundle import Graph
from fleet_core.personalization.bundle_format import Int8Info
from fleet_core.personalization.nearest import Prototypes

Array = np.ndarray[Any, Any]

MAX_CALIBRATION, MAX_SHOTS, TASKS, BATCH = 128, 5, 20, 32
"""Calibration samples at most; support samples per class of a task at most; tasks; samples per calibration batch."""

MAX_QUERIES = 1024
"""Query samples of a task at most."""


def quantized(graph: Graph, params: Params, data: Samples, say: Callable[[str], None]) -> tuple[bytes, Int8Info]:
    """(ONNX file, its accuracy and error). params: of the group ``body``. Raises DataError for samples of another shape
    or too few, BundleError if the encoder cannot be quantized."""
    x = _raw(graph, data)
    calibration, rest = _split(data.y)
    say(f"quantizing the encoder with {len(calibration)} samples …")
    made = _quantized(graph, params, x[calibration])
    encoders: tuple[tuple[bytes, Params], ...] = ((graph.graphs["embed"], params), (made, {}))
    embedded = [_embedded(*encoder, x[rest]) for encoder in encoders]
    accuracies, shots, queries = _accuracies(embedded, data.y[rest])
    wanted, got = (gate.run(*encoder, graph.golden["x"]) for encoder in encoders)
    difference = float(np.linalg.norm(got - wanted) / max(float(np.linalg.norm(wanted)), 1e-30))
    if not difference <= 1.0:
        raise BundleError(f"the quantized encoder is off by {difference:.2g} of the embeddings' length",
                          hint="leave out --int8, or calibrate with samples like those that devices hold")
    full, small = accuracies
    say(f"int8: {len(made)} bytes, accuracy {small:.3f} in place of {full:.3f} ({TASKS} tasks of {shots} shots)")
    return made, Int8Info(full, small, TASKS, shots, queries, len(calibration), difference)


def _raw(graph: Graph, data: Samples) -> Array:
    spec = graph.layout.input
    if graph.layout.task is not None:
        raise BundleError("an int8 encoder is judged by classes, which this model does not have",
                          hint="leave out --int8")
    if "embed" not in graph.graphs or not graph.layout.parameters(("body",)):
        raise BundleError("the model has no encoder to quantize", hint="leave out --int8")
    if spec.dtype == "int64":
        raise BundleError("an encoder of tokens is not quantized", hint="leave out --int8")
    if tuple(data.x.shape[1:]) != tuple(spec.shape) or len(data.classes or ()) > len(graph.layout.classes):
        raise DataError(f"the samples are {list(data.x.shape[1:])}", expected=f"{list(spec.shape)}")
    return data.x.astype(spec.dtype)


def _split(y: Array) -> tuple[Array, Array]:
    """(rows for calibration, rows for evaluation): every third sample of each class is for calibration."""
    rows = [np.flatnonzero(y == label) for label in np.unique(y)]
    if len(rows) < 2 or min(map(len, rows)) < 3:
        raise DataError(f"{len(rows)} classes, the smallest with {min(map(len, rows), default=0)} samples",
                        expected="at least two classes with three samples each")
    third = np.concatenate([of_class[::3] for of_class in rows])
    calibration = np.sort(third[:: -(-len(third) // MAX_CALIBRATION)])
    return calibration, np.setdiff1d(np.arange(len(y)), third)


def _quantized(graph: Graph, params: Params, x: Array) -> bytes:
    made = static_int8(with_weights(graph.graphs["embed"], params), x)
    opsets = {opset.domain: opset.version for opset in made.opset_import if opset.domain in ("", "ai.onnx")}
    if set(opsets.values()) != {OPSET}:
        raise BundleError(f"the quantizer wrote opset {opsets}", expected=str(OPSET))
    return bytes(made.SerializeToString(deterministic=True))


def static_int8(model: onnx.ModelProto, x: Array) -> onnx.ModelProto:
    """The model, of one input, in int8, calibrated with raw samples x [n, *shape]. Raises BundleError.

    Weights have seven bits: with eight, the sums of two products saturate on x86 processors without VNNI instructions
    (onnxruntime, "Quantize ONNX models": reduce_range).
    """
    try:
        with tempfile.TemporaryDirectory() as folder, quiet():
            source, target = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
            onnx.save(model, source)
            quantize_static(
                source, target, _Reader(model.graph.input[0].name, x), quant_format=QuantFormat.QDQ, per_channel=True,
                reduce_range=True, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
            )  # fmt: skip
            made = onnx.load(target)
    except Exception as error:  # the quantizer raises errors of many classes, none of them documented
        raise BundleError(f"cannot be quantized: {str(error)[:300]}", hint="leave out --int8") from error
    made.ir_version = IR_VERSION
    return made


class _Reader:
    """A CalibrationDataReader for onnxruntime: raw samples in batches."""

    def __init__(self, name: str, x: Array) -> None:
        self._name, self._batches = name, iter([x[i : i + BATCH] for i in range(0, len(x), BATCH)])

    def get_next(self) -> dict[str, Array] | None:
        batch = next(self._batches, None)
        return None if batch is None else {self._name: batch}


def with_weights(data: bytes, params: Params) -> onnx.ModelProto:
    """An ONNX file with its external parameters inside."""
    model, flat = onnx.load_model_from_string(data), storage.flatten(params)
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            array = np.ascontiguousarray(flat[tensor.name], np.float32)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model


def _embedded(data: bytes, params: Params, x: Array) -> Array:
    """float32 [n, D]."""
    return np.concatenate([gate.run(data, params, x[i : i + 256]) for i in range(0, len(x), 256)])


def _accuracies(embedded: list[Array], y: Array) -> tuple[list[float], int, int]:
    """(accuracy of class means by encoder, shots, number of queries), over ``TASKS`` random tasks. embedded: the same
    samples by each encoder."""
    rng, labels = np.random.default_rng(0), np.unique(y)
    shots = max(1, min(MAX_SHOTS, min(int((y == label).sum()) for label in labels) // 2))
    correct, total = np.zeros(len(embedded)), 0
    for _ in range(TASKS):
        support = np.concatenate([rng.permutation(np.flatnonzero(y == label))[:shots] for label in labels])
        queries = rng.permutation(np.setdiff1d(np.arange(len(y)), support))[:MAX_QUERIES]
        total += len(queries)
        for number, z in enumerate(embedded):
            means = Prototypes.from_support(lambda z_nD: z_nD, z[support], y[support], int(labels.max()) + 1)
            correct[number] += (means.probabilities(z[queries]).argmax(1) == y[queries]).sum()
    return [float(n) / total for n in correct], shots, total
