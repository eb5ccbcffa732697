"""``fp32``: lossless. First bytes of all words, then all second bytes, and so on, because only exponents compress."""

from __future__ import annotations

import numpy as np

from fleet_core.base.errors import CodecError
from fleet_core.codecs import safetensors_payload
from fleet_core.codecs.interface import Array, Arrays, Codec, Seed, Shapes


class Fp32(Codec):
    name = "fp32"
    about = "exact"
    lossless, unbiased = True, True
    feedback, feedback_down = False, False

    def encode(self, arrays: Arrays, seed: Seed) -> bytes:
        return safetensors_payload.pack(arrays, words=True)

    def decode(self, data: bytes, shapes: Shapes) -> dict[str, Array]:
        arrays = safetensors_payload.unpack(data, shapes, words=True)
        for key, values in arrays.items():
            if "#" in key:
                raise CodecError(f"array {key[:80]} is a scale without its array")
            if values.dtype != np.float32:
                raise CodecError(f"array {key[:80]} is {values.dtype}", expected="float32")
        return arrays

    def max_bytes(self, shapes: Shapes) -> int:
        return safetensors_payload.max_bytes(shapes)

    def bound(self, arrays: Arrays) -> float:
        return 0.0
