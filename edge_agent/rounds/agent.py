"""The agent's loop on one device: broadcast → adapt and train → update.

The agent does what the manifest asks for (``round_tasks``), offers what it trained (``pending_update``), reports, and
answers questions. It never blocks: ``step`` handles what arrived and what is due.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from edge_agent.compute.worker import Trainer
from edge_agent.connection.alarm_senders import OverAgentsLink
from edge_agent.connection.blob_download import Fetcher
from edge_agent.connection.certificate_renewal import Renewal
from edge_agent.connection.update_upload import Uploader
from edge_agent.device.agent_costs import AgentCosts
from edge_agent.device.full_disk import Disk
from edge_agent.device.state import DeviceState
from edge_agent.inference.drift import personalize_again
from edge_agent.inference.service import Service
from edge_agent.rounds.manifest_check import ManifestCheck
from edge_agent.rounds.pending_update import PendingUpdates
from edge_agent.rounds.reports import Reporter
from edge_agent.rounds.round_tasks import RoundTasks
from edge_agent.rounds.secure_update import SecureUpdates
from edge_agent.updates.program_updates import ProgramUpdates
from fleet_core.base.errors import FleetError, MessageError, RevokedError
from fleet_core.board.device_settings import Settings
from fleet_core.board.limits import Limits
from fleet_core.link.interface import Connected, Denied, Disconnected, Link, Message, Will
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Answer, Down, Evaluation, Presence, Question, ServerPresence
from fleet_core.protocol.round_messages import Manifest
from fleet_core.protocol.succession import MAX_BYTES, Announced


class Agent:
    """One device's agent over an open link. ``step`` raises RevokedError once a signed message revokes the device.
    board: what this machine is, for people. alarms: messages of alarms, for this link. providers: as in ``Graphs``.
    ``log`` receives what a person may want to read, one line at a time."""

    def __init__(
        self,
        settings: Settings,
        home: DeviceState,
        link: Link,
        service: Service,
        accounts: AgentCosts,
        trainer: Trainer | None,
        *,
        adapter: Trainer | None = None,
        limits: Limits | None = None,
        board: str = "",
        renewal: Renewal | None = None,
        updates: ProgramUpdates | None = None,
        alarms: OverAgentsLink | None = None,
        boot: str | None = None,
        providers: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
        log: Callable[[str], None] = lambda line: None,
    ):
        self.home, self.link, self.service, self.accounts = home, link, service, accounts
        self.name, self.fleet = settings.device.name, settings.device.fleet
        self.boot = boot or secrets.token_hex(8)
        self._log = log
        self._check = ManifestCheck(self.fleet, settings.device.key, home, now_ms)
        limits = limits or Limits(settings.train.enabled and trainer is not None)
        trains = settings.train.enabled and trainer is not None and limits.train
        self._reporter = Reporter(
            settings, self.boot, link, accounts, trains=trains, limits=limits, board=board, clock=clock,
            log=log,
        )
        self._fetcher = Fetcher(
            self.fleet, link, clock, lambda kind, size: accounts.payload(f"{kind}_down", size), device=self.name,
            missing=self._reporter.missing,
        )
        self._uploader = Uploader(
            self.fleet, self.name, link, clock, lambda size: accounts.payload("update_up", size),
            unanswered=self._reporter.unanswered,
        )
        self._secure = SecureUpdates(settings, home, link, clock, lambda: self._check.time_ms / 1000, log)
        self._updates = PendingUpdates(
            self.name, self.boot, home, self._uploader, self._secure, self._fetcher, self._reporter, log
        )
        self._disk = Disk(home.folder, clock)
        self._renewal, self._programs, self._alarms = renewal, updates, alarms
        self._tasks = RoundTasks(
            settings, self.boot, home, link, service, accounts, trainer=trainer, adapter=adapter, limits=limits,
            check=self._check, fetcher=self._fetcher, updates=self._updates, reporter=self._reporter, disk=self._disk,
            announce=self._announce, providers=providers, clock=clock, log=log,
        )
        if updates is not None:
            updates.changed, updates.missing = self._announce, self._reporter.missing
            updates.verifier = lambda: self._check.keys.ring
        self._unwritten: tuple[str, bytes] | None = None  # the message that a full disk kept from being written
        self._server_boot, self._server_away = "", False
        self._told_moved, self._added = 0, 0  # in the last presence; added samples at the last attempt to personalize
        self._lost = False  # whether the connection broke and is not back
        self._revoked: RevokedError | None = None

    @property
    def manifest(self) -> Manifest | None:
        """The last manifest that was accepted."""
        return self._check.manifest

    # The loop ---------------------------------------------------------------------------------------------------------

    def step(self, timeout_s: float) -> bool:
        """Handles what arrived within ``timeout_s`` and what is due; True when anything happened."""
        workers = self._tasks.busy_workers()
        events = self.link.poll(timeout_s, also=tuple(d for worker in workers for d in worker.descriptors()))
        for event in events:
            match event:
                case Connected():
                    self._on_connected()
                case Disconnected(reason):
                    self._lost = True
                    self._log(f"broker: {reason}")
                case Denied(topic, reason):
                    if self._alarms is None or not self._alarms.denied(topic, reason):
                        self._log(f"broker: {topic} denied: {reason}")
                case Message(topic, payload):
                    self._guarded(topic, payload)
        results = [done for worker in workers if (done := worker.poll()) is not None]
        for done in results:
            self._tasks.on_done(done)
        self._tick()
        if self._revoked is not None:
            raise self._revoked
        return bool(events or results)

    def close(self) -> None:
        """Leaves in order: no child processes, presence off, disconnect."""
        self._tasks.stop()
        if self._programs is not None:
            self._programs.close()
        self._reporter.leave()
        self.link.close()

    def _guarded(self, topic: str, payload: bytes) -> None:
        """Handles one message; a bad one is logged and dropped."""
        try:
            self._on_message(topic, payload)
        except FleetError as error:
            self._log(f"refused {topic}: {error}")
            if self._disk.note(error):
                self._unwritten = topic, payload

    def _tick(self) -> None:
        if self._disk.is_back():
            self._try_again()
        self._fetcher.tick()
        self._uploader.tick()
        self._updates.tick()
        self._reporter.tick()
        if self._renewal is not None and self._reporter.known:
            self._renewal.tick(self._check.time_ms / 1000)
        if self._programs is not None:
            self._programs.tick()
        if self._alarms is not None:
            self._alarms.tick(self.link)
        if self._reporter.unheard and self._server_boot and self.link.connected:
            self._announce(again=True)
        if self._tasks.due:
            self._follow()
            self._watch_drift()
            self._tasks.learn_added()
            self._tasks.advance()

    def _follow(self) -> None:
        """Uses a personalization that another process wrote."""
        try:
            self.service.follow()
        except FleetError as error:
            self._log(f"the model that another process stored is not used: {error}")

    def _try_again(self) -> None:
        """Repeats what failed on the disk, which can be written again."""
        self._log("the disk can be written again")
        self._tasks.attempts.try_again()
        self._tasks.training.forget()
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:
            self._guarded(*unwritten)
        self._tasks.advance()

    # What arrives -----------------------------------------------------------------------------------------------------

    def _on_connected(self) -> None:
        again, self._lost = self._lost, False
        if again:
            self._log("broker: connected")
        self.link.subscribe(
            topics.keys(self.fleet),
            topics.current(self.fleet),
            topics.server(self.fleet),
            topics.down(self.fleet, self.name),
            topics.question(self.fleet, self.name, "+"),
            *(() if self._programs is None else (topics.program(self.fleet),)),
        )
        self._announce()
        if again:
            self._tasks.serving.tell_again()  # the report may have been lost with the connection
        self._tasks.attempts.try_again()
        self._reporter.reconnected()
        self._tasks.advance()

    def _on_message(self, topic: str, payload: bytes) -> None:
        address = topics.parse(self.fleet, topic)
        if address is None:
            return
        if address.kind == "cur":
            self._on_manifest(payload)
        elif address.kind == "keys":
            self._on_keys(payload)
        elif address.kind == "srv":
            self._on_server(messages.decode(ServerPresence, payload))
        elif address.kind == "program" and self._programs is not None:
            self._programs.on_announcement(payload)
        elif address.kind == "b":
            self._on_chunk(address.key, topics.number(address.part), payload)
        elif address.kind == "dn" and address.device == self.name:
            self._on_down(payload)
        elif address.kind == "q" and address.device == self.name:
            self._on_question(address.key, payload)

    def _on_manifest(self, payload: bytes) -> None:
        before = self.manifest
        manifest = self._check.accept(payload)
        if manifest is not None:
            self._tasks.on_manifest(before, manifest)

    def _on_keys(self, payload: bytes) -> None:
        """Follows the successor of the fleet's key, and reads a manifest of the new key that arrived before it."""
        if not payload:
            return
        keys = self._check.keys
        before = keys.told
        announced = messages.decode(Announced, payload, limit=MAX_BYTES)
        unread = keys.take(announced.links)
        if keys.told != before:
            self._log(f"the fleet's key is {keys.ring.id}, succession {keys.ring.number}")
            self._announce()
        if unread:
            self._on_manifest(unread)
        new = keys.authorities(announced.authorities)
        if new is not None and self._renewal is not None:
            self._renewal.on_authorities(new.certificates)
            keys.trusts(new)
            self._said_issuer()

    def _said_issuer(self) -> None:
        """Tells the aggregator when this device has a certificate of the fleet's new authority."""
        keys = self._check.keys
        if self._renewal is not None and self._renewal.issuer not in ("", keys.issuer):
            keys.is_issued_by(self._renewal.issuer)
            self._announce()

    def _on_server(self, presence: ServerPresence) -> None:
        """Reports again to an aggregator that was away: it may have lost this device's last report."""
        if presence.st != "on":
            self._server_away = True
            return
        self._reporter.packed = self._uploader.packed = presence.reads
        away, self._server_away = self._server_away, False
        first, restarted = not self._server_boot, presence.boot != self._server_boot
        self._server_boot = presence.boot
        if restarted:
            self._reporter.forgotten()
        if not first and (restarted or away) and not self._tasks.serving.tell_again():
            self._reporter.report()

    def _on_chunk(self, blob_id: str, k: int | None, payload: bytes) -> None:
        if self._programs is not None and self._programs.on_chunk(blob_id, k, payload):
            return
        data = None if k is None else self._fetcher.put(blob_id, k, payload)
        if data is not None:
            self._tasks.on_blob(blob_id, data)

    def _on_down(self, payload: bytes) -> None:
        if payload.startswith(b"ed25519:"):
            attested = messages.decode(Down, self._check.keys.ring.verify(payload))
            if attested.t == "revoked":
                return self._on_revoked(attested)
            if attested.t == "renewed" and self._renewal is not None:
                self._renewal.on_answer(attested)
                return self._said_issuer()
            if attested.t == "secure":
                return self._updates.on_secure(attested)
            self._updates.on_fate(attested)
            return self._tasks.advance()
        down = messages.decode(Down, payload)
        if down.t == "heard":
            return self._reporter.heard(down.boot)
        self._updates.on_unsigned(down)

    def _on_revoked(self, down: Down) -> None:
        """A revocation holds only for this start of this device, and only if it is not older than the last manifest: an
        old one must not stop a device that was enrolled again."""
        if (down.device, down.boot) != (self.name, self.boot) or (down.seq or 0) < self._check.seq:
            raise MessageError("a revocation of another device, of another start of it, or older than the last round")
        on = "" if down.at is None else time.strftime(" on %Y-%m-%d", time.gmtime(down.at))
        self._revoked = RevokedError(
            f"this device was revoked by the fleet {self.fleet}{on}",
            hint=f"'metafleet devices enroll' with the name {self.name} lets it in again; then start the agent again",
        )

    def _on_question(self, question_id: str, payload: bytes) -> None:
        try:
            answer = self.service.answer(messages.decode(Question, payload))
        except FleetError as error:
            answer = Answer(error=str(error)[:1000])
        self._reporter.answer(question_id, answer)

    # Reports ---------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """idle, train, upload, refused or failed."""
        return self._reporter.phase

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The last evaluations on the device's test samples."""
        return self._tasks.serving.evaluations

    def _announce(self, *, again: bool = False) -> None:
        graph = self.service.graph
        self._reporter.announce(
            layouts=(graph.layout.hash,) if graph is not None and self._tasks.graphs.complete(graph.layout) else (),
            base=self._tasks.models.base,
            key=self._check.keys.told,
            ca=self._check.keys.issuer,
            again=again,
            update=None if self._programs is None else self._programs.state,
            moved=self._told_moved,
        )

    def _watch_drift(self) -> None:
        """Reports when the samples have moved, or no longer have; personalizes again when there are new labels."""
        self._added = personalize_again(self.service, self._added, self._log)
        moved = self.service.drift.moved_at
        if moved != self._told_moved:
            self._told_moved = moved
            self._log("drift: the samples here have moved away from those that this device was personalized on, "
                      f"noticed after {moved} answers: label some samples (edge-agent samples add)" if moved else
                      "drift is now measured against a new personalization")
            self._announce()


def will(settings: Settings, boot: str) -> Will:
    """The device's last will."""
    topic = topics.presence(settings.device.fleet, settings.device.name)
    return Will(topic, messages.encode(Presence(st="off", boot=boot)))
