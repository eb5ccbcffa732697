"""Passes constants to a step's loss, and returns what the step measures beside its gradient.

A constant is one more group among the parameters. Its derivative is not needed, so in the gradient the same group holds
what the step has measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fleet_core.algorithms.interface import GradFn
from fleet_core.base import trees
from fleet_core.base.trees import Params


def with_constants(steps: Iterable[GradFn], constants: Params, measured: list[Params]) -> Iterator[GradFn]:
    """``steps`` that get ``constants`` beside the parameters; what they return in these groups is appended to
    ``measured``."""

    def wrap(gradient: GradFn) -> GradFn:
        def step(at: Params) -> Params:
            result = gradient({**at, **constants})
            measured.append(trees.only(result, constants))
            return trees.only(result, at)

        return step

    return map(wrap, steps)
