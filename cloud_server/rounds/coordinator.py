"""The aggregator's loop: select → publish → collect until the deadline → apply.

Closing a round is a pure function of the checkpoint, the ledger and the spool. A killed aggregator continues at its
next start: it opens the round again with the same cohort and model, and does not ask again for updates that it has.

If a write fails, ``step`` raises StateError and this coordinator ends: see ``running.aggregator``.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable

from cloud_server.broadcast.open_round import OpenRound
from cloud_server.broker import requirements
from cloud_server.ledger import disk_errors
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Round
from cloud_server.records.checkpoint import Checkpoint
from cloud_server.records.fleet_folder import Fleet
from cloud_server.rounds.aggregator_parts import assemble
from cloud_server.rounds.operator_requests import OperatorRequests
from cloud_server.rounds.received_messages import DeviceMessages
from cloud_server.rounds.secure_round import RESTARTED
from fleet_core.algorithms.interface import Update
from fleet_core.base.errors import CodecError, FleetError, MessageError, StateError
from fleet_core.link.interface import Connected, Denied, Disconnected, Link, Message, Will
from fleet_core.model import skipped_updates
from fleet_core.protocol import cohort, messages, topics
from fleet_core.protocol.device_messages import ServerPresence
from fleet_core.robust.screening import Screened

LOOK_S = 0.1  # between two checks of all devices
BUSY_S = 1.0  # after longer work in one step devices are not silent, but unheard


class Coordinator:
    """Drives one fleet over an open link. ``log`` receives one line at a time of what an operator may want to read.
    access_changed(): called when the broker must read its access list again. authority_changed(): called when it must
    trust other authorities."""

    def __init__(
        self,
        fleet: Fleet,
        link: Link,
        ledger: Ledger,
        *,
        boot: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        log: Callable[[str], None] = lambda line: None,
        access_changed: Callable[[], None] = lambda: None,
        authority_changed: Callable[[], None] = lambda: None,
    ):
        self.fleet, self.link, self.ledger = fleet, link, ledger
        self.config, self.method, self.hyper = fleet.config, fleet.method, fleet.hyper
        self.name = fleet.config.fleet.name
        self.boot = boot or secrets.token_hex(8)
        self._clock, self._now, self._log = clock, now, log
        for remark in fleet.remarks():
            log(remark)
        self._parts = assemble(
            fleet, link, ledger, boot=self.boot, clock=clock, now=now, log=log, access_changed=access_changed,
            authority_changed=authority_changed,
        )
        self._members, self._rounds, self._rule = self._parts.members, self._parts.rounds, self._parts.rule
        self.layout = self._parts.layout
        self._requests = OperatorRequests(self._parts, pause=self._pause, clock=clock, now=now)
        self._device_messages = DeviceMessages(self._parts, self._requests, log)
        self._begun = 0
        self._looked_at = -math.inf
        self._idle: int | None = None
        self._taken_up = False  # the open round began before a restart, and too few devices are back
        self.broker_said = ""
        self.paused = ledger.facts().get("paused") == "yes"

    # The loop ---------------------------------------------------------------------------------------------------------

    def step(self, timeout_s: float) -> bool:
        """Handles the messages that arrive within ``timeout_s``, and everything that is due. True if anything
        happened."""
        events, began = self.link.poll(timeout_s), self._clock()
        for event in events:
            match event:
                case Connected(max_packet_bytes=limit):
                    if self.broker_said:
                        self._log("broker: connected")
                    self._on_connected(limit)
                case Disconnected(reason):
                    said = requirements.explained(reason)
                    if said != self.broker_said:  # log a reason once, not at each attempt to connect
                        self._log(f"broker: {said}")
                    self.broker_said = said
                case Message(topic, payload, retain):
                    self._guarded(topic, payload, retain)
                case Denied(topic, reason):
                    self._log(f"broker: {topic} denied: {reason}")
                    self._parts.left.denied(topic)
        self._requests.tick()
        if self._parts.keys.tick():
            self._parts.manifests.again()
            self._parts.programs.again()
        self._parts.receiver.tick()
        if self._clock() - began > BUSY_S:  # what devices sent in the meantime is not read yet
            self._members.listen_again()
        if self.link.connected:
            self._go_on()
        self._parts.publisher.tick()
        self._parts.left.tick()
        if self.link.connected:
            self._parts.programs.tick()
        return bool(events)

    def _go_on(self) -> None:
        """Closes and opens rounds that are due. Not called offline, when no update can arrive."""
        if self.open is not None and (self.open.answered or self._time_to_look()):
            self._close_if_due(self.open)
            if self._rounds.open is None:
                self._requests.read()  # those made during the round, before the next one opens
        if self.open is None and self._time_to_look():
            before = self._rounds.interrupted(self.checkpoint.round + 1)
            if before is None:
                self._parts.roll_backs.go_back_if_due(last=self.finished)
            if not self.paused and not self.finished:
                self._open_if_possible(before)
        if self.open is None and (self.paused or self.finished) and self._idle != self.checkpoint.round:
            self._idle = self.checkpoint.round
            self._parts.manifests.no_round(self.checkpoint)

    def _time_to_look(self) -> bool:
        """Whether to check all devices again; between two checks there is time to handle their messages."""
        if self._clock() - self._looked_at < LOOK_S:
            return False
        self._looked_at = self._clock()
        return True

    @property
    def checkpoint(self) -> Checkpoint:
        """The state after the last closed round."""
        return self._rule.checkpoint

    @property
    def open(self) -> OpenRound | None:
        return self._rounds.open

    @property
    def finished(self) -> bool:
        """Whether all rounds are closed or the run ended early; the served model stays published."""
        return self.checkpoint.round >= self.config.fleet.rounds or bool(self.ended)

    @property
    def ended(self) -> str:
        """Why the run ended before its last round; empty otherwise."""
        return self._parts.budget.ended

    @property
    def served_round(self) -> int:
        """The round whose model is served; the last closed round if no model is served yet."""
        served = self._parts.served.reference
        return self.checkpoint.round if served is None else served.round

    @property
    def stalled(self) -> str:
        """Why the open round does not end, or empty."""
        return self._rounds.stalled

    @property
    def settled(self) -> bool:
        """Whether nothing waits to be published."""
        return self._parts.publisher.idle and self.link.unacknowledged == 0

    def close(self) -> None:
        """Announces the end and closes the link. The open round stays open in the ledger and continues at the next
        start."""
        self._parts.messages.announce("off")
        self.link.close()

    def _guarded(self, topic: str, payload: bytes, retain: bool) -> None:
        try:
            self._device_messages.on_message(topic, payload, retain=retain)
        except FleetError as error:
            if disk_errors.is_disk_error(error):
                raise
            self._log(f"refused {topic}: {error}")

    # Start and restart ------------------------------------------------------------------------------------------------

    def _on_connected(self, limit_bytes: int | None) -> None:
        self.broker_said = ""
        requirements.check_packets(self.fleet, limit_bytes)
        self._parts.readiness.connected()
        self.link.subscribe(*topics.from_devices(self.name), as_published=True)
        self._parts.left.connected()
        self._parts.messages.announce("on")
        self._parts.publisher.reconnected()
        self._parts.programs.reconnected()
        self._parts.keys.reconnected()

    def _pause(self, value: str) -> None:
        """value: yes | no."""
        self.paused, self._idle = value == "yes", None
        self.ledger.set_facts(paused=value)

    # Open a round -----------------------------------------------------------------------------------------------------

    def _open_if_possible(self, before: Round | None) -> None:
        """Opens the next round, or reopens a round that an earlier aggregator did not close. before: the row of the
        reopened round."""
        number = self.checkpoint.round + 1
        if before is None and self._parts.budget.over(self.checkpoint.round):
            return self._end_early()
        if before is None and not self._parts.readiness.may_open(number):
            return
        state = self._rule.opening(before)
        sent = self.method.server.broadcast(state)
        chosen = before.cohort if before else tuple(
            cohort.select(self.config.fleet.seed, number, self._members.askable(), self.config.fleet.cohort)
        )
        others = set(chosen) - self._rounds.cohort(self.checkpoint.round)
        codecs = self._parts.codecs.of_round(number)
        reference, made, chain = self._parts.models.training(
            sent.groups, self.checkpoint, number, codecs["down"].codec,
            lambda base: self._members.lacking(base, others), self._members.listening,
        )
        started = before.opened_at if before else self._now()
        opened = self._rounds.open = OpenRound(
            number, chosen, started, self._clock() + self.config.fleet.deadline_s, reference, made.decoded, made.lost,
            sent.scalars, chain, self._parts.models.per_device(state, chosen), codecs, made.left,
            skipped_updates.least_norm(self.fleet.skip_below, self.checkpoint.facts),
            self._parts.arrays.of_round(number), self._parts.secure.session(number, len(chosen)),
        )
        self._idle, self._taken_up, self._begun = None, before is not None and self._begun != number, number
        self._parts.waiting.begin()
        self._parts.receiver.begin(opened)
        interrupted = before is not None and self._parts.secure.interrupted(number)
        with self.ledger.transaction():  # one sync for all that must be on the disk before the manifest is sent
            if before is None:
                self._rounds.begin(opened, len(self._members.members()))
            self._parts.privacy.note(opened)
            self._parts.codecs.begin(opened)
            self._parts.arrays.begin(opened)
            if not interrupted:
                self._parts.manifests.open_round(opened, self.checkpoint)
        if interrupted:
            return self._close_uncounted(opened, RESTARTED)
        if before is None:
            self._parts.readiness.say_numbers(number)

    def _end_early(self) -> None:
        """Serves the last model of a run that has spent its budget. A run that reached its target serves it already."""
        if self._parts.budget.spent and self.checkpoint.round > self.served_round:
            self._parts.served.serve(self.checkpoint, last=True)

    # Close a round ----------------------------------------------------------------------------------------------------

    def _close_if_due(self, opened: OpenRound) -> None:
        if opened.secure is not None and opened.secure.phase != "keys":
            return self._sum(opened)
        asked = [name for name in opened.cohort
                 if self._members.enrolled(name) and name not in self._members.quarantined]
        open_ones = [name for name in asked if name not in opened.delivered and name not in opened.failed]
        least = 1 if opened.secure is None else opened.secure.session.rules.least
        wanted = max(least, math.ceil(self.config.fleet.quorum * len(asked)))
        due = self._clock() > opened.deadline
        over = due or not open_ones or self._all_gone(open_ones)
        if len(opened.delivered) >= wanted and over:
            return self._close(opened) if opened.secure is None else self._parts.secure.group(opened)
        if not asked:
            return self._abandon(opened)
        if over and not self.paused and self._parts.places.pass_on(opened, due=due):
            self._rounds.open = None  # reopened with the new cohort; received updates stay
        elif due and self._parts.waiting.at_deadline(opened, wanted, open_ones):
            opened.try_again()
            self._parts.manifests.open_round(opened, self.checkpoint)
        elif not due and not open_ones:
            self._parts.waiting.all_answered(opened, wanted)

    def _all_gone(self, names: list[str]) -> bool:
        """Whether no update of these devices is expected any more. A round that was reopened after a restart first
        waits until enough devices are on, as a new round does."""
        self._taken_up = self._taken_up and not self._parts.readiness.enough
        return not self._taken_up and not any(map(self._members.expected, names))

    def _abandon(self, opened: OpenRound) -> None:
        """Gives up a round whose devices are all revoked or quarantined; it is reopened for others."""
        self._rounds.abandon(opened)
        self._parts.spool.clear(keep=0)
        self._rounds.open = None

    def _take_up_again(self, error: FleetError) -> None:
        """Handles a damaged update in the spool: reopening the round drops the update and asks for it again."""
        if disk_errors.is_disk_error(error):
            raise error
        self._log(f"round {self.checkpoint.round + 1} is continued: {error}")
        self._rounds.open = None

    def _sum(self, opened: OpenRound) -> None:
        """In a round with masked updates: takes the next step towards their sum, or closes the round with or without
        it."""
        try:
            if self._parts.secure.go_on(opened):
                self._close(opened)
        except MessageError as error:
            self._close_uncounted(opened, f"not counted: {error}")

    def _close_uncounted(self, opened: OpenRound, reason: str) -> None:
        """Closes a round without using its updates; every device discards its own."""
        checkpoint = self._rule.closing_without(opened)
        opened.received.clear()
        self._end(opened, checkpoint, Screened(()), len(self._members.members()), uncounted=reason)

    def _close(self, opened: OpenRound) -> None:
        members = max(len(self._members.members()), len(opened.received))
        try:
            updates = self._updates(opened)
            checkpoint, screened = self._rule.closing(opened, updates, members)
        except (StateError, CodecError) as error:
            return self._take_up_again(error)
        self._end(opened, checkpoint, screened, members)

    def _updates(self, opened: OpenRound) -> Iterable[Update]:
        """The round's updates before screening. Raises MessageError or StateError if a secure sum cannot be computed.
        """
        if opened.secure is not None:
            return self._parts.secure.updates(opened)
        return self._parts.spool.updates(opened.number, opened.received)

    def _end(
        self, opened: OpenRound, checkpoint: Checkpoint, screened: Screened, members: int, *, uncounted: str = ""
    ) -> None:
        """Writes the closed round to the disk, then serves its model if that is due. uncounted: why its updates are not
        used, or empty."""
        self._parts.checkpoints.save(checkpoint)  # before the ledger: a crash in between leaves the round open
        with self.ledger.transaction():
            self._parts.receiver.record(opened, screened)
            self._parts.privacy.note(opened)
            self._members.took_part(opened.received, opened.model.model)
            self._rounds.close(opened, members, uncounted=uncounted)
            self._parts.codecs.close(opened, checkpoint.state)
            self._parts.arrays.close(opened, checkpoint.state)
        if uncounted:
            self._log(f"round {opened.number}: {uncounted}")
        self._rule.checkpoint, self._rounds.open = checkpoint, None
        self._looked_at = -math.inf
        self._rounds.say_stalled("")
        self._parts.receiver.end(opened.number, screened)
        self._parts.quarantine.after_round()
        self._parts.keep.after_round(opened.number)
        self._parts.served.serve_if_due(checkpoint)


def will(fleet: str, boot: str) -> Will:
    """The aggregator's last will."""
    return Will(topics.server(fleet), messages.encode(ServerPresence(st="off", boot=boot)))
