"""``common:E``: one signed byte per value, all in whole multiples of 2^E, for devices whose values are summed.

Not for a user to choose: ``[privacy] range`` decides the scale of a fleet with secure aggregation. What is cut off or
rounded away is the next residual, as with int8. Multiples of a power of two are exact in float32, and so are their sums
in float64: a simulation computes what a fleet does.

Numbers beside the arrays (a method's scalars, a device's weight) follow the values as digits of base 128, which are
summed digit by digit: whole multiples of 2^-20 within ±2^14.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from fleet_core.codecs import vector
from fleet_core.codecs.frame import FramedCodec, Reader, pack, unpack
from fleet_core.codecs.interface import Array, Arrays, Seed, Shapes

LARGEST = 127
MOST_VALUES = 1 << 32
DIGITS, BASE, FINE, MOST_NUMBER = 5, 128, 1 << 20, 1 << 14
"""Of a number beside the arrays: digits, their base, units in 1, and the largest size."""
FULL = 8192.0
"""The number that stands for a weight of 1."""
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


def sent_as(number: float) -> float:
    """What a number beside the arrays becomes when it is sent."""
    return _whole(number) / FINE - MOST_NUMBER


def with_numbers(data: bytes, numbers: Sequence[float]) -> bytes:
    """A payload followed by ``numbers``, for ``values_of``."""
    digits = bytes(_whole(number) // BASE**place % BASE for number in numbers for place in range(DIGITS))
    return pack(unpack(data, MOST_VALUES) + digits) if digits else data


def means(digits: Array, devices: int) -> list[float]:
    """The means over ``devices`` of the numbers whose digits have these sums, int64."""
    numbers = digits.reshape(-1, DIGITS)
    sums = (sum(int(digit) * BASE**place for place, digit in enumerate(number)) for number in numbers)
    return [one / devices / FINE - MOST_NUMBER for one in sums]


def _whole(number: float) -> int:
    largest: int = BASE**DIGITS - 1
    return min(max(round((number + MOST_NUMBER) * FINE), 0), largest)


def values_of(data: bytes) -> Array:
    """int8, the whole numbers in a payload of this device's own. Raises CodecError."""
    return np.frombuffer(unpack(data, MOST_VALUES), np.int8)
