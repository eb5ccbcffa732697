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
from cloud_server.ledger import Device, Ledger, Round, Update
from cloud_server.publisher import Publisher
from cloud_server.spool import Spool, widened
from fleet_core import __version__, bundle, codecs, cohort, messages, schema, topics
from fleet_core.algorithms import trees
from fleet_core.algorithms.seam import ServerState
from fleet_core.algorithms.trees import Params
from fleet_core.errors import FleetError, MessageError, RoundError
from fleet_core.link.base import Connected, Disconnected, Link, Message
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

SILENT_S = 5.0
WORKING = ("train", "upload")
EXPIRY_MS = 30 * 24 * 3600 * 1000
COUNTED_ROUNDS = 4
LISTED_IDS = 200


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
        self._publisher = Publisher(self.name, link)
        self._intake = Intake(self._tell, clock, self._upload_limit())
        self._books = Books(ledger, now)
        self._heard: dict[str, float] = {}
        self._phase: dict[str, str] = {}
        self._presences: dict[str, Presence] = {}
        self._serve: ModelRef | None = None
        self._lost_state: set[str] = set()
        self.open: OpenRound | None = None
        self.paused = False
        self.checkpoint = self._resume()
        self._publishing = self.checkpoint

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
        self._requests()
        self._intake.tick()
        if self.open is not None:
            self._close_if_due(self.open)
        if self.open is None and not self.paused and not self.finished:
            self._open_if_possible()
        self._publisher.tick()
        return bool(events)

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
        if self.link.connected:
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
        if not closed:
            state = self.method.server.init(widened(first), self.hyper)
            return Checkpoint(0, state, facts={"members": "0", "epoch_start": "1"})
        return self._checkpoints.load(closed[-1].round, first)

    def _on_connected(self) -> None:
        self.link.subscribe(*topics.from_devices(self.name))
        self._announce("on")
        self._publisher.reconnected()
        if self.open is None and (self.finished or self.paused):
            self._publish_idle()

    def _announce(self, state: str) -> None:
        presence = ServerPresence(st=state, boot=self.boot, ver=__version__)
        self.link.publish(topics.server(self.name), messages.encode(presence), retain=True)

    def _requests(self) -> None:
        """What the command line asked for through the ledger; who leaves is handled between rounds."""
        for key, value in self.ledger.asked().items():
            if key == "paused":
                self.paused = value == "yes"
            elif key.startswith("enroll/"):
                self._enroll(key.partition("/")[2])
            elif key.startswith("revoke/") and self.open is None:
                self._revoke(key.partition("/")[2])
            else:
                continue
            self.ledger.settle(key, value)

    # Devices ----------------------------------------------------------------------------------------------------------

    def _on_message(self, topic: str, payload: bytes) -> None:
        address = topics.parse(self.name, topic)
        if address is None or not address.device:
            return
        device = self.ledger.device(address.device) if address.kind == "st" else None
        if address.kind == "st":
            if payload:
                self._on_presence(address.device, device, messages.decode(Presence, payload))
            return
        if not self._enrolled(address.device):
            raise MessageError("is not enrolled", where=address.device, hint="see 'metafleet devices enroll'")
        self._heard[address.device] = self._clock()
        round_number = topics.number(address.key) or 0
        if address.kind == "rep":
            self._on_report(address.device, messages.decode(Report, payload))
        elif address.kind == "up" and address.part == "m":
            self._on_offer(address.device, round_number, messages.decode(UploadManifest, payload, limit=1 << 26))
        elif address.kind == "up":
            self._on_chunk(address.device, round_number, topics.number(address.part), payload)

    def _enrolled(self, name: str) -> bool:
        return name in self._presences

    def _on_presence(self, name: str, known: Device | None, presence: Presence) -> None:
        self._heard[name] = self._clock()
        self._phase[name] = presence.ph
        if presence.beat:
            return
        if known is None and self.config.fleet.enrolment == "open":
            known = self._enroll(name, trains=presence.train)
        if known is None or known.status == "revoked":
            self._log(f"{name} is not enrolled: ignored (metafleet devices enroll {name})")
            return
        if known.capabilities.get("boot") not in (None, presence.boot) and presence.st == "on":
            self._check_state(name, presence)
        if presence.st == "off" and presence.boot != known.capabilities.get("boot", presence.boot):
            return  # the will of an earlier life
        self._presences[name] = presence
        known = replace(known, state=presence.st, phase=presence.ph, last_seen=self._now())
        if presence.st == "on":
            known = replace(
                known, version=presence.ver, cannot=self._cannot(presence), capabilities=schema.plain(presence),
                new=not presence.train,
            )
        self.ledger.put(known)

    def _check_state(self, name: str, presence: Presence) -> None:
        """A device that came back with less training state than was counted of it has lost its dual."""
        counted = [u.round for u in self.ledger.rows(Update, device=name, status="counted")]
        last = max(counted, default=0)
        if last >= int(self.checkpoint.facts["epoch_start"]) and presence.trained < last:
            self._log(f"{name} lost its training state: every device's dual starts again")
            self._lost_state.add(name)

    def _enroll(self, name: str, trains: bool = True) -> Device:
        known = self.ledger.device(name)
        if known is not None and known.status == "enrolled":
            return known
        now = self._now()
        number = self.checkpoint.round + 1
        device = Device(name=name, enrolled_round=number, first_seen=now, last_seen=now, new=not trains)
        self.ledger.put(device)
        self._log(f"{name} enrolled")
        return device

    def _revoke(self, name: str) -> None:
        known = self.ledger.device(name)
        if known is not None and known.status == "enrolled":
            self.ledger.put(replace(known, status="revoked"))
            self._presences.pop(name, None)
            self._lost_state.add(name)
            self._log(f"{name} revoked")

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

    def _members(self) -> list[str]:
        """m: enrolled devices that train."""
        return [d.name for d in self.ledger.devices() if d.status == "enrolled" and not d.new]

    def _ready(self) -> list[str]:
        on = [name for name, p in self._presences.items() if p.st == "on" and self._cannot(p) is None]
        return sorted(set(on) & set(self._members()))

    # Open a round -----------------------------------------------------------------------------------------------------

    def _open_if_possible(self) -> None:
        if not self.link.connected:
            return
        number = self.checkpoint.round + 1
        before = self.ledger.rows(Round, round=number, status="open")
        if not before and len(self._ready()) < self.config.fleet.min_devices:
            return
        state = self._reconciled(leaving=True)
        chosen = before[0].cohort if before else tuple(
            cohort.select(self.config.fleet.seed, number, self._ready(), self.config.fleet.cohort)
        )
        reference, published, lost = self._publish_model(state, number)
        self._publishing = replace(self.checkpoint, published=published, lost=lost)
        started = before[0].opened_at if before else self._now()
        begun = self._clock()
        self.open = OpenRound(number, chosen, started, begun, begun + self.config.fleet.deadline_s, reference)
        if not before:
            self.ledger.put(Round(
                round=number, opened_at=started, cohort=chosen, members=len(self._members()), model_id=reference.model
            ))
        self._take_back(self.open)
        self._publish_manifest(number, cohort.announce(self.config.fleet.seed, number, list(chosen)), reference, True)
        self._intake.clear()

    def _take_back(self, opened: OpenRound) -> None:
        """Updates that an earlier life of this aggregator had received."""
        self._spool.clear(keep=opened.number)
        for device, manifest in self._spool.manifests(opened.number).items():
            if device in opened.cohort and manifest.base == opened.model.model:
                opened.received[device] = manifest

    def _reconciled(self, *, leaving: bool) -> ServerState:
        """The checkpoint's state after the joins (and, between rounds, leaves) since it was made."""
        state, rule = self.checkpoint.state, self.method.server
        members, before = len(self._members()), int(self.checkpoint.facts["members"])
        if leaving and self._lost_state:
            state = rule.left(state, members)
            facts = {**self.checkpoint.facts, "members": str(members)}
            if state.dual_epoch != self.checkpoint.state.dual_epoch:
                facts["epoch_start"] = str(self.checkpoint.round + 1)
            self._lost_state.clear()
            self.checkpoint = replace(self.checkpoint, state=state, facts=facts)
            self._checkpoints.save(self.checkpoint)
            return state
        for count in range(max(before, 1) + 1 if before else members + 1, members + 1):
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
        return any(name not in had and self._presences[name].base != model for name in self._ready())

    def _full_blob(self, decoded: Params) -> Blob:
        return self._blob(codecs.encode("fp32", decoded))

    def _blob(self, data: bytes) -> Blob:
        return self._publisher.blob(Blob.of(data, self.config.link.chunk_bytes), data)

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
        keep = {blob.id for blob in _blobs(manifest)}
        self._publisher.manifest(self._signer.sign(messages.encode(manifest)), keep)

    def _counted(self) -> tuple[Counted, ...]:
        """Which updates the last closed rounds counted; older ones are answered when a device asks."""
        records = []
        for entry in self.ledger.rounds("closed")[-COUNTED_ROUNDS:]:
            ids = tuple(u.update_id for u in self.ledger.rows(Update, round=entry.round, status="counted"))
            if len(ids) <= LISTED_IDS:
                records.append(Counted(entry.round, ids=ids))
            else:
                records.append(Counted(entry.round, blob=self._blob("\n".join(ids).encode())))
        return tuple(records)

    # Collect ----------------------------------------------------------------------------------------------------------

    def _on_offer(self, device: str, number: int, manifest: UploadManifest) -> None:
        opened = self.open
        if opened is not None and number == opened.number and device in opened.received:
            done = opened.received[device].id == manifest.id
            return self._tell(device, Down("done" if done else "reject", number, manifest.id, reason="another update"))
        reason = self._refusal(device, number, manifest)
        if not reason:
            try:
                return self._intake.offer(device, number, manifest)
            except MessageError as error:
                reason = str(error)
        self._refuse(device, number, manifest, reason)

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
        known = self.ledger.rows(Round, round=number)
        if known and not self.ledger.rows(Update, round=number, device=device, update_id=manifest.id):
            self.ledger.put(self._row(number, device, manifest, "late" if late else "refused", reason))
        if opened is not None and not late:
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
        manifest, data = whole
        try:
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
        self._books.report(device, report)
        if report.failed and self.open is not None and report.round == self.open.number:
            self.open.failed[device] = report.failed
            self._log(f"round {report.round}: {device}: {report.failed}")
        if report.want:
            self._publish_whole(report.want)
        if report.pending is not None:
            self._tell_fate(device, report.pending)

    def _tell_fate(self, device: str, pending: PendingRef) -> None:
        """A signed record of whether an update of an older round was counted."""
        if self.open is not None and pending.round == self.open.number:
            return  # not decided yet
        counted = self.ledger.rows(Update, round=pending.round, device=device, update_id=pending.id, status="counted")
        fate = Down("counted", pending.round, pending.id, ok=bool(counted), device=device)
        self.link.publish(topics.down(self.name, device), self._signer.sign(messages.encode(fate)))

    def _publish_whole(self, want: str) -> None:
        """A device lacks the base of the round's delta: the same model whole, and the manifest that names it."""
        opened = self.open
        if want == "full" and opened is not None and opened.model.base is not None and opened.model.full is None:
            whole = self._full_blob(self._publishing.published or {})
            opened.model = replace(opened.model, full=whole)
            chosen = cohort.announce(self.config.fleet.seed, opened.number, list(opened.cohort))
            self._publish_manifest(opened.number, chosen, opened.model, True)

    def _upload_limit(self) -> int:
        """Bytes of the largest update that can be one: every value at four bytes, and room for names."""
        return 2 * 4 * self.layout.parameters(self.method.shared) + (1 << 16)

    def _tell(self, device: str, message: Down) -> None:
        if self.link.connected:
            self.link.publish(topics.down(self.name, device), messages.encode(message))

    # Close a round ----------------------------------------------------------------------------------------------------

    def _close_if_due(self, opened: OpenRound) -> None:
        wanted = max(1, math.ceil(self.config.fleet.quorum * len(opened.cohort)))
        awaited = [
            name for name in opened.cohort
            if name not in opened.received and name not in opened.failed and self._alive(name)
        ]
        enough = len(opened.received) >= wanted
        if enough and (not awaited or self._clock() > opened.deadline):
            return self._close(opened)
        if self._clock() > opened.deadline:
            if opened.failed and not opened.received and not awaited:
                reasons = "; ".join(f"{name}: {why}" for name, why in sorted(opened.failed.items()))
                raise RoundError(f"round {opened.number}: no device delivered ({reasons})")
            self._log(f"round {opened.number}: {len(opened.received)} of {wanted} updates at the deadline, waiting on")
            opened.deadline = self._clock() + self.config.fleet.deadline_s

    def _alive(self, name: str) -> bool:
        """On, and heard lately if it is at work; a device that never came up counts as not there."""
        presence = self._presences.get(name)
        if presence is None or presence.st != "on":
            return False
        return self._phase.get(name) not in WORKING or self._clock() - self._heard.get(name, 0.0) < SILENT_S

    def _close(self, opened: OpenRound) -> None:
        state = replace(self._reconciled(leaving=False), model=widened(self._publishing.published or {}))
        members = len(self._members())
        updates = self._spool.updates(opened.number)
        state = self.method.server.apply(state, updates, members, self.hyper)
        facts = {**self.checkpoint.facts, "members": str(members)}
        checkpoint = Checkpoint(opened.number, state, self._publishing.published, self._publishing.lost, facts)
        self._checkpoints.save(checkpoint)  # before the ledger says so: a crash between leaves the round open
        losses = [m.metrics["loss"] for m in opened.received.values() if "loss" in m.metrics]
        row = self.ledger.rows(Round, round=opened.number)[0]
        counted = len(opened.received)
        with self.ledger.transaction():
            for device, manifest in opened.received.items():
                self.ledger.put(self._row(opened.number, device, manifest, "counted"))
                known = self.ledger.device(device)
                if known is not None and not known.took_part:
                    self.ledger.put(replace(known, took_part=True))
            self.ledger.put(replace(
                row, status="closed", closed_at=self._now(), members=members, seconds=self._now() - row.opened_at,
                loss=sum(losses) / len(losses) if losses else None,
                models_transmitted=float(counted * (self.method.models_down + self.method.models_up)),
                note="; ".join(f"{name}: {why}" for name, why in sorted(opened.failed.items())),
            ))
        self.checkpoint, self.open = checkpoint, None
        self._serve_if_due(opened.number)
        if self.finished:
            self._publish_idle()

    def _serve_if_due(self, number: int) -> None:
        if number % self.config.fleet.serve_every and not self.finished:
            return
        self._serve = self._judged_model(number)
        row = self.ledger.rows(Round, round=number)[0]
        self.ledger.put(replace(row, judged_id=self._serve.model))

    def _judged_model(self, number: int) -> ModelRef:
        """The judged model, whole and in full precision: it is what answers."""
        data = codecs.encode("fp32", self.checkpoint.state.judged)
        decoded = codecs.decode("fp32", data, self.layout, self.method.shared)
        return ModelRef(codecs.identity(decoded), self._blob(data), "fp32", round=number)

    def _publish_idle(self) -> None:
        """Between rounds that nobody collects: what was counted, and the judged model."""
        number = self.checkpoint.round
        if number == 0:
            return
        if self._serve is None:
            self._serve = self._judged_model(number)
        self._publish_manifest(number, messages.Cohort(devices=()), self._serve, False)


def _blobs(manifest: Manifest) -> list[Blob]:
    """Every blob that a manifest names."""
    named: list[Blob | None] = [manifest.graph, manifest.model.blob, manifest.model.full]
    named += [record.blob for record in manifest.counted]
    if manifest.serve is not None:
        named += [manifest.serve.blob, manifest.serve.full]
    return [blob for blob in named if blob is not None]


def will(fleet: str, boot: str) -> tuple[str, bytes]:
    """Topic and payload of the aggregator's last will."""
    return topics.server(fleet), messages.encode(ServerPresence(st="off", boot=boot))


