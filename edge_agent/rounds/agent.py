"""The agent's loop on one device: broadcast → adapt and train → update.

The agent does what the manifest asks for: it fetches graph and weights, trains and offers the update (``train_job``,
``pending_update``), personalizes and evaluates the served model (``served_model_update``), reports, and answers
questions. It never blocks: ``step`` handles what arrived and what is due.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from edge_agent.compute.adapter import AdapterProcess
from edge_agent.compute.worker import Done, Trainer
from edge_agent.connection.blob_download import Fetcher
from edge_agent.connection.certificate_renewal import Renewal
from edge_agent.connection.update_upload import Uploader
from edge_agent.device.full_disk import Disk
from edge_agent.device.manifest_method import method_of
from edge_agent.device.state import DeviceState
from edge_agent.inference.drift import personalize_again
from edge_agent.inference.service import Service
from edge_agent.rounds.agent_costs import AgentCosts
from edge_agent.rounds.attempts import Attempts
from edge_agent.rounds.device_payload import DevicePayload
from edge_agent.rounds.graphs import Graphs
from edge_agent.rounds.manifest_check import ManifestCheck
from edge_agent.rounds.pending_update import PendingUpdates
from edge_agent.rounds.received_models import MAX_MODEL_BYTES, Models
from edge_agent.rounds.reports import LOOK_S, Reporter
from edge_agent.rounds.secure_update import SecureUpdates
from edge_agent.rounds.served_model_update import ServedModelUpdate
from edge_agent.rounds.train_job import TrainJobs, still_asked
from edge_agent.updates.program_updates import ProgramUpdates
from fleet_core.base.errors import FleetError, MessageError, RevokedError, RoundError
from fleet_core.board.device_settings import Settings
from fleet_core.board.limits import Limits
from fleet_core.link.interface import Connected, Denied, Disconnected, Link, Message
from fleet_core.model import graph_bundle
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Answer, Down, Evaluation, Presence, Question, ServerPresence
from fleet_core.protocol.round_messages import Manifest, ModelRef
from fleet_core.protocol.succession import MAX_BYTES, Announced


class Agent:
    """One device's agent over an open link. ``step`` raises RevokedError once a signed message revokes the device.
    board: what this machine is, for people. providers: as in
    ``Graphs``. ``log`` receives what a person may want to read, one line at a time."""

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
        boot: str | None = None,
        providers: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
        log: Callable[[str], None] = lambda line: None,
    ):
        self.home, self.link, self.service = home, link, service
        self.accounts, self.trainer, self.adapter = accounts, trainer, adapter or AdapterProcess()
        self.name, self.fleet = settings.device.name, settings.device.fleet
        self.boot = boot or secrets.token_hex(8)
        self._clock, self._log, self._demands = clock, log, settings.privacy
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
        self._graphs = Graphs(home, service, self._fetcher, self._announce, log, providers)
        self._models = Models(home, service, log)
        self._per_device = DevicePayload(self.name, home, service, self._fetcher)
        self._training = TrainJobs(settings, self.boot, home, service, accounts, trainer, limits)
        self._serving = ServedModelUpdate(
            service, self._models, self._fetcher, accounts, self._reporter, trainer, self.adapter, self._training, log,
        )
        self._disk, self._renewal, self._programs = Disk(home.folder, clock), renewal, updates
        if updates is not None:
            updates.changed, updates.missing = self._announce, self._reporter.missing
            updates.verifier = lambda: self._check.keys.ring
        self._unwritten: tuple[str, bytes] | None = None  # the message that a full disk kept from being written
        self._attempts = Attempts(self._on_failed, log)
        self._server_boot, self._server_away = "", False
        self._looked = clock()
        self._told_moved, self._added = 0, 0  # of the last presence; added samples at the last try to personalize
        self._lost = False  # whether the connection broke and is not back
        self._revoked: RevokedError | None = None

    @property
    def manifest(self) -> Manifest | None:
        """The last one that was accepted."""
        return self._check.manifest

    # The loop ---------------------------------------------------------------------------------------------------------

    def step(self, timeout_s: float) -> bool:
        """Handles what arrived within ``timeout_s`` and what is due; True when anything happened."""
        workers = [worker for worker in (self.trainer, self.adapter) if worker is not None and worker.busy]
        events = self.link.poll(timeout_s, also=tuple(d for worker in workers for d in worker.descriptors()))
        for event in events:
            match event:
                case Connected():
                    self._on_connected()
                case Disconnected(reason):
                    self._lost = True
                    self._log(f"broker: {reason}")
                case Denied(topic, reason):
                    self._log(f"broker: {topic} denied: {reason}")
                case Message(topic, payload):
                    self._guarded(topic, payload)
        results = [done for worker in workers if (done := worker.poll()) is not None]
        for done in results:
            self._on_done(done)
        self._tick()
        if self._revoked is not None:
            raise self._revoked
        return bool(events or results)

    def close(self) -> None:
        """Leaves in order: no child processes, presence off, disconnect."""
        for worker in (self.trainer, self.adapter):
            if worker is not None:
                worker.stop()
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
        if self._reporter.unheard and self._server_boot and self.link.connected:
            self._announce(again=True)
        if self._clock() - self._looked > LOOK_S:
            self._follow()
            self._watch_drift()
            self._advance()  # asks again for what was never answered

    def _follow(self) -> None:
        """Takes up a personalization that another process wrote."""
        try:
            self.service.follow()
        except FleetError as error:
            self._log(f"what another process put on the disk is not taken up: {error}")

    def _try_again(self) -> None:
        """The disk can be written again: does what failed on it."""
        self._log("the disk can be written again")
        self._attempts.try_again()
        self._training.forget()
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:
            self._guarded(*unwritten)
        self._advance()

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
            self._serving.tell_again()  # the report may have been lost with the connection
        self._attempts.try_again()
        self._reporter.reconnected()
        self._advance()

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
        if not self._check.accept(payload):
            return
        manifest = self.manifest
        assert manifest is not None
        if before is not None and (manifest.round, not manifest.open) < (before.round, not before.open):
            self._training.forget()  # the rounds went back: the fleet's folder is from a backup
        self._reporter.round = manifest.round
        named = self._models.named(manifest) | self._per_device.named(manifest)
        self._fetcher.keep({blob.id for blob in manifest.blobs()} | named)
        self._advance()

    def _on_keys(self, payload: bytes) -> None:
        """The fleet's key has a successor: follows, and reads the manifest that came before it."""
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
        """Tells the aggregator once this device has a certificate of the fleet's other authority."""
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
        if not first and (restarted or away) and not self._serving.tell_again():
            self._reporter.report()

    def _on_chunk(self, blob_id: str, k: int | None, payload: bytes) -> None:
        if self._programs is not None and self._programs.on_chunk(blob_id, k, payload):
            return
        data = None if k is None else self._fetcher.put(blob_id, k, payload)
        manifest = self.manifest
        if data is None or manifest is None:
            return
        counted = next((r for r in manifest.counted if r.blob is not None and r.blob.id == blob_id), None)
        if manifest.graph is not None and blob_id == manifest.graph.id:
            self._attempt("graph", lambda: self._graphs.take(manifest, blob_id, data))
        elif manifest.backbone is not None and blob_id == manifest.backbone.id:
            self._attempt("graph", lambda: self._graphs.take_backbone(self.service.layout))
        elif manifest.steps is not None and blob_id == manifest.steps.id:
            self._attempt("train", lambda: self.home.save_graph(blob_id, data, kind="steps"))
        elif counted is not None:
            self._updates.on_counted(counted.round, data.decode("ascii", "replace").split())
        elif manifest.open and blob_id in self._models.named(manifest):
            self._attempt("model", lambda: self._models.take_training(manifest, blob_id, data))
        elif manifest.open and self._per_device.is_of(manifest, blob_id):
            self._attempt("model", lambda: self._per_device.take(manifest, blob_id, data))
        elif manifest.serve is not None and blob_id in (blob.id for blob in manifest.serve.blobs()):
            ref = manifest.serve
            self._attempt("serve", lambda: self._models.take_served(manifest, ref, blob_id, data))
        self._advance()

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
            return self._advance()
        down = messages.decode(Down, payload)
        if down.t == "heard":
            return self._reporter.heard(down.boot)
        self._updates.on_unsigned(down)

    def _on_revoked(self, down: Down) -> None:
        """Holds only for this start of this device, and only if it is not older than the last manifest: an old
        revocation must not stop a device that was enrolled again."""
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

    def _on_done(self, done: Done) -> None:
        """A job of the trainer or the adapter ended or failed."""
        if done.kind == "train":
            self._on_trained(done)
        else:
            self.accounts.end("adapt")
            self.adapter.stop()
            self._attempt("serve", lambda: self._serving.adapted(done, self.manifest))
        self._advance()

    def _on_trained(self, done: Done) -> None:
        manifest, begun = self.manifest, self._training.ended(done)
        if begun is None or manifest is None:
            return
        if not still_asked(begun, manifest):
            self._reporter.enter("idle")  # the round closed without this device
        elif done.error:
            if done.header.get("disk"):
                self._disk.refuse()
            return self._attempts.give_up("train", manifest, RoundError(done.error))
        if not done.error:
            self._attempt("train", lambda: self._updates.take(
                begun, manifest, lambda size: self.accounts.cost(size, done.header)
            ))

    # What the current round asks for ----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Does the next thing that the current manifest asks for and that is possible now."""
        self._looked = self._clock()
        manifest = self.manifest
        if manifest is None or not self.link.connected:
            return
        if not self._knows(manifest) or not self._has_graph(manifest) or self._fetches_steps(manifest):
            return
        self._attempt("state", lambda: self._updates.resolve(manifest))
        able = (self._updates.pending is None and not self._attempts.gave_up("model", manifest)
                and not self._disk.refuses)
        ref = self._served_now(manifest)
        if able and self._training.wanted(manifest) and (ref is None or not self._serving.goes_first(manifest, ref)):
            self._attempt("train", lambda: self._take_part(manifest))
        if ref is not None:
            self._attempt("serve", lambda: self._serving.want(manifest, ref))
        self._stop_idle_trainer(manifest)

    def _served_now(self, manifest: Manifest) -> ModelRef | None:
        """The served model, unless it failed, or waits for what the device itself has trained."""
        ref = manifest.serve
        if ref is None or self._attempts.gave_up("serve", manifest):
            return None
        return None if method_of(manifest).keeps_weights and self._updates.undecided(ref.round) else ref

    def _attempt(self, what: str, action: Callable[[], object]) -> None:
        self._attempts.attempt(what, self.manifest, action)

    def _on_failed(self, what: str, manifest: Manifest, error: FleetError) -> None:
        """Reports what this device gave up."""
        self._disk.note(error)
        if what in ("train", "model"):
            self._training.forget()
            self._reporter.enter("failed")
        about = {"evaluated_round": manifest.serve.round} if what == "serve" and manifest.serve is not None else {}
        self._reporter.report(failed=f"{what}: {error}"[:500], **about)

    def _knows(self, manifest: Manifest) -> bool:
        """Whether this agent has the round's method."""
        try:
            method_of(manifest)
        except MessageError:
            self._attempt("method", lambda: method_of(manifest))
            return False
        return True

    def _has_graph(self, manifest: Manifest) -> bool:
        blob = manifest.graph
        if blob is not None and self.service.graph_id != blob.id:
            self._attempt("graph", lambda: self._graphs.want(manifest, blob))
        graph = self.service.graph
        if graph is None or (blob is not None and self.service.graph_id != blob.id):
            return False
        if not self._graphs.complete(graph.layout) and not self._attempts.gave_up("graph", manifest):
            self._attempt("graph", lambda: self._graphs.want_backbone(manifest, graph.layout))
        return self._graphs.complete(graph.layout)

    def _fetches_steps(self, manifest: Manifest) -> bool:
        """Whether the graph with which this device trains is still on its way."""
        lacking = self._training.lacks(manifest)
        if lacking is None or self._attempts.gave_up("train", manifest):
            return False
        self._attempt("train", lambda: self._fetcher.start(lacking, graph_bundle.MAX_BYTES, "graph"))
        return self._fetcher.target == lacking.id

    def _take_part(self, manifest: Manifest) -> None:
        unmet = self._demands.unmet(secure=manifest.up.secure is not None, noise=manifest.up.local_noise)
        if unmet:
            raise RoundError(f"this device's [privacy] keeps it out: {unmet}")
        if self._models.adopt_training(manifest):
            if self._per_device.is_here(manifest):
                self._reporter.enter("train")
                self._training.begin(manifest, "" if self._per_device.blob is None else self._per_device.blob.id)
            return
        blob = self._models.next_blob(manifest)
        if blob is not None:
            self._fetcher.start(blob, MAX_MODEL_BYTES, "model")
        else:
            self._reporter.ask("full", manifest.model.model, want="full", base=self._models.base)

    def _stop_idle_trainer(self, manifest: Manifest) -> None:
        """Ends the trainer while no round is open, to free its memory."""
        served = manifest.serve is None or self.service.answers_with(manifest.serve, method_of(manifest))
        if self.trainer is not None and not manifest.open and served and not self.trainer.busy:
            self.trainer.stop()

    # Reports ---------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """idle, train, upload, refused or failed."""
        return self._reporter.phase

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The last ones on the device's test samples."""
        return self._serving.evaluations

    def _announce(self, *, again: bool = False) -> None:
        graph = self.service.graph
        self._reporter.announce(
            layouts=(graph.layout.hash,) if graph is not None and self._graphs.complete(graph.layout) else (),
            base=self._models.base,
            key=self._check.keys.told,
            ca=self._check.keys.issuer,
            again=again,
            update=None if self._programs is None else self._programs.state,
            moved=self._told_moved,
        )

    def _watch_drift(self) -> None:
        """Says when what the device sees has moved, or no longer has; personalizes again when labels are there."""
        self._added = personalize_again(self.service, self._added, self._log)
        moved = self.service.drift.moved_at
        if moved != self._told_moved:
            self._told_moved = moved
            self._log(f"what this device sees has moved away from what it was personalized on, noticed after {moved} "
                      "answers: label some samples (edge-agent samples add)" if moved else
                      "what this device sees is compared with a new personalization")
            self._announce()


def will(settings: Settings, boot: str) -> tuple[str, bytes]:
    """Topic and payload of the device's last will."""
    topic = topics.presence(settings.device.fleet, settings.device.name)
    return topic, messages.encode(Presence(st="off", boot=boot))
