"""``common:E``: one signed byte per value, all in whole multiples of 2^E, for devices whose values are summed.

Not for a user to choose: ``[privacy] range`` decides the scale of a fleet with secure aggregation. What is cut off or
rounded away is the next residual, as with int8. Multiples of a power of two are exact in float32, and so are their sums
in float64: a simulation computes what a fleet does.
"""

from __future__ import annotations

import math
import re

import numpy as np

from fleet_core.codecs import vector
from fleet_core.codecs.frame import FramedCodec, Reader, unpack
from fleet_core.codecs.interface import Array, Arrays, Seed, Shapes

LARGEST = 127
MOST_VALUES = 1 << 32
NAME = re.compile(r"common:(-?[0-9]{1,2})")


class CommonScale(FramedCodec):
    name = "common"
    about = "a byte per value, one scale for all devices"

    def __init__(self, exponent: int):
        self._step = np.float32(2.0**exponent)

    def body(self, arrays: Arrays, seed: Seed) -> bytes:
        whole = np.rint(vector.joined(arrays) / self._step)
        return np.clip(whole, -LARGEST, LARGEST).astype(np.int8).tobytes()

    def arrays(self, body: Reader, shapes: Shapes) -> dict[str, Array]:
        values = body.take("i1", self.body_bytes(shapes)).astype(np.float32) * self._step
        return vector.divided(values, shapes)

    def body_bytes(self, shapes: Shapes) -> int:
        return sum(math.prod(shape) for shape in shapes.values())

    def bound(self, arrays: Arrays) -> float:
        lost = np.abs(vector.joined(arrays)) - LARGEST * self._step
        return float(np.linalg.norm(np.maximum(lost, self._step / 2)))


def name_of(exponent: int) -> str:
    return f"common:{exponent}"


def exponent_of(name: str) -> int | None:
    """The exponent E in a codec's name; None for another codec."""
    found = NAME.fullmatch(name)
    return int(found[1]) if found else None


def values_of(data: bytes) -> Array:
    """int8, the whole numbers in a payload of this device's own. Raises CodecError."""
    return np.frombuffer(unpack(data, MOST_VALUES), np.int8)
