"""An int8 backbone, by onnxruntime's static quantization, calibrated with samples of the operator.

Weights are signed with a scale per channel, activations are calibrated by their minimum and maximum (QDQ). The loss is
measured against the float backbone, on samples that were not used for calibration.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization.shape_inference import quant_pre_process

from export.backbones.from_onnx import GOLDEN, INT8_TOLERANCE
from export.graph import IR_VERSION, quiet, samples
from export.int8_encoder import static_int8
from fleet_core.backbone.backbone_file import BackboneFile, difference
from fleet_core.backbone.onnx_runtime import CPU, open_on
from fleet_core.base.errors import BundleError, ConfigError, DataError

Array = np.ndarray[Any, Any]

MAX_CALIBRATION, MAX_MEASURED, BATCH = 128, 256, 16
MAX_DIFFERENCE = 0.25
"""Share of the features' norm: a backbone that loses more is refused."""


def quantized(made: BackboneFile, x: Array) -> BackboneFile:
    """The int8 backbone. x: raw samples like those of devices; every other one calibrates. Raises DataError for too few
    samples, ConfigError for a backbone that cannot be quantized or loses too much."""
    if made.info.input.dtype == "int64":
        raise ConfigError("a backbone of tokens is not quantized", where=made.info.name, hint="leave int8 out")
    if len(x) < 4 or x.shape[1:] != made.info.input.shape or str(x.dtype) != made.info.input.dtype:
        raise DataError(f"{x.dtype} {list(x.shape)} do not calibrate it", where=made.info.name,
                        expected=f"four or more samples {made.info.input.dtype} {list(made.info.input.shape)}")
    rows = np.random.default_rng(0).permutation(len(x))
    calibration, rest = x[rows[::2][:MAX_CALIBRATION]], x[rows[1::2][:MAX_MEASURED]]
    small = _small(made, calibration)
    lost = difference(_features(small, rest), _features(made.onnx, rest))
    if not lost <= MAX_DIFFERENCE:
        raise ConfigError(f"its int8 features are off by {lost:.2g} of their length", where=made.info.name,
                          expected=f"at most {MAX_DIFFERENCE}", hint="leave int8 out")
    x_golden = samples(made.info.input, GOLDEN, 0)
    info = replace(made.info, tolerance=INT8_TOLERANCE, int8=lost, ir_version=IR_VERSION, opset=_opset(small))
    return BackboneFile(info, small, {"x": x_golden, "z": _features(small, x_golden)})


def _small(made: BackboneFile, x: Array) -> bytes:
    try:
        with tempfile.TemporaryDirectory() as folder, quiet():
            source, ready = Path(folder) / "float.onnx", Path(folder) / "ready.onnx"
            source.write_bytes(made.onnx)
            quant_pre_process(source, ready, skip_symbolic_shape=True)
            model = onnx.load(ready)
    except Exception as error:  # as in ``static_int8``
        raise ConfigError(f"cannot be quantized: {str(error)[:300]}", where=made.info.name,
                          hint="leave int8 out") from error
    try:
        return bytes(static_int8(model, x).SerializeToString(deterministic=True))
    except BundleError as error:
        raise ConfigError(error.what, where=made.info.name, hint="leave int8 out") from error


def _opset(data: bytes) -> int:
    return max(int(o.version) for o in onnx.load_model_from_string(data).opset_import if o.domain in ("", "ai.onnx"))


def _features(data: bytes, x: Array) -> Array:
    try:
        run = open_on(data, CPU)
        return np.concatenate([run(x[k : k + BATCH]) for k in range(0, len(x), BATCH)])
    except BundleError as error:
        raise ConfigError(error.what) from error
