"""Determines which arrays each round of a run trains, and since when the others have been frozen, as in a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloud_server.broadcast.round_arrays import moves, sent_arrays
from fleet_core.algorithms.interface import Method, ServerState
from fleet_core.base.trees import Params
from fleet_core.model import select_arrays
from fleet_core.model.choose_frozen import Chosen, Schedule, next_arrays
from fleet_core.model.layout import Layout
from fleet_core.model.select_arrays import AUTO, TrainSection

ARRAYS = "arrays"
"""The key of the arrays in a round's figures."""


class RunArrays:
    """The trained arrays of one run. Raises ConfigError for patterns that do not fit the layout."""

    def __init__(self, section: TrainSection, layout: Layout, method: Method):
        self._section, self._method = section, method
        self._selected, self._sent = select_arrays.moving_of(section, layout, method), sent_arrays(layout, method)
        self._schedule = Schedule() if section.freeze == AUTO else None
        self._frozen: list[frozenset[str]] = []

    def chosen(self) -> Chosen:
        """The arrays that the next round trains."""
        return next_arrays(self._selected, self._sent, self._schedule)

    def figures(self, chosen: Chosen, after: ServerState, published: Params) -> dict[str, Any]:
        """The figures of a round that has ended; empty if every round trains all arrays."""
        if not self._section.parts:
            return {}
        moved = {} if self._schedule is None else moves(self._method, after, published, chosen.moving)
        return {ARRAYS: {"frozen": sorted(chosen.moving.frozen), "reason": chosen.reason, "moves": moved}}

    def add(self, row: Mapping[str, Any]) -> None:
        """Takes the figures of the next closed round."""
        known = row.get(ARRAYS, {})
        self._frozen.append(frozenset(known.get("frozen", ())))
        if self._schedule is not None:
            self._schedule = self._schedule.after(known["moves"], row["loss"])

    def since(self) -> int:
        """The first round whose training model has the frozen arrays as they are now; the next round if none is frozen.
        """
        frozen, number = self._frozen[-1] if self._frozen else frozenset(), len(self._frozen)
        while number and frozen and frozen <= self._frozen[number - 1]:
            number -= 1
        return number + 1
