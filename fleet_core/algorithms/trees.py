"""Arithmetic on named arrays that numpy and torch both obey.

``Params`` maps a group (``body``, ``head``, ``buffers``, ``rates``, ``control``, ``prototypes``) to named arrays of
that group. Every function but ``accumulate`` returns new arrays and leaves its arguments alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol


class Array(Protocol):
    """What the algorithms ask of an array: elementwise arithmetic and a sum. numpy and torch arrays have both."""

    def __add__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def sum(self) -> Any: ...


Named = Mapping[str, Any]
Params = Mapping[str, Mapping[str, Any]]


def apply(function: Callable[..., Any], first: Params, *others: Params) -> dict[str, dict[str, Any]]:
    """Elementwise ``function`` over trees of equal structure. Raises KeyError where one lacks an array of the first."""
    return {g: {n: function(a, *(o[g][n] for o in others)) for n, a in named.items()} for g, named in first.items()}


def add(left: Params, right: Params) -> dict[str, dict[str, Any]]:
    return apply(lambda a, b: a + b, left, right)


def subtract(left: Params, right: Params) -> dict[str, dict[str, Any]]:
    return apply(lambda a, b: a - b, left, right)


def scale(tree: Params, factor: float) -> dict[str, dict[str, Any]]:
    return apply(lambda a: a * factor, tree)


def axpy(factor: float, x: Params, y: Params) -> dict[str, dict[str, Any]]:
    """``factor * x + y``."""
    return apply(lambda a, b: a * factor + b, x, y)


def accumulate(total: Params, tree: Params) -> None:
    """Adds ``tree`` to ``total`` in place: the one function that changes its argument."""
    for group, named in total.items():
        for name, array in named.items():
            array += tree[group][name]


def widened(tree: Params) -> dict[str, dict[str, Any]]:
    """The same values in float64 arrays of their own."""
    return apply(lambda a: a.astype("float64") if hasattr(a, "astype") else a.double() + 0, tree)


def zeros_like(tree: Params) -> dict[str, dict[str, Any]]:
    return apply(lambda a: a - a, tree)


def only(tree: Params, groups: Collection[str]) -> dict[str, dict[str, Any]]:
    """The groups of ``tree`` that are named in ``groups``, in the tree's order."""
    return {g: dict(named) for g, named in tree.items() if g in groups}


def norm(tree: Params) -> float:
    """Euclidean norm over every array of the tree."""
    squares = sum(float((a * a).sum()) for named in tree.values() for a in named.values())
    return math.sqrt(squares)


def clip(tree: Params, limit: float) -> Params:
    """The tree scaled down to a norm of at most ``limit``; a limit of 0 means none."""
    if limit <= 0:
        return tree
    length = norm(tree)
    return scale(tree, limit / length) if length > limit else tree
