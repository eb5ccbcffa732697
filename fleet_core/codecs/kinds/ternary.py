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
PLACES = 3 ** np.arange(5, dtype=np.uint8)


class Ternary(FramedCodec):
    name = "ternary"
    about = "sign or zero of each value, one scale per array"
    feedback_down = False

    def body(self, arrays: Arrays, seed: Seed) -> bytes:
        scales, signs = [], [np.zeros(0, np.int8)]
        for array in in_order(arrays):
            magnitude = np.abs(array.astype(np.float64)).ravel()
            kept = (magnitude > 0) & (magnitude >= THRESHOLD * magnitude.mean()) if magnitude.size else magnitude > 0
            scales.append(magnitude[kept].mean() if kept.any() else 0.0)
            signs.append((np.sign(array).ravel() * kept).astype(np.int8))
        return np.asarray(scales, "<f4").tobytes() + _packed(np.concatenate(signs))

    def arrays(self, body: Reader, shapes: Shapes) -> dict[str, Array]:
        scales = dict(zip(sorted(shapes), body.scales(len(shapes)), strict=True))
        signs = divided(_unpacked(body, size(shapes)).astype(np.float32), shapes)
        return {name: sign * scales[name] for name, sign in signs.items()}

    def body_bytes(self, shapes: Shapes) -> int:
        return 4 * len(shapes) + _packed_bytes(size(shapes))

    def bound(self, arrays: Arrays) -> float:
        """What is decoded is a projection, so no more is lost than there is."""
        return length(arrays)


def _packed(signs: Array) -> bytes:
    digits = np.zeros(5 * _packed_bytes(len(signs)), np.uint8)
    digits[: len(signs)] = signs + 1
    packed: Array = (digits.reshape(-1, 5) * PLACES).sum(1, dtype=np.uint8)
    return packed.tobytes()


def _unpacked(body: Reader, count: int) -> Array:
    packed = body.take("u1", _packed_bytes(count))
    digits = (packed[:, None] // PLACES % 3).reshape(-1)
    if (packed >= 243).any() or digits[count:].any():
        raise CodecError("has a byte that is not five ternary digits")
    return digits[:count].astype(np.int8) - np.int8(1)


def _packed_bytes(count: int) -> int:
    return (count + 4) // 5
