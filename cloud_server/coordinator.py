"""The aggregator: select → publish → collect until the deadline → apply, in one visible loop.

Closing a round is a pure function of the checkpoint, the ledger and the spool, so an aggregator that was killed goes on
where it was: the open round is opened again with the same cohort and model, and what was received is not asked twice.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cloud_server.books import Books
from cloud_server.checkpoint import Checkpoint, Checkpoints
from cloud_server.fleet import Fleet
from cloud_server.intake import Intake
from cloud_server.ledger import Ledger, Round, Update
from cloud_server.publisher import Publisher
from cloud_server.roster import Roster
from cloud_server.spool import Spool, widened
from fleet_core import __version__, bundle, codecs, cohort, messages, schema, topics
from fleet_core.algorithms import trees
from fleet_core.algorithms.seam import ServerState
from fleet_core.algorithms.trees import Params
from fleet_core.errors import FleetError, LinkError, MessageError
from fleet_core.link.base import Connected, Denied, Disconnected, Link, Message
from fleet_core.messages import (
    Blob,
    Counted,
    Down,
    Manifest,
    MethodRef,
    ModelRef,
    PendingRef,
    Presence,
    Report,
    ServerPresence,
    UploadManifest,
    UploadRules,
)

EXPIRY_MS = 30 * 24 * 3600 * 1000
COUNTED_ROUNDS = 4
LISTED_IDS = 200
REQUESTS_S = 0.25
GRACE_S = 3.0
REFUSALS_NOTED = 8


@dataclass
class OpenRound:
    """The round that is being collected. failed: device -> why it will not deliver."""

    number: int
    cohort: tuple[str, ...]
    opened_at: float
    began: float
    deadline: float
    model: ModelRef
    received: dict[str, UploadManifest] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Coordinator:
    """Drives one fleet over an open link. ``log`` receives one line at a time of what an operator may want to read."""

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
    ):
        self.fleet, self.link, self.ledger = fleet, link, ledger
        self.config, self.method, self.hyper = fleet.config, fleet.method, fleet.hyper
        self.name = fleet.config.fleet.name
        self.boot = boot or secrets.token_hex(8)
        self._clock, self._now, self._log = clock, now, log
        self._signer = fleet.signer()
        self._graph_data = fleet.graph_bytes()
        self.graph = bundle.unpack(self._graph_data)
        self.layout = self.graph.layout
        self._checkpoints = Checkpoints(fleet.folder / "state")
        self._spool = Spool(fleet.folder / "spool", self.layout, self.method.shared)
        self._publisher = Publisher(self.name, link, fleet.folder / "state" / "published.json")
        self._intake = Intake(self._tell, clock, self._upload_limit())
        self._books = Books(ledger, now)
        self._roster = Roster(
            ledger, everyone=fleet.config.fleet.enrolment == "open", cannot=self._cannot, clock=clock, now=now, log=log
        )
        self._connected_at = clock()
        self._asked_at = -math.inf
        self._idle: int | None = None
        self.open: OpenRound | None = None
        self.paused = ledger.facts().get("paused") == "yes"
        self.stalled = ledger.facts().get("stalled", "")
        self.checkpoint = self._resume()
        self._publishing = self.checkpoint
        self._serve = self._served()

    # The loop ---------------------------------------------------------------------------------------------------------

    def step(self, timeout_s: float) -> bool:
        """Handles what arrived within ``timeout_s`` and what is due; True when anything happened."""
        events = self.link.poll(timeout_s)
        for event in events:
            match event:
                case Connected():
                    self._on_connected()
                case Disconnected(reason):
                    self._log(f"broker: {reason}")
                case Message(topic, payload):
                    self._guarded(topic, payload)
                case Denied(topic, reason):
                    self._log(f"broker: {topic} denied: {reason}")
        self._requests()
        self._intake.tick()
        if self.link.connected:
            self._go_on()
        self._publisher.tick()
        return bool(events)

    def _go_on(self) -> None:
        """Closes and opens what is due. Offline nothing is: no update can come."""
        if self.open is not None:
            self._close_if_due(self.open)
        if self.open is None and not self.paused and not self.finished:
            self._open_if_possible()
        if self.open is None and (self.paused or self.finished) and self._idle != self.checkpoint.round:
            self._publish_idle()

    @property
    def finished(self) -> bool:
        """All rounds are closed; the judged model stays published."""
        return self.checkpoint.round >= self.config.fleet.rounds

    @property
    def settled(self) -> bool:
        """Nothing waits to be published."""
        return self._publisher.idle and self.link.unacknowledged == 0

    def close(self) -> None:
        """Leaves in order; the open round stays open in the ledger and goes on at the next start."""
        self._announce("off")
        self.link.close()

    def _guarded(self, topic: str, payload: bytes) -> None:
        try:
            self._on_message(topic, payload)
        except FleetError as error:
            self._log(f"refused {topic}: {error}")

    # Start and restart ------------------------------------------------------------------------------------------------

    def _resume(self) -> Checkpoint:
        first = self.layout.ordered(self.fleet.weights(self.graph))
        closed = self.ledger.rounds("closed")
        number = closed[-1].round if closed else 0
        if closed or self._checkpoints.exists(0):
            return self._checkpoints.load(number, first)
        state = self.method.server.init(widened(first), self.hyper)
        return Checkpoint(0, state, facts={"members": "0", "leaves": "0", "epoch_start": "1"})

    def _served(self) -> ModelRef | None:
        """The judged model that an earlier life of this aggregator had published, or was about to."""
        closed, kept = self.checkpoint.round, self._checkpoints.served()
        if closed and self._serves_after(closed) and (kept is None or kept[0] < closed):
            return self._judged_model(closed)
        return None if kept is None or kept[0] > closed else self._serve_reference(*kept)

    def _on_connected(self) -> None:
        self._connected_at = self._clock()
        self.link.subscribe(*topics.from_devices(self.name))
        self._announce("on")
        self._publisher.reconnected()

    def _announce(self, state: str) -> None:
        presence = ServerPresence(st=state, boot=self.boot, ver=__version__)
        self._send(topics.server(self.name), messages.encode(presence), retain=True)

    def _requests(self) -> None:
        """What the command line asked for through the ledger."""
        if self._clock() - self._asked_at < REQUESTS_S:
            return
        self._asked_at = self._clock()
        for key, value in self.ledger.asked().items():
            what, _, name = key.partition("/")
            if key == "paused":
                self.paused, self._idle = value == "yes", None
                self.ledger.set_facts(paused=value)
            elif what == "enroll":
                self._roster.enroll(name, *self._history())
            elif what == "revoke":
                self._revoke(name)
            else:
                continue
            self.ledger.settle(key, value)

    def _revoke(self, name: str) -> None:
        """At once, so that a round does not wait for it; its dual is made up for before the next round."""
        self._roster.revoke(name)
        self._intake.drop(name)

    def _history(self) -> tuple[int, int]:
        """(last closed round, first round of the present duals)."""
        return self.checkpoint.round, int(self.checkpoint.facts["epoch_start"])

    # Devices ----------------------------------------------------------------------------------------------------------

    def _on_message(self, topic: str, payload: bytes) -> None:
        address = topics.parse(self.name, topic)
        if address is None or not address.device or not payload:
            return
        name = address.device
        if address.kind == "st":
            presence = messages.decode(Presence, payload)
            self._roster.on_presence(name, presence, *self._history())
            return self._intake.drop(name) if presence.st == "off" else None
        if not self._roster.enrolled(name):
            raise MessageError("is not enrolled", where=name, hint="see 'metafleet devices enroll'")
        self._roster.heard(name)
        round_number = topics.number(address.key) or 0
        if address.kind == "rep":
            self._on_report(name, messages.decode(Report, payload))
        elif address.kind == "up" and address.part == "m":
            self._on_offer(name, round_number, messages.decode(UploadManifest, payload, limit=1 << 26))
        elif address.kind == "up":
            self._on_chunk(name, round_number, topics.number(address.part), payload)

    def _cannot(self, presence: Presence) -> str | None:
        """Why a device cannot take part in this fleet's rounds, or None."""
        if presence.proto != messages.PROTOCOL:
            return f"speaks protocol {presence.proto}, this is {messages.PROTOCOL}"
        if not presence.train:
            return "does not train"
        if presence.methods.get(self.method.name) != self.method.version:
            return f"lacks {self.method.name} version {self.method.version}"
        if self.config.link.up not in presence.codecs or self.config.link.down not in presence.codecs:
            return f"lacks codec {self.config.link.up} or {self.config.link.down}"
        return None

    # Open a round -----------------------------------------------------------------------------------------------------

    def _open_if_possible(self) -> None:
        number = self.checkpoint.round + 1
        before = next(iter(self.ledger.rows(Round, round=number, status="open")), None)
        if before is None and not self._enough_there():
            return
        state = self._reconciled(leaving=before is None)
        reference, published, lost = self._publish_model(state, number)
        self._publishing = replace(self.checkpoint, published=published, lost=lost)
        chosen = before.cohort if before else tuple(
            cohort.select(self.config.fleet.seed, number, self._roster.ready(), self.config.fleet.cohort)
        )
        started = before.opened_at if before else self._now()
        begun = self._clock()
        self.open = OpenRound(number, chosen, started, begun, begun + self.config.fleet.deadline_s, reference)
        if not before:
            members = len(self._roster.members())
            self.ledger.put(
                Round(round=number, opened_at=started, cohort=chosen, members=members, model_id=reference.model)
            )
        self._idle = None
        self._intake.clear()
        self._take_back(self.open)
        self._announce_round(self.open)

    def _enough_there(self) -> bool:
        """Enough devices to begin, and those that were on before this aggregator started have had time to be heard."""
        late = self._clock() - self._connected_at > GRACE_S
        return len(self._roster.ready()) >= self.config.fleet.min_devices and (late or not self._roster.awaited())

    def _take_back(self, opened: OpenRound) -> None:
        """Updates that an earlier life of this aggregator had received; what is not as it was is asked for again."""
        self._spool.clear(keep=opened.number)
        for device, manifest in self._spool.manifests(opened.number).items():
            try:
                reason = self._refusal(device, opened.number, manifest)
                if not reason:
                    self._spool.read(opened.number, device, manifest)
            except FleetError as error:
                reason = str(error)
            if reason:
                self._log(f"round {opened.number}: the kept update of {device} is dropped: {reason}")
                self._spool.drop(opened.number, device)
            else:
                opened.received[device] = manifest

    def _reconciled(self, *, leaving: bool) -> ServerState:
        """The checkpoint's state after the joins (and, when a round is opened, the leaves) since it was made.

        A leave during a round waits for the next one, also when the round is opened again after a restart, so that an
        interrupted run computes what an undisturbed one does.
        """
        state, rule, facts = self.checkpoint.state, self.method.server, self.checkpoint.facts
        members, before = len(self._roster.members()), int(facts["members"])
        if leaving and self._roster.leaves > int(facts["leaves"]):
            state = rule.left(state, members)
            facts = {**facts, "members": str(members), "leaves": str(self._roster.leaves)}
            if state.dual_epoch != self.checkpoint.state.dual_epoch:
                facts["epoch_start"] = str(self.checkpoint.round + 1)
            self.checkpoint = replace(self.checkpoint, state=state, facts=facts)
            self._checkpoints.save(self.checkpoint)
            return state
        for count in range((before or members) + 1, members + 1):
            state = rule.joined(state, count)
        return state

    def _publish_model(self, state: ServerState, number: int) -> tuple[ModelRef, Params, Params | None]:
        """(reference, decoded weights, what was lost): a delta to what devices hold, or the whole at the start."""
        held, name = self.checkpoint.published, self.config.link.down
        target = state.model if self.checkpoint.lost is None else trees.add(state.model, self.checkpoint.lost)
        if held is None:
            data = codecs.encode("fp32", target)
            decoded: Params = codecs.decode("fp32", data, self.layout, self.method.shared)
            model = codecs.identity(decoded)
            return ModelRef(model, self._blob(data), "fp32", round=number), decoded, None
        data = codecs.encode(name, trees.subtract(target, widened(held)))
        decoded = codecs.moved(held, codecs.decode(name, data, self.layout, self.method.shared))
        lost = trees.subtract(target, widened(decoded)) if codecs.codec(name).feedback else None
        base, model = codecs.identity(held), codecs.identity(decoded)
        full = self._full_blob(decoded) if self._someone_lacks(base) else None
        return ModelRef(model, self._blob(data), name, base=base, full=full, round=number), decoded, lost

    def _someone_lacks(self, model: str) -> bool:
        """Whether a device that may be asked is not known to hold ``model``."""
        previous = self.ledger.rows(Round, round=self.checkpoint.round)
        had = set(previous[0].cohort) if previous else set()
        return any(name not in had and not self._roster.holds(name, model) for name in self._roster.ready())

    def _full_blob(self, decoded: Params) -> Blob:
        return self._blob(codecs.encode("fp32", decoded))

    def _blob(self, data: bytes) -> Blob:
        return self._publisher.blob(Blob.of(data, self.config.link.chunk_bytes), data)

    def _announce_round(self, opened: OpenRound) -> None:
        chosen = cohort.announce(self.config.fleet.seed, opened.number, list(opened.cohort))
        self._publish_manifest(opened.number, chosen, opened.model, True)

    def _publish_manifest(self, number: int, chosen: messages.Cohort, model: ModelRef, is_open: bool) -> None:
        state = self.checkpoint.state
        graph = self._blob(self._graph_data)
        manifest = Manifest(
            v=messages.PROTOCOL,
            fleet=self.name,
            round=number,
            seq=self._books.next_seq(),
            exp=int(self._now() * 1000) + EXPIRY_MS,
            deadline_s=self.config.fleet.deadline_s,
            method=MethodRef(self.method.name, self.method.version, schema.plain(self.hyper)),
            cohort=chosen,
            model=model,
            graph=graph,
            serve=self._serve,
            layout=self.layout.hash,
            scalars={"round": float(number), "seed": float(self.config.fleet.seed)},
            dual_epoch=state.dual_epoch,
            counted=self._counted(),
            up=UploadRules(self._upload_limit(), self.config.link.chunk_bytes, (self.config.link.up,)),
            open=is_open,
        )
        keep = {blob.id for blob in manifest.blobs()}
        self._publisher.manifest(self._signer.sign(messages.encode(manifest)), keep)

    def _counted(self) -> tuple[Counted, ...]:
        """Which updates the last closed rounds counted; older ones are answered when a device asks."""
        records = []
        closed = self.checkpoint.round
        for number in range(max(1, closed - COUNTED_ROUNDS + 1), closed + 1):
            ids = tuple(u.update_id for u in self.ledger.rows(Update, round=number, status="counted"))
            if len(ids) <= LISTED_IDS:
                records.append(Counted(number, ids=ids))
            else:
                records.append(Counted(number, blob=self._blob("\n".join(ids).encode())))
        return tuple(records)

    # Collect ----------------------------------------------------------------------------------------------------------

    def _on_offer(self, device: str, number: int, manifest: UploadManifest) -> None:
        opened = self.open
        if opened is not None and number == opened.number and device in opened.received:
            same = opened.received[device].id == manifest.id
            return self._tell(device, Down("done" if same else "reject", number, manifest.id, ok=same,
                                           reason="" if same else "another update of this round is here already"))
        if self._was_counted(device, number, manifest.id):
            return self._tell(device, Down("done", number, manifest.id))  # the first one was lost
        reason = self._refusal(device, number, manifest)
        if not reason:
            try:
                return self._intake.offer(device, number, manifest)
            except MessageError as error:
                reason = str(error)
        self._refuse(device, number, manifest, reason)

    def _was_counted(self, device: str, number: int, update_id: str) -> bool:
        return number <= self.checkpoint.round and bool(
            self.ledger.rows(Update, round=number, device=device, update_id=update_id, status="counted")
        )

    def _refusal(self, device: str, number: int, manifest: UploadManifest) -> str:
        """Why an offer is not taken, or an empty text."""
        opened = self.open
        if opened is None or number != opened.number:
            return "the round is closed"
        if device not in opened.cohort:
            return "not in this round's cohort"
        checks = {
            "method": (manifest.method, self.method.name),
            "layout": (manifest.layout, self.layout.hash),
            "dual epoch": (manifest.dual_epoch, self.checkpoint.state.dual_epoch),
            "base model": (manifest.base, opened.model.model),
            "codec": (manifest.codec, self.config.link.up),
        }
        wrong = [f"{what} {got}, expected {wanted}" for what, (got, wanted) in checks.items() if got != wanted]
        return "; ".join(wrong)

    def _refuse(self, device: str, number: int, manifest: UploadManifest, reason: str) -> None:
        opened = self.open
        late = opened is None or number != opened.number
        noted = self.ledger.rows(Update, round=number, device=device)
        new = all(row.update_id != manifest.id for row in noted)
        if new and len(noted) < REFUSALS_NOTED and self.ledger.rows(Round, round=number):
            self.ledger.put(self._row(number, device, manifest, "late" if late else "refused", reason))
        if opened is not None and not late and device in opened.cohort:
            opened.failed[device] = reason
        self._log(f"round {number}: {device}: update refused: {reason}")
        self._tell(device, Down("reject", number, manifest.id, ok=False, reason=reason[:500]))

    def _row(self, number: int, device: str, manifest: UploadManifest, status: str, reason: str = "") -> Update:
        return Update(
            round=number, device=device, update_id=manifest.id, received_at=self._now(), samples=manifest.samples,
            loss=manifest.metrics.get("loss"), payload_bytes=manifest.blob.size, chunks=manifest.blob.n, status=status,
            reason=reason,
        )

    def _on_chunk(self, device: str, number: int, k: int | None, payload: bytes) -> None:
        whole = None if k is None else self._intake.chunk(device, number, k, payload)
        opened = self.open
        if whole is None or opened is None:
            return
        manifest, inbox = whole
        try:
            data = inbox.take()
            self._verify(manifest, data)
        except FleetError as error:
            return self._refuse(device, number, manifest, str(error))
        self._spool.put(number, device, manifest, data)
        opened.received[device] = manifest
        opened.failed.pop(device, None)
        self._tell(device, Down("done", number, manifest.id))

    def _verify(self, manifest: UploadManifest, data: bytes) -> None:
        """Raises CodecError for arrays of another layout, values that are not finite and norms over the bound."""
        params = codecs.decode(manifest.codec, data, self.layout, self.method.shared)
        length, bound = trees.norm(widened(params)), self.config.link.max_update_norm
        if not math.isfinite(length) or length > bound:
            raise MessageError(f"an update of norm {length:.3g}", expected=f"at most {bound:g}")

    def _on_report(self, device: str, report: Report) -> None:
        opened, closed = self.open, self.checkpoint.round
        if report.round > closed + 1 or (report.judged_round or 0) > closed:
            raise MessageError(f"a report of round {report.round}, judged {report.judged_round}", where=device)
        size = len(self.layout.classes)
        if any(len(rows) != size for j in report.judgements for rows in (j.confusion, *j.confusion)):
            raise MessageError("a confusion of another shape", where=device, expected=f"[{size}, {size}]")
        if report.failed:
            self._log(f"round {report.round}: {device}: {report.failed}")
        training = report.failed and report.judged_round is None
        if training and opened is not None and report.round == opened.number and device in opened.cohort:
            opened.failed[device] = report.failed
        if report.want == "full":
            self._publish_whole()
        if report.pending is not None:
            self._tell_fate(device, report.pending)
        self._books.report(device, report)

    def _tell_fate(self, device: str, pending: PendingRef) -> None:
        """A signed record of whether an update of a closed round was counted; an open one is not decided yet."""
        if pending.round <= self.checkpoint.round:
            counted = self._was_counted(device, pending.round, pending.id)
            fate = Down("counted", pending.round, pending.id, ok=counted, device=device)
            self._send(topics.down(self.name, device), self._signer.sign(messages.encode(fate)))

    def _publish_whole(self) -> None:
        """A device lacks the base of the round's delta: the same model whole, and the manifest that names it."""
        opened = self.open
        if opened is not None and opened.model.base is not None and opened.model.full is None:
            opened.model = replace(opened.model, full=self._full_blob(self._publishing.published or {}))
            self._announce_round(opened)

    def _upload_limit(self) -> int:
        """Bytes of the largest update that can be one: every value at four bytes, and room for names."""
        return 2 * 4 * self.layout.parameters(self.method.shared) + (1 << 16)

    def _tell(self, device: str, message: Down) -> None:
        self._send(topics.down(self.name, device), messages.encode(message))

    def _send(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """What is lost when the link is down or full: the protocol asks again."""
        if self.link.connected:
            try:
                self.link.publish(topic, payload, retain=retain)
            except LinkError as error:
                self._log(f"not sent: {error}")

    # Close a round ----------------------------------------------------------------------------------------------------

    def _close_if_due(self, opened: OpenRound) -> None:
        asked = [name for name in opened.cohort if self._roster.enrolled(name)]
        open_ones = [name for name in asked if name not in opened.received and name not in opened.failed]
        wanted = max(1, math.ceil(self.config.fleet.quorum * len(asked)))
        due = self._clock() > opened.deadline
        if len(opened.received) >= wanted and (due or not any(map(self._roster.alive, open_ones))):
            return self._close(opened)
        if not asked:
            return self._abandon(opened)
        if not open_ones:
            return self._stall(opened, wanted)
        if due:
            self._log(f"round {opened.number}: {len(opened.received)} of {wanted} updates at the deadline, waiting on")
            opened.deadline = self._clock() + self.config.fleet.deadline_s
            if self.stalled:
                self._announce_round(opened)  # anew, so that devices that failed try again

    def _stall(self, opened: OpenRound, wanted: int) -> None:
        """Too many devices failed: said here and in the ledger, and asked again at the deadline; nothing ends."""
        reasons = "; ".join(f"{name}: {why}" for name, why in sorted(opened.failed.items())[:10])
        text = f"round {opened.number}: {len(opened.received)} of {wanted} devices delivered ({reasons})"
        self._log(f"{text}; they are asked again in {self.config.fleet.deadline_s:g} s")
        self._say_stalled(" ".join(text.split()))
        opened.failed.clear()
        opened.deadline = self._clock() + self.config.fleet.deadline_s

    def _say_stalled(self, text: str) -> None:
        """Why the open round does not end, for ``server status`` and those who watch; empty once it goes on."""
        if text != self.stalled:
            self.stalled = text
            self.ledger.set_facts(stalled=text)

    def _abandon(self, opened: OpenRound) -> None:
        """Everybody who was asked has been revoked: the round is opened again for others."""
        row = self.ledger.rows(Round, round=opened.number)[0]
        self.ledger.put(replace(row, status="abandoned", note="every device of the cohort was revoked"))
        self._spool.clear(keep=0)
        self.open = None

    def _close(self, opened: OpenRound) -> None:
        state = replace(self._reconciled(leaving=False), model=widened(self._publishing.published or {}))
        members = max(len(self._roster.members()), len(opened.received))
        updates = self._spool.updates(opened.number, opened.received)
        state = self.method.server.apply(state, updates, members, self.hyper)
        facts = {**self.checkpoint.facts, "members": str(members)}
        checkpoint = Checkpoint(opened.number, state, self._publishing.published, self._publishing.lost, facts)
        self._checkpoints.save(checkpoint)  # before the ledger says so: a crash between leaves the round open
        with self.ledger.transaction():
            self._book_round(opened, members)
        self.checkpoint, self.open = checkpoint, None
        self._say_stalled("")
        for device, number, manifest in self._intake.clear():
            self._refuse(device, number, manifest, "the round is closed")
        self._serve_if_due(opened.number)

    def _book_round(self, opened: OpenRound, members: int) -> None:
        for device, manifest in opened.received.items():
            self.ledger.put(self._row(opened.number, device, manifest, "counted"))
        self._roster.took_part(opened.received)
        losses = [m.metrics["loss"] for m in opened.received.values() if "loss" in m.metrics]
        row = self.ledger.rows(Round, round=opened.number)[0]
        self.ledger.put(replace(
            row, status="closed", closed_at=self._now(), members=members, seconds=self._now() - row.opened_at,
            loss=sum(losses) / len(losses) if losses else None,
            models_transmitted=float(len(opened.received) * (self.method.models_down + self.method.models_up)),
            note="; ".join(f"{name}: {why}" for name, why in sorted(opened.failed.items())),
        ))

    def _serves_after(self, number: int) -> bool:
        return number % self.config.fleet.serve_every == 0 or number >= self.config.fleet.rounds

    def _serve_if_due(self, number: int) -> None:
        if self._serves_after(number):
            self._serve = self._judged_model(number)

    def _judged_model(self, number: int) -> ModelRef:
        """The judged model of the last closed round, from now on the served one; kept for a restart."""
        decoded = trees.apply(lambda a: a.astype("float32"), self.checkpoint.state.judged)
        self._checkpoints.save_served(number, decoded)
        reference = self._serve_reference(number, decoded)
        row = self.ledger.rows(Round, round=number)[0]
        self.ledger.put(replace(row, judged_id=reference.model))
        return reference

    def _serve_reference(self, number: int, params: Params) -> ModelRef:
        """Whole and in full precision: it is what answers."""
        ordered = self.layout.ordered(params)
        return ModelRef(codecs.identity(ordered), self._blob(codecs.encode("fp32", ordered)), "fp32", round=number)

    def _publish_idle(self) -> None:
        """While nobody is asked to train: what was counted, and the judged model."""
        number = self.checkpoint.round
        self._idle = number
        if number:
            self._serve = self._serve or self._judged_model(number)
            self._publish_manifest(number, messages.Cohort(devices=()), self._serve, False)


def will(fleet: str, boot: str) -> tuple[str, bytes]:
    """Topic and payload of the aggregator's last will."""
    return topics.server(fleet), messages.encode(ServerPresence(st="off", boot=boot))


