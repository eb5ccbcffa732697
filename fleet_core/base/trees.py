"""Arithmetic on named arrays of numpy or torch.

``Params`` maps a group (``body``, ``head``, ``buffers``, ``rates``, ``control``, ``prototypes``) to its named arrays.
Every function but ``accumulate`` returns new arrays and does not change its arguments.

Within ``side_by_side`` the first axis of every array counts clients that are trained together: elementwise functions
stay the same, and norms are one per client.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol


class Array(Protocol):
    """The array operations that the algorithms use: elementwise arithmetic and a sum."""

    def __add__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def sum(self) -> Any: ...


Params = Mapping[str, Mapping[str, Any]]

_SIDE_BY_SIDE = ContextVar("side_by_side", default=False)


@contextlib.contextmanager
def side_by_side() -> Iterator[None]:
    """Within it, the first axis of every array counts clients."""
    token = _SIDE_BY_SIDE.set(True)
    try:
        yield
    finally:
        _SIDE_BY_SIDE.reset(token)


def apply(function: Callable[..., Any], first: Params, *others: Params) -> dict[str, dict[str, Any]]:
    """Elementwise ``function`` over trees of equal structure. Raises KeyError where one lacks an array of the first."""
    return {g: {n: function(a, *(o[g][n] for o in others)) for n, a in named.items()} for g, named in first.items()}


def add(left: Params, right: Params) -> dict[str, dict[str, Any]]:
    return apply(lambda a, b: a + b, left, right)


def subtract(left: Params, right: Params) -> dict[str, dict[str, Any]]:
    return apply(lambda a, b: a - b, left, right)


def scale(tree: Params, factor: Any) -> dict[str, dict[str, Any]]:
    """``factor``: a number; within ``side_by_side`` also an array [clients], as ``norm`` returns."""
    if _SIDE_BY_SIDE.get() and hasattr(factor, "reshape"):
        return apply(lambda a: a * factor.reshape(-1, *(1,) * (len(a.shape) - 1)), tree)
    return apply(lambda a: a * factor, tree)


def axpy(factor: float, x: Params, y: Params) -> dict[str, dict[str, Any]]:
    """``factor * x + y``."""
    return apply(lambda a, b: a * factor + b, x, y)


def accumulate(total: Params, tree: Params) -> None:
    """Adds ``tree`` to ``total`` in place."""
    for group, named in total.items():
        for name, array in named.items():
            array += tree[group][name]


def widened(tree: Params) -> dict[str, dict[str, Any]]:
    """A copy in float64."""
    return apply(lambda a: a.astype("float64") if hasattr(a, "astype") else a.double() + 0, tree)


def zeros_like(tree: Params) -> dict[str, dict[str, Any]]:
    return apply(lambda a: a - a, tree)


def only(tree: Params, groups: Collection[str]) -> dict[str, dict[str, Any]]:
    """The part of ``tree`` whose groups are in ``groups``, in the tree's order."""
    return {g: dict(named) for g, named in tree.items() if g in groups}


def merged(whole: Params, part: Params) -> dict[str, dict[str, Any]]:
    """``whole``, with the arrays of ``part`` in place of its own; arrays that only ``part`` has come last."""
    groups = dict.fromkeys((*whole, *part))
    return {g: {**whole.get(g, {}), **part.get(g, {})} for g in groups}


def mirrored(model: Params, tree: Params, group: str) -> dict[str, dict[str, Any]]:
    """``model`` plus one more group: the arrays of ``tree``, which has the model's structure, named ``group.name``."""
    flat = {f"{g}.{n}": array for g, named in tree.items() for n, array in named.items()}
    return {**{g: dict(named) for g, named in model.items()}, group: flat}


def parted(groups: Params, group: str) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """(model, tree): the inverse of ``mirrored``."""
    model = {g: dict(named) for g, named in groups.items() if g != group}
    return model, {g: {n: groups[group][f"{g}.{n}"] for n in named} for g, named in model.items()}


def norm(tree: Params) -> Any:
    """Euclidean norm over all arrays of the tree: a float; within ``side_by_side`` an array [clients]."""
    arrays = [array for named in tree.values() for array in named.values()]
    if _SIDE_BY_SIDE.get():
        return sum((a * a).reshape(len(a), -1).sum(1) for a in arrays) ** 0.5
    return math.sqrt(sum(float((a * a).sum()) for a in arrays))


def clip(tree: Params, limit: float) -> Params:
    """The tree, scaled down to a norm of at most ``limit``; 0 means no limit."""
    if limit <= 0:
        return tree
    length = norm(tree)
    if _SIDE_BY_SIDE.get():
        return scale(tree, limit / ((length > limit) * length + (length <= limit) * limit))
    return scale(tree, limit / length) if length > limit else tree
