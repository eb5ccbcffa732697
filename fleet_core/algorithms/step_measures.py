"""Losses that depend on something that is no parameter, and what a step measures beside its gradient.

The seam has room for both: a constant goes into the gradient function as one more group, and since nobody needs a
derivative in a constant, its place in the answer carries what the step has measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fleet_core.algorithms.interface import GradFn
from fleet_core.base import trees
from fleet_core.base.trees import Params


def watched(steps: Iterable[GradFn], given: Params, seen: list[Params]) -> Iterator[GradFn]:
    """Gradients that find ``given`` beside the parameters; what comes back in its place is appended to ``seen``."""

    def wrap(gradient: GradFn) -> GradFn:
        def step(at: Params) -> Params:
            back = gradient({**at, **given})
            seen.append(trees.only(back, given))
            return trees.only(back, at)

        return step

    return map(wrap, steps)
