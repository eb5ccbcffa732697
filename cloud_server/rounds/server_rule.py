"""The server rule's state: read from the disk, corrected when devices join or leave, and updated by each round."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace

from cloud_server.broadcast.open_round import OpenRound
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Round
from cloud_server.membership.members import Members
from cloud_server.records.checkpoint import Checkpoint, Checkpoints
from cloud_server.records.fleet_folder import Fleet
from fleet_core.algorithms import freezing
from fleet_core.algorithms.interface import ServerState, Update
from fleet_core.base import trees
from fleet_core.base.errors import ConfigError
from fleet_core.base.moving_arrays import EVERYTHING
from fleet_core.model.layout import Layout
from fleet_core.model.skipped_updates import Measured
from fleet_core.privacy import gaussian
from fleet_core.privacy.gaussian import NoisedSum
from fleet_core.privacy.settings import CENTRAL
from fleet_core.robust.screening import Screened


class RuleState:
    """The method's server rule and its state. ``checkpoint``: the state after the last closed round."""

    def __init__(
        self, fleet: Fleet, layout: Layout, ledger: Ledger, checkpoints: Checkpoints, members: Members, *,
        log: Callable[[str], None],
    ):
        self._method, self._hyper, self._skip_below = fleet.method, fleet.hyper, fleet.skip_below
        self._screening, self._privacy = fleet.screening, fleet.config.privacy
        self._checkpoints, self._members, self._log = checkpoints, members, log
        self._first = fleet.first(layout)
        self.checkpoint = self._resumed(fleet, ledger)

    def _resumed(self, fleet: Fleet, ledger: Ledger) -> Checkpoint:
        """The checkpoint to continue from. Raises ConfigError if the closed rounds used another method, because this
        one cannot read that method's state."""
        first, name = self._first, fleet.method.name
        closed = ledger.rounds("closed")
        number = closed[-1].round if closed else 0
        if not closed and not self._checkpoints.exists(0):
            state = self._method.server.init(trees.widened(trees.only(first, self._method.received)), self._hyper)
            return Checkpoint(0, state, facts={"method": name, "members": "0", "leaves": "0", "epoch_start": "1"})
        found = self._checkpoints.load(number, first)
        theirs = found.facts.get("method", name)
        if theirs != name:
            raise ConfigError(
                f"fleet.method is {name}, and {number} rounds here are {theirs}'s",
                where=str(fleet.folder / "fleet.toml"),
                hint=f'put back method = "{theirs}", or make a new fleet in an empty folder',
            )
        return replace(found, facts={**found.facts, "method": name})

    def history(self) -> tuple[int, int]:
        """(last closed round, first round of the present duals)."""
        return self.checkpoint.round, int(self.checkpoint.facts["epoch_start"])

    def opening(self, interrupted: Round | None) -> ServerState:
        """The state that a round starts from: the checkpoint's state, corrected for later joins and leaves.

        A round that is reopened after a restart starts from the same state as before, so that an interrupted run
        computes what an uninterrupted one does. Later joins count when that round closes, later leaves in the next one.
        interrupted: the row of such a round.
        """
        if interrupted is not None:
            return self._reconciled(interrupted.members, leaving=False)
        return self._reconciled(len(self._members.members()), leaving=True)

    def _reconciled(self, members: int, *, leaving: bool) -> ServerState:
        state, rule, facts = self.checkpoint.state, self._method.server, self.checkpoint.facts
        before = int(facts["members"])
        if leaving and self._members.leaves > int(facts["leaves"]):
            state = rule.left(state, members)
            facts = {**facts, "members": str(members), "leaves": str(self._members.leaves)}
            if state.dual_epoch != self.checkpoint.state.dual_epoch:
                facts["epoch_start"] = str(self.checkpoint.round + 1)
                self._log("every device's dual starts again from zero: a device that took part has left, or lost its "
                          "state")
            self.checkpoint = replace(self.checkpoint, state=state, facts=facts)
            self._checkpoints.save(self.checkpoint)
            return state
        return rule.joined(state, members, members - before) if 0 < before < members else state

    def roll_back(self, to: int) -> None:
        """Continues from the served model of round ``to``. The number of the last closed round stays. Duals start again
        from zero, because those of the devices belong to the model that is given up. Raises StateError if the
        checkpoint of that round is not kept."""
        now, old = self.checkpoint, self._checkpoints.served_round(to, self._first).state
        state, facts = self._method.server.left(old, int(now.facts["members"])), dict(now.facts)
        if state.dual_epoch != old.dual_epoch:
            facts["epoch_start"] = str(now.round + 1)
        epoch = now.state.dual_epoch + state.dual_epoch - old.dual_epoch
        self.checkpoint = replace(
            now, state=replace(state, round=now.round, dual_epoch=epoch), lost=None, facts=facts, moving=EVERYTHING,
            deltas=now.deltas if now.moving.everything else (), robust={},
        )
        self._checkpoints.save(self.checkpoint)
        self._checkpoints.drop_served_rounds(after=to)

    def closing(
        self, opened: OpenRound, updates: Iterable[Update], members: int
    ) -> tuple[Checkpoint, Screened]:
        """(the checkpoint after a round with these updates, which of them it uses); writes nothing. Raises StateError
        or CodecError for an update that has changed since it was received."""
        joined = self._reconciled(len(self._members.members()), leaving=False)
        rule, moving = self._method.server, opened.arrays.moving
        as_received = replace(rule.as_received(joined, trees.widened(opened.published)), round=opened.number)
        screened = self._screening.screen(updates, self.checkpoint.facts, self.checkpoint.robust, opened.measures,
                                          model=as_received.model)
        passing = Measured(self._hidden(screened.used), self._skip_below)
        state = freezing.apply(rule, as_received, passing, members, self._hyper, moving)
        facts = {**passing.facts(screened.facts), "members": str(members)}
        deltas = opened.chain.kept if self.checkpoint.moving.everything else ()
        checkpoint = Checkpoint(
            opened.number, state, opened.published, opened.lost, facts, deltas=deltas, moving=moving,
            robust=screened.arrays,
        )
        return checkpoint, screened

    def closing_without(self, opened: OpenRound) -> Checkpoint:
        """The checkpoint after a round that counts no update: the model stays as devices hold it."""
        joined = self._reconciled(len(self._members.members()), leaving=False)
        state = self._method.server.as_received(joined, trees.widened(opened.published))
        before, members = self.checkpoint, str(len(self._members.members()))
        return replace(
            before, round=opened.number, state=replace(state, round=opened.number), published=opened.published,
            lost=opened.lost, facts={**before.facts, "members": members},
            deltas=opened.chain.kept if before.moving.everything else (), moving=opened.arrays.moving,
        )

    def _hidden(self, updates: Iterable[Update]) -> Iterable[Update]:
        """The updates, with noise in their sum if the aggregator adds it. A round that is closed again after a crash
        gets other noise, because nobody has seen the first."""
        private = self._privacy
        if private.mode != CENTRAL:
            return updates
        return NoisedSum(updates, private.clip, private.noise_multiplier, secrets.token_bytes(gaussian.KEY_BYTES))
