"""``ternary``: −s, 0 or s for each value, five values in a byte, with a float32 scale s per array.

Li, Zhang, Liu, "Ternary Weight Networks", 2016: values below 0.7 times the mean magnitude become 0, and s is the mean
magnitude of the others, which minimises the squared error for that choice.
"""

from __future__ import annotations

import numpy as np

from fleet_core.base.errors import CodecError
from fleet_core.codecs.frame import FramedCodec, Reader
from fleet_core.codecs.interface import Array, Arrays, Seed, Shapes
from fleet_core.codecs.vector import divided, in_order, length, size

THRESHOLD = 0.7
DIGITS = 5
BYTES = 3**DIGITS
SIGNS = (np.arange(BYTES)[:, None] // 3 ** np.arange(DIGITS) % 3 - 1).astype(np.int8)
"""int8 [243, 5]: the signs that a byte stands for."""


class Ternary(FramedCodec):
    name = "ternary"
    about = "sign or zero of each value, one scale per array"
    feedback_down = False

    def body(self, arrays: Arrays, seed: Seed) -> bytes:
        scales, signs = [], [np.zeros(0, np.int8)]
        for array in map(np.ravel, in_order(arrays)):
            magnitude = np.abs(array)
            kept = (magnitude > 0) & (magnitude >= THRESHOLD * _mean(magnitude))
            scales.append(_mean(magnitude.compress(kept)))
            signs.append(((array > 0) & kept).view(np.int8) - ((array < 0) & kept).view(np.int8))
        return np.asarray(scales, "<f4").tobytes() + _packed(np.concatenate(signs))

    def arrays(self, body: Reader, shapes: Shapes) -> dict[str, Array]:
        scales = dict(zip(sorted(shapes), body.scales(len(shapes)), strict=True))
        signs = divided(_unpacked(body, size(shapes)).astype(np.float32), shapes)
        return {name: sign * scales[name] for name, sign in signs.items()}

    def body_bytes(self, shapes: Shapes) -> int:
        return 4 * len(shapes) + _packed_bytes(size(shapes))

    def bound(self, arrays: Arrays) -> float:
        """The norm of the arrays: decoding gives a projection, so at most that much is lost."""
        return length(arrays)


def _mean(magnitude: Array) -> np.float64:
    """The mean in float64; 0 without values."""
    return magnitude.astype(np.float64).mean() if magnitude.size else np.float64(0)


def _packed(signs: Array) -> bytes:
    digits = np.zeros((_packed_bytes(len(signs)), DIGITS), np.uint8)
    digits.reshape(-1)[: len(signs)] = signs + 1
    packed = digits[:, -1].copy()
    for place in reversed(range(DIGITS - 1)):
        packed *= 3
        packed += digits[:, place]
    return packed.tobytes()


def _unpacked(body: Reader, count: int) -> Array:
    packed = body.take("u1", _packed_bytes(count))
    if packed.size and packed.max() >= BYTES:
        raise CodecError("has a byte that is not five ternary digits")
    signs = SIGNS.take(packed, axis=0).reshape(-1)
    if (signs[count:] != -1).any():
        raise CodecError("has a byte that is not five ternary digits")
    return signs[:count]


def _packed_bytes(count: int) -> int:
    return -(-count // DIGITS)
