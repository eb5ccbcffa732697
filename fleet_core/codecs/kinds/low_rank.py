"""``lowrank``: a matrix as the product of two factors with two columns, in bfloat16; small arrays whole.

Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, rank 2. A kernel [out, in, …] is the matrix [out, in · …].
Deviations: two power iterations from a start that the seed draws, in place of one from the factor of the previous
round, so that a device keeps no more than its residual; the second factor is fitted to the rounded first one. Products
of bfloat16 values are exact in float32, so that every machine decodes the same bits.
"""

from __future__ import annotations

import math

import numpy as np

from fleet_core.codecs.frame import FramedCodec, Reader
from fleet_core.codecs.interface import LARGE_PENALTY, Array, Arrays, Seed, Shapes
from fleet_core.codecs.quantize import from_bfloat16, key, random_words, to_bfloat16, uniform
from fleet_core.codecs.vector import length

RANK, ITERATIONS = 2, 2


class LowRank(FramedCodec):
    name = "lowrank"
    about = "matrices as products of two thin ones (PowerSGD, rank 2); PFLDyn needs a large penalty"
    feedback_down = False
    misses = LARGE_PENALTY

    def body(self, arrays: Arrays, seed: Seed) -> bytes:
        parts = []
        for number, name in enumerate(sorted(arrays)):
            array = arrays[name]
            sides = _sides(array.shape)
            start = None if sides is None else _start(key((*seed, number)), sides[1])
            factors = [array] if start is None else _factors(array.reshape(sides).astype(np.float64), start)
            parts += [to_bfloat16(factor).tobytes() for factor in factors]
        return b"".join(parts)

    def arrays(self, body: Reader, shapes: Shapes) -> dict[str, Array]:
        return {name: _array(body, shapes[name]) for name in sorted(shapes)}

    def body_bytes(self, shapes: Shapes) -> int:
        return 2 * sum(map(_values, shapes.values()))

    def bound(self, arrays: Arrays) -> float:
        """The norm of the arrays: a projection loses at most that much, and its rounding stays within what it found."""
        return length(arrays)


def _sides(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(rows, columns) of the matrix; None if its factors would have no fewer values."""
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if RANK * (rows + columns) < rows * columns else None


def _values(shape: tuple[int, ...]) -> int:
    sides = _sides(shape)
    return math.prod(shape) if sides is None else RANK * sum(sides)


def _start(key: int, columns: int) -> Array:
    return uniform(random_words(key, columns * RANK)).reshape(columns, RANK) - 0.5


def _factors(matrix: Array, right: Array) -> list[Array]:
    """Float32 P [rows, 2] with columns that are nearly orthonormal, and Q [columns, 2]: P Qᵀ ≈ the matrix."""
    for _ in range(ITERATIONS):
        left, _ = np.linalg.qr(matrix @ right)
        right = matrix.T @ left
    left = from_bfloat16(to_bfloat16(left)).astype(np.float64)
    right = np.linalg.solve(left.T @ left, left.T @ matrix).T
    return [left.astype(np.float32), right.astype(np.float32)]


def _array(body: Reader, shape: tuple[int, ...]) -> Array:
    sides = _sides(shape)
    if sides is None:
        return from_bfloat16(body.take("<u2", math.prod(shape))).reshape(shape)
    left, right = (from_bfloat16(body.take("<u2", side * RANK)).reshape(side, RANK) for side in sides)
    first, second = (np.multiply.outer(left[:, k], right[:, k]) for k in range(RANK))
    return np.asarray(first + second).reshape(shape)
