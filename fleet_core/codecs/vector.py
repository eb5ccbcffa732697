"""Arrays as one vector, in the order of their names, which both sides know, so that it is not sent."""

from __future__ import annotations

import math

import numpy as np

from fleet_core.codecs.interface import Array, Arrays, Shapes


def size(shapes: Shapes) -> int:
    """Number of values."""
    return sum(map(math.prod, shapes.values()))


def shapes_of(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def in_order(arrays: Arrays) -> list[Array]:
    return [arrays[name] for name in sorted(arrays)]


def joined(arrays: Arrays) -> Array:
    """Float32 [n], all arrays in the order of their names."""
    return np.concatenate([np.zeros(0, np.float32), *(array.reshape(-1) for array in in_order(arrays))])


def divided(vector: Array, shapes: Shapes) -> dict[str, Array]:
    """The inverse of ``joined``; views of ``vector``."""
    arrays, end = {}, 0
    for name in sorted(shapes):
        start, end = end, end + math.prod(shapes[name])
        arrays[name] = vector[start:end].reshape(shapes[name])
    return arrays


def length(arrays: Arrays) -> float:
    """Euclidean norm in float64."""
    return float(np.linalg.norm(joined(arrays).astype(np.float64)))
