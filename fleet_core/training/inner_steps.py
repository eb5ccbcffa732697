"""Meta-gradients out of plain gradients and products with the Hessian, as arithmetic on trees.

A gradient is a function of named arrays that returns the loss and its gradient, with the same groups and names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from fleet_core.base import trees
from fleet_core.base.trees import Params

Gradient = Callable[[Params], tuple[Any, Params]]
Product = Callable[[Params, Params], Params]
"""(w, v) ↦ H(w) v, or an estimate."""


def path(gradient: Gradient, at: Params, lr: float, steps: int) -> Iterator[Params]:
    """The steps + 1 points of ``steps`` SGD steps from ``at``, starting with ``at``."""
    yield at
    for _ in range(steps):
        at = trees.axpy(-lr, gradient(at)[1], at)
        yield at


def first_order(support: Gradient, query: Gradient, lr: float, steps: int) -> Gradient:
    """∇query at T(w), T = ``steps`` SGD steps on ``support`` at rate ``lr``."""
    return lambda at: query(deque(path(support, at, lr, steps), maxlen=1)[0])


def with_hessian(support: Gradient, query: Gradient, lr: float, steps: int, product: Product) -> Gradient:
    """(I − lr H(w)) … (I − lr H(w_{s−1})) ∇query at T(w) = w_s. With ``product`` that of the support's loss this is
    ∇_w query(T(w))."""

    def gradient(at: Params) -> tuple[Any, Params]:
        points = list(path(support, at, lr, steps))
        value, v = query(points[-1])
        for w in reversed(points[:-1]):
            v = trees.axpy(-lr, product(w, v), v)
        return value, v

    return gradient


def central_difference(gradient: Gradient, difference: float) -> Product:
    """H(w) v ≈ (∇(w + δv) − ∇(w − δv)) / 2δ with δ = ``difference`` ‖w‖/‖v‖."""

    def product(w: Params, v: Params) -> Params:
        lengths = [length + (length == 0) for length in (trees.norm(w), trees.norm(v))]
        delta = difference * lengths[0] / lengths[1]
        there = trees.scale(v, delta)
        _, ahead = gradient(trees.add(w, there))
        _, behind = gradient(trees.subtract(w, there))
        return trees.scale(trees.subtract(ahead, behind), 0.5 / delta)

    return product


def meta_sgd(support: Gradient, query: Gradient, product: Product) -> Gradient:
    """∇_(w,a) query(w − a∘∇support(w)) for a tree with w and, in the group ``rates``, a: with u = ∇query at the adapted
    weights, it is u − H(w)(a∘u) in w and −u∘∇support(w) in a."""

    def gradient(at: Params) -> tuple[Any, Params]:
        w, rates = trees.parted(at, "rates")
        _, slope = support(w)
        value, u = query(trees.apply(lambda w, a, g: w - a * g, w, rates, slope))
        bent = product(w, trees.apply(lambda a, u: a * u, rates, u))
        in_w, in_rates = trees.subtract(u, bent), trees.apply(lambda u, g: -(u * g), u, slope)
        return value, trees.mirrored(in_w, in_rates, "rates")

    return gradient
