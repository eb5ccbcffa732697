"""The rules of a method on the arrays that move in a round; duals, moments and all else of the others stay as they are.

A round with frozen arrays is one of the method on a smaller model, so that every identity that holds for all arrays
holds for those that move: the mean of all duals, array by array, is the server's, whichever arrays a round froze.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fleet_core.algorithms.interface import ClientState, ServerRule, ServerState, Update
from fleet_core.base import trees
from fleet_core.base.moving import Moving


def part_of(state: ClientState, moving: Moving) -> ClientState:
    """The arrays that move, of every role: what a rule gets."""
    return {role: moving.of(tree) for role, tree in state.items()}


def completed(state: ClientState, before: ClientState, moving: Moving) -> ClientState:
    """``state`` after a rule that had ``part_of(before)``, with the frozen arrays of ``before``."""
    if moving.everything:
        return state
    return {role: trees.merged(moving.rest(before.get(role, {})), tree) for role, tree in state.items()}


def apply(
    rule: ServerRule, state: ServerState, updates: Iterable[Update], members: int, hyper: Any, moving: Moving
) -> ServerState:
    """``rule.apply`` on the arrays that move, which are all that ``updates`` have; the others stay as in ``state``. A
    served model that is the training model stays so."""
    if moving.everything:
        return rule.apply(state, updates, members, hyper)
    part = replace(
        state, model=moving.of(state.model), served=moving.of(state.served), memory=part_of(state.memory, moving)
    )
    after = rule.apply(part, updates, members, hyper)
    model = trees.merged(state.model, after.model)
    return replace(
        after, model=model, served=model if after.served is after.model else trees.merged(state.served, after.served),
        memory={role: trees.merged(state.memory.get(role, {}), tree) for role, tree in after.memory.items()},
    )
