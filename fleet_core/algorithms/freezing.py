"""Applies a method's rules to the arrays that move in a round; the state of frozen arrays stays as it is.

A round with frozen arrays is a round on a smaller model, so every identity that holds for all arrays holds for those
that move. For example, the server's dual of each array is the mean of all devices' duals, whichever arrays a round
froze.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fleet_core.algorithms.interface import ClientState, ServerRule, ServerState, Update
from fleet_core.base import trees
from fleet_core.base.moving_arrays import Moving


def part_of(state: ClientState, moving: Moving) -> ClientState:
    """The state that a rule gets: of every role, the arrays that move."""
    return {role: moving.of(tree) for role, tree in state.items()}


def completed(state: ClientState, before: ClientState, moving: Moving) -> ClientState:
    """``state`` after a rule that had ``part_of(before)``, with the frozen arrays of ``before``."""
    if moving.everything:
        return state
    return {role: trees.merged(moving.rest(before.get(role, {})), tree) for role, tree in state.items()}


def apply(
    rule: ServerRule, state: ServerState, updates: Iterable[Update], members: int, hyper: Any, moving: Moving
) -> ServerState:
    """``rule.apply`` on the arrays that move, the only ones in ``updates``; the others stay as in ``state``. If the
    served model is the training model, it still is afterwards."""
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
