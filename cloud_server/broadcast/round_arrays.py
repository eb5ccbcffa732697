"""The arrays that a fleet's rounds train: chosen when a round opens, kept in the ledger with the reason and how far
each moved.

The choice for a round depends only on fleet.toml and the closed rounds before it, so that a round that is reopened
after a restart trains the same arrays.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace

from cloud_server.broadcast.open_round import OpenRound
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import RoundArrays as Row
from cloud_server.records.fleet_folder import Fleet
from fleet_core.algorithms.interface import Method, ServerState
from fleet_core.base import trees
from fleet_core.base.moving_arrays import Moving
from fleet_core.base.trees import Params
from fleet_core.model import payloads
from fleet_core.model.choose_frozen import Chosen, Schedule, next_arrays
from fleet_core.model.layout import Layout
from fleet_core.model.select_arrays import AUTO

LARGEST_MOVE = 1e300
SCHEDULE = "schedule"
"""The ledger's fact: a round, and the schedule that it began with."""


def moves(method: Method, state: ServerState, published: Params, moving: Moving) -> dict[str, float]:
    """Sent array -> norm of the round's change to it, from the ``published`` weights to the ``state`` after the
    round."""
    sent = trees.only(published, method.shared)
    change = moving.of(trees.subtract(trees.only(method.server.broadcast(state).groups, sent), sent))
    return {
        f"{group}/{name}": min(payloads.norm({group: {name: array}}), LARGEST_MOVE)
        for group, named in change.items() for name, array in named.items()
    }


def sent_arrays(layout: Layout, method: Method) -> Collection[str]:
    """"group/name" of the arrays that devices send."""
    return tuple(f"{t.group}/{t.name}" for t in layout.tensors if t.group in method.shared)


class RoundArrays:
    """Chooses one fleet's arrays. layout: of the model. Raises ConfigError for a pattern that matches no array."""

    def __init__(self, fleet: Fleet, layout: Layout, ledger: Ledger):
        self._selected, self._section = fleet.selected(layout), fleet.config.train
        self._sent, self._method, self._ledger = sent_arrays(layout, fleet.method), fleet.method, ledger
        self._known = self._kept()  # a round, and its schedule

    def of_round(self, number: int) -> Chosen:
        """The arrays that round ``number`` trains."""
        return next_arrays(self._selected, self._sent, self._schedule(number) if self._section.freeze == AUTO else None)

    def _schedule(self, number: int) -> Schedule:
        first, schedule = self._known if self._known[0] <= number else (1, Schedule())
        within = range(first, number)
        losses = {row.round: row.loss for row in self._ledger.rounds("closed", within)} if within else {}
        for row in self._ledger.each(Row, within) if within else ():
            if row.round in losses and row.moves:
                schedule = schedule.after(row.moves, losses[row.round])
        self._known = number, schedule
        return schedule

    def _kept(self) -> tuple[int, Schedule]:
        """The schedule that a round began with: the rows of earlier rounds may be folded by now."""
        fact = self._ledger.fact(SCHEDULE)
        if fact is None:
            return 1, Schedule()
        number, kept = json.loads(fact)
        return number, Schedule(**{**kept, "frozen": frozenset(kept["frozen"]), "losses": tuple(kept["losses"])})

    def begin(self, opened: OpenRound) -> None:
        """Writes the row of a round whose ``Round`` is in the ledger, and its schedule. Replaces a row from before
        fleet.toml changed."""
        if self._section.freeze == AUTO:
            number, schedule = self._known
            kept = {**vars(schedule), "frozen": sorted(schedule.frozen)}
            self._ledger.set_facts(**{SCHEDULE: json.dumps([number, kept])})
        if self._section.parts or self._ledger.rows(Row, round=opened.number):
            frozen = tuple(sorted(opened.arrays.moving.frozen))
            self._ledger.put(Row(round=opened.number, frozen=frozen, reason=opened.arrays.reason))

    def close(self, opened: OpenRound, after: ServerState) -> None:
        """Adds how far each array moved. after: the state after the round."""
        if self._section.freeze == AUTO:
            row = self._ledger.rows(Row, round=opened.number)[0]
            moved = moves(self._method, after, opened.published, opened.arrays.moving)
            self._ledger.put(replace(row, moves=moved))
