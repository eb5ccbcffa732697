"""Walks over the arrays of all updates of a round side by side, a part at a time.

n: updates. s: values of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from fleet_core.algorithms.interface import Update
from fleet_core.base.trees import Params

Array = np.ndarray[Any, Any]
BLOCK_BYTES = 256 << 20
"""Bytes of one part of all updates. Each part costs one pass over the updates, which a fleet reads from disk."""


def blocks(updates: Iterable[Update], limit: int = BLOCK_BYTES) -> Iterator[tuple[int, Array]]:
    """(place of the first value, values [n, s]) for parts of the flat updates, in order; n in closing order."""
    first = next(iter(updates))
    size, count = sum(a.size for a in _arrays(first.payload.groups)), sum(1 for _ in updates)
    width = max(1, limit // (8 * count))
    for start in range(0, size, width):
        yield start, np.stack([_part(update.payload.groups, start, start + width) for update in updates])


def flat(tree: Params) -> Array:
    """All values, in the tree's order."""
    return _part(tree, 0, sum(a.size for a in _arrays(tree)))


def like(tree: Params, values: Array) -> dict[str, dict[str, Any]]:
    """``values`` [size] as a tree of the shapes and types of ``tree``."""
    start, made = 0, dict[str, dict[str, Any]]()
    for group, named in tree.items():
        made[group] = {}
        for name, array in named.items():
            shape = np.shape(array)
            end = start + int(np.prod(shape, dtype=np.int64))
            made[group][name] = values[start:end].reshape(shape).astype(np.asarray(array).dtype)
            start = end
    return made


def by_value(updates: Iterable[Update], function: Callable[[Array], Array]) -> dict[str, dict[str, Any]]:
    """The tree whose every value is ``function`` of that value in all updates: [n, s] -> [s]."""
    first = next(iter(updates)).payload.groups
    return like(first, np.concatenate([function(part) for _, part in blocks(updates)]))


def _arrays(tree: Params) -> Iterator[Array]:
    for named in tree.values():
        yield from (np.asarray(array) for array in named.values())


def _part(tree: Params, start: int, end: int) -> Array:
    """Values ``start`` to ``end`` of the flat tree, float64."""
    parts, here = [], 0
    for array in _arrays(tree):
        begin, stop = max(start - here, 0), min(end - here, array.size)
        if begin < stop:
            parts.append(array.ravel()[begin:stop])
        here += array.size
    return np.concatenate(parts or [np.zeros(0)]).astype(np.float64)
