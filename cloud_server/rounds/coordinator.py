"""The aggregator: select → publish → collect until the deadline → apply, in one visible loop.

Closing a round is a pure function of the checkpoint, the ledger and the spool, so an aggregator that was killed goes on
where it was: the open round is opened again with the same cohort and model, and what was received is not asked twice.
``broadcast`` makes what is published, ``reception`` takes or refuses updates, ``roster`` knows the devices.

What cannot be written is raised out of ``step`` as StateError and ends this coordinator: see ``aggregator``.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable

from cloud_server.broker import requirements
from cloud_server.broker.publisher import Publisher
from cloud_server.broker.server_messages import ServerMessages
from cloud_server.identity.renewals import Renewals
from cloud_server.identity.token_enrolment import Enrolments
from cloud_server.identity.token_enrolment import waiting as invitations
from cloud_server.records import disk_errors
from cloud_server.records.checkpoint import Checkpoint, Checkpoints
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.ledger import Ledger, asked_at
from cloud_server.records.ledger_tables import Invitation
from cloud_server.records.spool import Spool
from cloud_server.reports.verdict import Watch
from cloud_server.rounds.broadcast import Broadcast
from cloud_server.rounds.members import Members, inability
from cloud_server.rounds.open_round import OpenRound, Rounds
from cloud_server.rounds.round_costs import RoundCosts
from cloud_server.rounds.server_rule import RuleState
from cloud_server.rounds.update_receiver import UpdateReceiver
from cloud_server.rounds.waiting import FirstWait, Places, Waiting
from fleet_core.base.errors import CodecError, FleetError, MessageError, StateError
from fleet_core.link.interface import Connected, Denied, Disconnected, Link, Message
from fleet_core.model import graph_bundle
from fleet_core.model.layout import MODEL_GROUPS
from fleet_core.protocol import cohort, messages, topics
from fleet_core.protocol.messages import (
    Alone,
    Down,
    Presence,
    RenewalRequest,
    Report,
    ServerPresence,
    UpdateRef,
    UploadManifest,
)

REQUESTS_S = 0.25
GRACE_S = 3.0
LOOK_S = 0.1  # between two looks over all devices


class Coordinator:
    """Drives one fleet over an open link. ``log`` receives one line at a time of what an operator may want to read.
    access_changed(): the broker has to read again who may do what."""

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
    ):
        self.fleet, self.link, self.ledger = fleet, link, ledger
        self.config, self.method, self.hyper = fleet.config, fleet.method, fleet.hyper
        self.name = fleet.config.fleet.name
        self.boot = boot or secrets.token_hex(8)
        self._clock, self._now, self._log = clock, now, log
        for remark in fleet.remarks():
            log(remark)
        self._messages = ServerMessages(self.name, link, fleet.signer(), self.boot, log)
        graph_data = fleet.graph_bytes()
        self.graph = graph_bundle.unpack(graph_data)
        self.layout = self.graph.layout
        self.wire = self.layout.extended(self.method.down, self.method.shared)
        size = self.layout.parameters(MODEL_GROUPS)
        self._checkpoints = Checkpoints(fleet.folder / "state", log)
        self._spool = Spool(fleet.folder / "spool", self.wire, self.method.shared)
        self._publisher = Publisher(self.name, link, fleet.folder / "state" / "published.json", clock=clock, log=log)
        self._costs = RoundCosts(ledger, now)
        self._watch = Watch(ledger, fleet.config.fleet.rounds, log)
        self._rounds = Rounds(ledger, self.method, now)
        self._receiver = UpdateReceiver(
            fleet, self.wire, self.layout.hash, ledger, self._spool, self._tell, current=lambda: self.open,
            closed=lambda: (self.checkpoint.round, self.checkpoint.state.dual_epoch),
            taken=lambda device, made: self._members.on_update(device, made.after, *self._state.history()),
            clock=clock, now=now, log=log,
        )
        self._broadcast = Broadcast(
            fleet, self.wire, self.layout.hash, graph_data, ledger, self._checkpoints, self._publisher,
            upload_limit=self._receiver.limit, next_seq=self._costs.next_seq, now=now,
        )
        self._members = Members(
            ledger, everyone=fleet.config.fleet.enrolment == "open",
            cannot=lambda presence: inability(presence, self.method, fleet.config.link, size), clock=clock, now=now,
            log=log,
        )
        self._enrolments = Enrolments(
            fleet, ledger, link, admit=lambda name: self._members.enroll(name, self.checkpoint.round),
            changed=access_changed, now=now, log=log,
        )
        self._renewals = Renewals(fleet, ledger, now=now, log=log)
        settings = fleet.config.fleet
        self._waiting = Waiting(self._members, self._rounds, settings.deadline_s, clock=clock, log=log)
        self._first_wait = FirstWait(
            self._members, settings.first_wait_s, invited=lambda: invitations(ledger), clock=clock, log=log
        )
        self._places = Places(self._members, self._rounds, settings.seed, settings.cohort, log=log)
        self._numbers, self._few, self._begun = "", 0, 0
        self._connected_at = clock()
        self._asked_at = self._looked_at = -math.inf
        self._idle: int | None = None
        self._taken_up = False  # the open round is of an earlier life, and its devices are not back yet
        self.broker_said = ""
        self.open: OpenRound | None = None
        self.paused = ledger.facts().get("paused") == "yes"
        self._state = RuleState(fleet, self.layout, ledger, self._checkpoints, self._members, log=log)
        self._broadcast.resume(self.checkpoint)

    # The loop ---------------------------------------------------------------------------------------------------------

    def step(self, timeout_s: float) -> bool:
        """Handles what arrived within ``timeout_s`` and what is due; True when anything happened."""
        events = self.link.poll(timeout_s)
        for event in events:
            match event:
                case Connected(max_packet_bytes=limit):
                    if self.broker_said:
                        self._log("broker: connected")
                    self._on_connected(limit)
                case Disconnected(reason):
                    said = requirements.explained(reason)
                    if said != self.broker_said:  # every attempt to connect fails alike
                        self._log(f"broker: {said}")
                    self.broker_said = said
                case Message(topic, payload):
                    self._guarded(topic, payload)
                case Denied(topic, reason):
                    self._log(f"broker: {topic} denied: {reason}")
        self._requests()
        self._receiver.tick()
        if self.link.connected:
            self._go_on()
        self._publisher.tick()
        return bool(events)

    def _go_on(self) -> None:
        """Closes and opens what is due. Offline nothing is: no update can come."""
        if self.open is not None and (_answered(self.open) or self._time_to_look()):
            self._close_if_due(self.open)
        if self.open is None and not self.paused and not self.finished and self._time_to_look():
            self._open_if_possible()
        if self.open is None and (self.paused or self.finished) and self._idle != self.checkpoint.round:
            self._idle = self.checkpoint.round
            self._broadcast.idle(self.checkpoint)

    def _time_to_look(self) -> bool:
        """Whether to look over all devices again; between two looks there is time for what they send."""
        if self._clock() - self._looked_at < LOOK_S:
            return False
        self._looked_at = self._clock()
        return True

    @property
    def checkpoint(self) -> Checkpoint:
        """After the last closed round."""
        return self._state.checkpoint

    @property
    def finished(self) -> bool:
        """All rounds are closed; the served model stays published."""
        return self.checkpoint.round >= self.config.fleet.rounds

    @property
    def stalled(self) -> str:
        """Why the open round does not end; empty while it goes on."""
        return self._rounds.stalled

    @property
    def settled(self) -> bool:
        """Nothing waits to be published."""
        return self._publisher.idle and self.link.unacknowledged == 0

    def close(self) -> None:
        """Leaves in order; the open round stays open in the ledger and goes on at the next start."""
        self._messages.announce("off")
        self.link.close()

    def _guarded(self, topic: str, payload: bytes) -> None:
        try:
            self._on_message(topic, payload)
        except FleetError as error:
            if disk_errors.is_of_the_disk(error):
                raise
            self._log(f"refused {topic}: {error}")

    # Start and restart ------------------------------------------------------------------------------------------------

    def _on_connected(self, limit_bytes: int | None) -> None:
        self.broker_said = ""
        requirements.check_packets(self.fleet, limit_bytes)
        self._connected_at = self._clock()
        self.link.subscribe(*topics.from_devices(self.name))
        self._messages.announce("on")
        self._publisher.reconnected()

    def _requests(self, *, now: bool = False) -> None:
        """What the command line asked for through the ledger."""
        if self._clock() - self._asked_at < REQUESTS_S and not now:
            return
        self._asked_at = self._clock()
        for key, value in sorted(self.ledger.asked().items(), key=lambda item: asked_at(item[1])):
            what, _, name = key.partition("/")
            if key == "paused":
                self.paused, self._idle = value == "yes", None
                self.ledger.set_facts(paused=value)
            elif what == "enroll":
                self._members.enroll(name, self.checkpoint.round)
            elif what == "invite":
                self._enrolments.invite(Invitation(**json.loads(value)))
            elif what == "revoke":
                self._revoke(name, asked_at(value) or self._now())
            else:
                continue
            self.ledger.settle(key, value)

    def _revoke(self, name: str, asked_at: float) -> None:
        """At once, so that a round does not wait for it; its dual is made up for before the next round."""
        self._members.revoke(name)
        if self._members.revoked(name):
            self._tell_revoked(name, self._members.boot(name))  # before the broker denies it everything
        self._enrolments.revoke(name, asked_at)
        self._receiver.drop(name)

    # Devices ----------------------------------------------------------------------------------------------------------

    def _on_message(self, topic: str, payload: bytes) -> None:
        address = topics.parse(self.name, topic)
        if address is None or not payload:
            return
        if address.kind == "en":
            self._requests(now=True)  # its token may have been made a moment ago
            return self._enrolments.on_request(address.key, payload)
        if not address.device:
            return self._publisher.heard(topic, payload)
        name = address.device
        if address.kind == "st":
            presence = messages.decode(Presence, payload)
            if self._members.revoked(name):
                self._requests(now=True)  # it may have been let in again a moment ago
            self._members.on_presence(name, presence, self.checkpoint.round)
            if presence.st == "off":
                self._receiver.drop(name)
            elif self._members.revoked(name):
                self._tell_revoked(name, presence.boot)
            elif not presence.beat:
                self._tell(name, Down("heard", self.checkpoint.round, boot=presence.boot))
            return
        if self._members.revoked(name):
            self._tell_revoked(name, self._members.boot(name))
        if not self._members.enrolled(name):
            raise MessageError("is not enrolled", where=name, hint="see 'metafleet devices enroll'")
        self._members.heard(name)
        round_number = topics.number(address.key) or 0
        if address.kind == "rep":
            self._on_report(name, messages.decode(Report, payload))
        elif address.kind == "up" and address.part == "m":
            self._waiting.offered(name)
            self._receiver.on_offer(name, round_number, messages.decode(UploadManifest, payload, limit=1 << 26))
        elif address.kind == "up":
            self._waiting.chunk_came(name)
            self._receiver.on_chunk(name, round_number, topics.number(address.part), payload)

    def _on_report(self, device: str, report: Report) -> None:
        if report.renew is not None:
            return self._renew(device, report.renew)
        opened, closed = self.open, self.checkpoint.round
        if report.round > closed + 1 or (report.evaluated_round or 0) > closed:
            raise MessageError(f"a report of round {report.round}, evaluated {report.evaluated_round}", where=device)
        size = len(self.layout.classes)
        if any(len(rows) != size for j in report.evaluations for rows in (j.confusion, *j.confusion)):
            raise MessageError("a confusion of another shape", where=device, expected=f"[{size}, {size}]")
        if report.alone is not None:
            _check_alone(report.alone, device, size)
        if report.failed:
            self._log(f"round {report.round}: {device}: {report.failed}")
        training = report.failed and report.evaluated_round is None
        if training and opened is not None and report.round == opened.number and device in opened.cohort:
            opened.failed[device] = report.failed
        if report.want == "full" and opened is not None:
            self._broadcast.whole(opened, self.checkpoint)
        if report.want == "chunks":
            self._publisher.again()
        if report.pending is not None:
            self._tell_fate(device, report.pending)
        self._costs.report(device, report)
        if report.alone is not None and report.evaluated_round is not None:
            self._watch.reported(device, report.evaluated_round, self._members.ready())

    def _renew(self, device: str, asked: RenewalRequest) -> None:
        """The device's next certificate, or why there is none."""
        try:
            answer = Down("renewed", 0, device=device, certificate=self._renewals.certificate(device, asked))
        except MessageError as error:
            answer = Down("renewed", 0, ok=False, device=device, reason=error.what[:500])
            self._log(f"{device} gets no new certificate: {error.what}")
        self._messages.attest(device, answer)

    def _tell_fate(self, device: str, pending: UpdateRef) -> None:
        """Whether an update of a closed round was counted; an open one is not decided yet."""
        if pending.round <= self.checkpoint.round:
            counted = self._receiver.was_counted(device, pending.round, pending.id)
            self._messages.attest(device, Down("counted", pending.round, pending.id, ok=counted, device=device))

    def _tell_revoked(self, device: str, boot: str) -> None:
        """Signed for one life of one device, so that nobody else can say it and nobody can say it again."""
        at = self._members.revoked_at(device)
        self._messages.attest(
            device, Down("revoked", self.checkpoint.round, device=device, boot=boot, seq=self._costs.seq, at=at)
        )

    def _tell(self, device: str, message: Down) -> None:
        if message.t == "need":
            self._waiting.granted(device)
        self._messages.tell(device, message)

    # Open a round -----------------------------------------------------------------------------------------------------

    def _open_if_possible(self) -> None:
        number = self.checkpoint.round + 1
        before = self._rounds.interrupted(number)
        if before is None and not self._enough_there():
            return self._say_few(number)
        if number == 1 and before is None and not self._first_wait.over():
            return
        state = self._state.opening(before)
        sent = self.method.server.broadcast(state)
        had = self._rounds.cohort(self.checkpoint.round)
        reference, made = self._broadcast.model(
            sent.groups, self.checkpoint, number, lambda base: self._members.someone_lacks(base, besides=had)
        )
        chosen = before.cohort if before else tuple(
            cohort.select(self.config.fleet.seed, number, self._members.ready(), self.config.fleet.cohort)
        )
        started = before.opened_at if before else self._now()
        self.open = OpenRound(
            number, chosen, started, self._clock() + self.config.fleet.deadline_s, reference, made.decoded, made.lost,
            sent.scalars, self._broadcast.per_device(state, chosen),
        )
        if not before:
            self._rounds.begin(self.open, len(self._members.members()))
            self._say_numbers(number)
        self._idle, self._taken_up, self._begun = None, before is not None and self._begun != number, number
        self._waiting.begin()
        self._receiver.begin(self.open)
        self._broadcast.round(self.open, self.checkpoint)

    def _say_numbers(self, number: int) -> None:
        """How many devices are on, where that has changed since the last round."""
        numbers = self._members.numbers()
        if numbers != self._numbers:
            self._numbers = numbers
            self._log(f"round {number} begins: {numbers}")

    def _say_few(self, number: int) -> None:
        """Once in a round: for how many devices it waits."""
        least = self.config.fleet.min_devices
        if self._few != number and self._late() and len(self._members.ready()) < least:
            self._few = number
            wanted = "a device is" if least == 1 else f"{least} devices are"
            self._log(f"round {number} begins when {wanted} on and can train (min_devices in fleet.toml): "
                      f"{self._members.numbers()}")

    def _late(self) -> bool:
        """Whether devices that were on before this aggregator connected have had time to be heard."""
        return self._clock() - self._connected_at > GRACE_S

    def _enough_there(self) -> bool:
        """Enough devices to begin, and those that were on before this aggregator started have had time to be heard."""
        there = len(self._members.ready()) >= self.config.fleet.min_devices
        return there and (self._late() or not self._members.awaited())

    # Close a round ----------------------------------------------------------------------------------------------------

    def _close_if_due(self, opened: OpenRound) -> None:
        asked = [name for name in opened.cohort if self._members.enrolled(name)]
        open_ones = [name for name in asked if name not in opened.received and name not in opened.failed]
        wanted = max(1, math.ceil(self.config.fleet.quorum * len(asked)))
        due = self._clock() > opened.deadline
        over = due or not open_ones or self._all_gone(open_ones)
        if len(opened.received) >= wanted and over:
            return self._close(opened)
        if not asked:
            return self._abandon(opened)
        if over and not self.paused and self._places.pass_on(opened, due=due):
            self.open = None  # opened again with its new cohort, and with what was received
        elif due and self._waiting.at_deadline(opened, wanted, open_ones):
            opened.failed.clear()
            self._broadcast.round(opened, self.checkpoint)
        elif not due and not open_ones:
            self._waiting.all_answered(opened, wanted)

    def _all_gone(self, names: list[str]) -> bool:
        """Whether none of these delivers any more. A round of an earlier life is given what a new one is given: its
        devices may be starting as this aggregator is."""
        self._taken_up = self._taken_up and not self._enough_there()
        return not self._taken_up and not any(map(self._members.expected, names))

    def _abandon(self, opened: OpenRound) -> None:
        """Everybody who was asked has been revoked: the round is opened again for others."""
        self._rounds.abandon(opened)
        self._spool.clear(keep=0)
        self.open = None

    def _take_up_again(self, error: FleetError) -> None:
        """An update in the spool is not as it was received: opening the round again drops it and asks for it."""
        if disk_errors.is_of_the_disk(error):
            raise error
        self._log(f"round {self.checkpoint.round + 1} is taken up again: {error}")
        self.open = None

    def _close(self, opened: OpenRound) -> None:
        members = max(len(self._members.members()), len(opened.received))
        updates = self._spool.updates(opened.number, opened.received)
        try:
            checkpoint = self._state.closing(opened, updates, members)
        except (StateError, CodecError) as error:
            return self._take_up_again(error)
        self._checkpoints.save(checkpoint)  # before the ledger says so: a crash between leaves the round open
        with self.ledger.transaction():
            self._receiver.book(opened)
            self._members.took_part(opened.received)
            self._rounds.close(opened, members)
        self._state.checkpoint, self.open = checkpoint, None
        self._looked_at = -math.inf
        self._rounds.say_stalled("")
        self._receiver.end()
        self._broadcast.serve_if_due(checkpoint)


def _answered(opened: OpenRound) -> bool:
    """Whether everybody delivered or failed."""
    return len(opened.received) + len(opened.failed) >= len(opened.cohort)


def _check_alone(alone: Alone, device: str, size: int) -> None:
    """Raises MessageError. size: classes."""
    if alone.frequent >= size:
        raise MessageError(f"a most frequent class {alone.frequent}", where=device, expected=f"below {size}")
    if alone.confusion and any(len(rows) != size for rows in (alone.confusion, *alone.confusion)):
        raise MessageError("a confusion of another shape", where=device, expected=f"[{size}, {size}]")


def will(fleet: str, boot: str) -> tuple[str, bytes]:
    """Topic and payload of the aggregator's last will."""
    return topics.server(fleet), messages.encode(ServerPresence(st="off", boot=boot))
