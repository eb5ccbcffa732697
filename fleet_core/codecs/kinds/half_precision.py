"""``fp16`` and ``bf16``: two bytes per value, rounded to nearest. All low bytes come before all high bytes, because
only those compress."""

from __future__ import annotations

import math

import numpy as np

from fleet_core.codecs.frame import FramedCodec, Reader
from fleet_core.codecs.interface import Array, Arrays, Seed, Shapes
from fleet_core.codecs.quantize import from_bfloat16, largest, to_bfloat16
from fleet_core.codecs.vector import divided, in_order, joined, length, size

LARGEST_EXPONENT = 15  # float16 holds values below 2¹⁶


class Fp16(FramedCodec):
    """float16 times a power of two per array, so that small updates keep all 11 bits."""

    name = "fp16"
    about = "11 significant bits per value"

    def body(self, arrays: Arrays, seed: Seed) -> bytes:
        ordered = in_order(arrays)
        scales = np.asarray([_power_of_two(array) for array in ordered], "<f4")
        with np.errstate(under="ignore"):
            halves = [(a.astype(np.float64) / s).astype("<f2").ravel() for a, s in zip(ordered, scales, strict=True)]
        return scales.tobytes() + _by_place(np.concatenate([np.zeros(0, "<f2"), *halves]).view("<u2"))

    def arrays(self, body: Reader, shapes: Shapes) -> dict[str, Array]:
        scales = dict(zip(sorted(shapes), body.scales(len(shapes)), strict=True))
        halves = _from_places(body, size(shapes)).view("<f2").astype(np.float32)
        return {name: array * scales[name] for name, array in divided(halves, shapes).items()}

    def body_bytes(self, shapes: Shapes) -> int:
        return 4 * len(shapes) + 2 * size(shapes)

    def bound(self, arrays: Arrays) -> float:
        """Half a unit in the last place of normal values, half the smallest step of subnormal ones."""
        subnormal = sum(array.size * (_power_of_two(array) * 2.0**-25) ** 2 for array in arrays.values())
        return 2.0**-11 * length(arrays) + math.sqrt(subnormal)


class Bf16(FramedCodec):
    name = "bf16"
    about = "8 significant bits per value"

    def body(self, arrays: Arrays, seed: Seed) -> bytes:
        return _by_place(to_bfloat16(joined(arrays)))

    def arrays(self, body: Reader, shapes: Shapes) -> dict[str, Array]:
        return divided(from_bfloat16(_from_places(body, size(shapes))), shapes)

    def body_bytes(self, shapes: Shapes) -> int:
        return 2 * size(shapes)

    def bound(self, arrays: Arrays) -> float:
        """A unit in the last place at the largest finite value, half of one elsewhere."""
        return 2.0**-8 * length(arrays)


def _power_of_two(array: Array) -> float:
    """The power of two, normal in float32, that brings the largest value below 2¹⁵."""
    exponent = math.frexp(largest(array))[1] - LARGEST_EXPONENT
    return 2.0 ** max(exponent, -126)


def _by_place(halves: Array) -> bytes:
    return halves.view(np.uint8).reshape(-1, 2).T.tobytes()


def _from_places(body: Reader, count: int) -> Array:
    return body.take("u1", 2 * count).reshape(2, count).T.copy().view("<u2").reshape(-1)
