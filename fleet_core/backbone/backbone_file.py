"""The file of a frozen backbone: an ONNX file with its weights, golden samples and their features.

Safetensors: ``onnx`` uint8 [bytes], whose input is ``x``, raw samples [n, *shape], and whose first output is float32
[n, D]; ``golden/x`` [n, *shape] and ``golden/z`` float32 [n, D]. Metadata ``backbone``: ``BackboneInfo`` as JSON.
The preprocessing (x · scale − mean) / std is part of the ONNX file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fleet_core.base import schema, storage
from fleet_core.base.errors import BundleError, StateError
from fleet_core.model.layout import Backbone, InputSpec

Array = np.ndarray[Any, Any]

NAME = "backbone.safetensors"
"""The file's name in a fleet's folder and in a bundle."""

FORMAT = 1
MAX_BYTES = 512 << 20
MAX_GOLDEN = 16
MAX_SAMPLE = 64 << 20
"""Values of a raw sample."""


@dataclass(frozen=True)
class BackboneInfo:
    """name: what the backbone was made from. output: the node whose values are the features. input: a raw sample.
    width: D. tolerance: largest accepted error of golden features, as the norm of the difference over that of the
    features. int8: the error of quantization, in the same measure, on samples that were not used for calibration; None
    for a float backbone. ir_version, opset: of the ONNX file. min_onnxruntime: the oldest release that reads it.
    """

    format: int = field(metadata={"min": FORMAT, "max": FORMAT})
    name: str = field(metadata={"max_length": 200})
    output: str = field(metadata={"max_length": 1000})
    input: InputSpec
    width: int = field(metadata={"min": 1, "max": 1_000_000})
    tolerance: float = field(metadata={"above": 0, "max": 1})
    ir_version: int = field(metadata={"min": 1, "max": 1000})
    opset: int = field(metadata={"min": 13, "max": 1000})
    min_onnxruntime: str = field(metadata={"pattern": r"\d+\.\d+\.\d+"})
    int8: float | None = field(default=None, metadata={"min": 0, "max": 1})


@dataclass(frozen=True, eq=False)
class BackboneFile:
    """golden: ``x`` raw samples, ``z`` float32 [n, D]."""

    info: BackboneInfo
    onnx: bytes
    golden: Mapping[str, Array]


def pack(made: BackboneFile) -> bytes:
    """Equal backbones give equal bytes."""
    arrays = {"onnx": np.frombuffer(made.onnx, np.uint8), **{f"golden/{k}": made.golden[k] for k in ("x", "z")}}
    return storage.pack(arrays, {"backbone": json.dumps(schema.plain(made.info), sort_keys=True)})


def identity(data: bytes) -> str:
    """The id of a backbone: the first 32 hex digits of its file's sha256."""
    import hashlib  # loads OpenSSL, 4 MB that a process which only answers does not need

    return hashlib.sha256(data).hexdigest()[:32]


def read(path: Path) -> BackboneFile:
    """Raises StateError for a file that cannot be read, BundleError for one that holds no backbone. Its ONNX file is
    not parsed."""
    return parsed(storage.read_bytes(path, limit=MAX_BYTES), str(path))


def parsed(data: bytes, where: str = "backbone") -> BackboneFile:
    """The backbone in the bytes of its file. Raises BundleError."""
    if len(data) > MAX_BYTES:
        raise BundleError(f"{len(data)} bytes are over the limit of {MAX_BYTES}", where=where)
    try:
        arrays, metadata = storage.unpack(data, where=where)
        info, problems = schema.read(BackboneInfo, json.loads(metadata["backbone"]), unknown="ignore")
    except StateError as error:
        raise BundleError(error.what, where=where, hint="metafleet backbone makes one") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BundleError("is not a backbone", where=where, hint="metafleet backbone makes one") from error
    if info is None:
        raise BundleError("is not a valid backbone: " + "; ".join(map(str, problems[:5])), where=where)
    _check(arrays, info, where)
    golden = {"x": arrays["golden/x"], "z": arrays["golden/z"]}
    return BackboneFile(info, arrays["onnx"].tobytes(), golden)


def _check(arrays: Mapping[str, Array], info: BackboneInfo, where: str) -> None:
    if set(arrays) != {"onnx", "golden/x", "golden/z"}:
        raise BundleError(f"holds {', '.join(sorted(arrays))[:200]}", where=where, expected="onnx, golden/x, golden/z")
    if int(np.prod(info.input.shape, dtype=np.float64)) > MAX_SAMPLE:
        raise BundleError(f"takes samples {list(info.input.shape)}", where=where,
                          expected=f"{MAX_SAMPLE} values at most")
    x, z, n = arrays["golden/x"], arrays["golden/z"], len(arrays["golden/x"]) if arrays["golden/x"].ndim else 0
    wanted = {"onnx": ((arrays["onnx"].size,), "uint8"), "golden/x": ((n, *info.input.shape), info.input.dtype),
              "golden/z": ((n, info.width), "float32")}
    for name, (shape, dtype) in wanted.items():
        if (arrays[name].shape, str(arrays[name].dtype)) != (shape, dtype):
            raise BundleError(f"{name} is {arrays[name].dtype} {list(arrays[name].shape)}", where=where,
                              expected=f"{dtype} {list(shape)}")
    if not (0 < n <= MAX_GOLDEN and np.isfinite(x).all() and np.isfinite(z).all() and arrays["onnx"].size):
        raise BundleError("has no sound golden samples", where=where, expected=f"1 to {MAX_GOLDEN}, all finite")


def described(data: bytes, where: str = "backbone") -> Backbone:
    """How layouts and fleet.toml name the backbone in ``data``. Raises BundleError."""
    info = parsed(data, where).info
    return Backbone(identity(data), info.name, info.input, info.width)


def difference(got: Array, wanted: Array) -> float:
    """The norm of the difference of features over that of ``wanted``; infinite for other shapes or values that are not
    finite."""
    if got.shape != wanted.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got - wanted) / max(float(np.linalg.norm(wanted)), 1e-30))
