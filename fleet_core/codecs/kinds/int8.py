"""``int8`` and ``int8-plain``: one signed byte per value and one float32 scale per array, rounded to nearest.

Error feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.
"""

from __future__ import annotations

import math

import numpy as np

from fleet_core.base.errors import CodecError
from fleet_core.codecs import safetensors_payload
from fleet_core.codecs.interface import Array, Arrays, Codec, Seed, Shapes
from fleet_core.codecs.quantize import largest, rounding_bound

SCALE = "#scale"


class Int8(Codec):
    name = "int8"
    about = "a byte per value, one scale per array"

    def encode(self, arrays: Arrays, seed: Seed) -> bytes:
        tensors: dict[str, Array] = {}
        for key, values in arrays.items():
            scale = np.float32(np.abs(values).max(initial=0.0) / 127)
            quantized = np.rint(values / scale) if scale > 0 else np.zeros_like(values)
            tensors[key] = np.clip(quantized, -127, 127).astype(np.int8)
            tensors[key + SCALE] = scale.reshape(1)
        return safetensors_payload.pack(tensors)

    def decode(self, data: bytes, shapes: Shapes) -> dict[str, Array]:
        tensors = safetensors_payload.unpack(data, shapes)
        values = {k: v for k, v in tensors.items() if not k.endswith(SCALE)}
        for key in sorted(tensors.keys() - values.keys()):
            if key.removesuffix(SCALE) not in values:
                raise CodecError(f"array {key[:80]} is a scale without its array")
        return {k: _restored(k, v, tensors.get(k + SCALE)) for k, v in values.items()}

    def max_bytes(self, shapes: Shapes) -> int:
        return safetensors_payload.max_bytes(shapes)

    def bound(self, arrays: Arrays) -> float:
        return math.sqrt(sum(rounding_bound(a, largest(a) / 127) ** 2 for a in arrays.values()))


class Int8Plain(Int8):
    name = "int8-plain"
    about = "int8 without error feedback: what is lost is not sent later"
    feedback, feedback_down = False, False


def _restored(key: str, values: Array, scale: Array | None) -> Array:
    if values.dtype != np.int8 or scale is None or scale.dtype != np.float32 or scale.shape != (1,):
        raise CodecError(f"array {key[:80]} is {values.dtype} without a float32 scale", expected="int8 and its scale")
    with np.errstate(over="ignore", invalid="ignore"):  # the layout's check finds a scale that is too large
        restored = values.astype(np.float32)
        restored *= scale[0]
        return restored
