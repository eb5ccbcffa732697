"""The agent: broadcast → adapt and train → update, on one device, in one visible loop.

The agent verifies every manifest, fetches graph and weights, has its trainer run the local steps, offers the update,
and commits what the training changed on this device only when a signed record says that the update was counted. It
personalizes the judged model and answers for it. It never blocks: ``step`` handles what arrived and what is due.
"""

from __future__ import annotations

import os
import secrets
import time
import zlib
from collections.abc import Callable
from typing import Any

from edge_agent.accounts import Accounts
from edge_agent.fetcher import Fetcher
from edge_agent.home import Home, Pending, Weights, state_key
from edge_agent.service import Service
from edge_agent.settings import Settings
from edge_agent.uploader import Uploader
from edge_agent.worker import Done, Job, Trainer
from fleet_core import __version__, bundle, codecs, cohort, messages, schema, storage, topics
from fleet_core.algorithms import trees
from fleet_core.algorithms.methods import METHODS
from fleet_core.algorithms.seam import Method
from fleet_core.errors import BundleError, CodecError, FleetError, LinkError, MessageError, RoundError
from fleet_core.link.base import Connected, Denied, Disconnected, Link, Message
from fleet_core.messages import (
    Answer,
    Blob,
    Down,
    Judgement,
    Manifest,
    ModelRef,
    PendingRef,
    Presence,
    Question,
    Report,
    ServerPresence,
    UploadManifest,
)
from fleet_core.signing import Verifier

HEARTBEAT_S = 2.0
LOOK_S = 5.0
WORKING = ("train", "upload")
MAX_MODEL_BYTES = 1 << 30
MAX_COUNTED_BYTES = 1 << 26


class Agent:
    """One device's agent over an open link. ``log`` receives what a person may want to read, one line at a time."""

    def __init__(
        self,
        settings: Settings,
        home: Home,
        link: Link,
        service: Service,
        accounts: Accounts,
        trainer: Trainer | None,
        *,
        boot: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
        log: Callable[[str], None] = lambda line: None,
    ):
        self.settings, self.home, self.link, self.service = settings, home, link, service
        self.accounts, self.trainer = accounts, trainer
        self.name, self.fleet = settings.device.name, settings.device.fleet
        self.boot = boot or secrets.token_hex(8)
        self._clock, self._now_ms, self._log = clock, now_ms, log
        self._verifier = Verifier(settings.device.key)
        self._seq, self._signed_ms = home.clock()
        self._fetcher = Fetcher(self.fleet, link, clock, lambda kind, size: accounts.payload(f"{kind}_down", size))
        self._uploader = Uploader(self.fleet, self.name, link, clock, lambda size: accounts.payload("update_up", size))
        self._pending = home.pending()
        self._model: Weights | None = home.weights("model")
        self._to_serve: Weights | None = home.weights("serve")
        self._training: Manifest | None = None  # what the trainer works on
        self._adapting = ""  # the model that the trainer personalizes
        self._seen: tuple[int, str, str] | None = None
        self._offered_seq = -1
        self._gave_up: dict[str, int] = {}
        self._bad_graph = ""
        self._asked: dict[str, tuple[str, float]] = {}
        self._server_boot = ""
        self._judgements: tuple[Judgement, ...] = ()
        self._looked = self._last_heartbeat = clock()
        self.manifest: Manifest | None = None
        self.phase = "idle"

    # The loop ---------------------------------------------------------------------------------------------------------

    def step(self, timeout_s: float) -> bool:
        """Handles what arrived within ``timeout_s`` and what is due; True when anything happened."""
        descriptors = self.trainer.descriptors() if self.trainer and self.trainer.busy else ()
        events = self.link.poll(timeout_s, also=descriptors)
        for event in events:
            match event:
                case Connected():
                    self._on_connected()
                case Disconnected(reason):
                    self._log(f"broker: {reason}")
                case Denied(topic, reason):
                    self._log(f"broker: {topic} denied: {reason}")
                case Message(topic, payload):
                    self._guarded(topic, payload)
        done = self.trainer.poll() if self.trainer else None
        if done is not None:
            self._on_trained(done) if done.kind == "train" else self._on_adapted(done)
        self._tick()
        return bool(events) or done is not None

    def close(self) -> None:
        """Leaves in order: no trainer, presence off, disconnect."""
        if self.trainer is not None:
            self.trainer.stop()
        off = messages.encode(Presence(st="off", boot=self.boot, ver=__version__))
        self._send(topics.presence(self.fleet, self.name), off, retain=True)
        self.link.close()

    def _guarded(self, topic: str, payload: bytes) -> None:
        """One message; what is wrong with it is said and the message dropped, the loop goes on."""
        try:
            self._on_message(topic, payload)
        except FleetError as error:
            self._log(f"refused {topic}: {error}")

    def _tick(self) -> None:
        self._fetcher.tick()
        self._uploader.tick()
        if self.phase in WORKING and self._clock() - self._last_heartbeat > HEARTBEAT_S:
            self._beat()
        if self._clock() - self._looked > LOOK_S:
            self._advance()  # what was asked for and never answered is asked for again

    def _send(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """What is lost when the link is down or full: the protocol says it again."""
        if self.link.connected:
            try:
                self.link.publish(topic, payload, retain=retain)
            except LinkError as error:
                self._log(f"not sent: {error}")

    # What arrives -----------------------------------------------------------------------------------------------------

    def _on_connected(self) -> None:
        self.link.subscribe(
            topics.current(self.fleet),
            topics.server(self.fleet),
            topics.down(self.fleet, self.name),
            topics.question(self.fleet, self.name, "+"),
        )
        self._announce()
        self._gave_up.clear()
        self._asked.clear()
        self._advance()

    def _on_message(self, topic: str, payload: bytes) -> None:
        address = topics.parse(self.fleet, topic)
        if address is None:
            return
        if address.kind == "cur":
            self._on_manifest(payload)
        elif address.kind == "srv":
            self._on_server(messages.decode(ServerPresence, payload))
        elif address.kind == "b":
            self._on_chunk(address.key, topics.number(address.part), payload)
        elif address.kind == "dn" and address.device == self.name:
            self._on_down(payload)
        elif address.kind == "q" and address.device == self.name:
            self._on_question(address.key, payload)

    def _on_manifest(self, payload: bytes) -> None:
        manifest = messages.decode(Manifest, self._verifier.verify(payload), limit=1 << 24)
        if manifest.fleet != self.fleet:
            raise MessageError(f"a round of fleet '{manifest.fleet[:64]}'", expected=f"fleet '{self.fleet}'")
        if manifest.v != messages.PROTOCOL:
            raise MessageError(f"protocol {manifest.v}", expected=str(messages.PROTOCOL), hint="update this agent")
        if self.manifest is not None and manifest.seq == self.manifest.seq:
            return  # replayed by the broker after a reconnect
        if manifest.seq < self._seq:
            raise MessageError(f"a round with the old sequence number {manifest.seq}", expected=f"above {self._seq}")
        if manifest.exp < max(self._now_ms(), self._signed_ms):
            raise MessageError("a round that has expired")
        self._seq, self._signed_ms = manifest.seq, max(self._signed_ms, manifest.seq)
        self.home.set_clock(self._seq, self._signed_ms)
        self.manifest = manifest
        self._fetcher.keep({blob.id for blob in manifest.blobs()})
        self._advance()

    def _on_server(self, presence: ServerPresence) -> None:
        """An aggregator that began anew may have died with what this device said last in its hands."""
        if presence.st != "on" or presence.boot == self._server_boot:
            return
        first, self._server_boot = not self._server_boot, presence.boot
        if not first and self._judgements:
            self._tell_judgements()
        elif not first:
            self.report()

    def _on_chunk(self, blob_id: str, k: int | None, payload: bytes) -> None:
        data = None if k is None else self._fetcher.put(blob_id, k, payload)
        manifest = self.manifest
        if data is None or manifest is None:
            return
        counted = next((r for r in manifest.counted if r.blob is not None and r.blob.id == blob_id), None)
        if manifest.graph is not None and blob_id == manifest.graph.id:
            self._attempt("graph", lambda: self._install_graph(blob_id, data, new=True))
        elif counted is not None:
            self._settle(counted.round, data.decode("ascii", "replace").split())
        elif manifest.open and blob_id in _blob_ids(manifest.model):
            self._attempt("model", lambda: self._take_model(manifest.model, blob_id, data))
        elif manifest.serve is not None and blob_id in _blob_ids(manifest.serve):
            ref = manifest.serve
            self._attempt("serve", lambda: self._take_serve(ref, blob_id, data))
        self._advance()

    def _on_down(self, payload: bytes) -> None:
        if payload.startswith(b"ed25519:"):
            return self._on_fate(messages.decode(Down, self._verifier.verify(payload)))
        down, pending = messages.decode(Down, payload), self._pending
        if down.t == "need":
            return self._uploader.on_need(down)
        if pending is None or not self._uploader.active or (down.r, down.id) != (pending.round, pending.upload.id):
            return
        self._uploader.stop()  # the signed record decides what becomes of it, not this
        if down.t == "reject":
            self._log(f"round {down.r}: the update was refused: {down.reason}")
        self._set_phase("idle" if down.t == "done" else "refused")
        self.report()

    def _on_fate(self, down: Down) -> None:
        """A signed record of what became of an old update."""
        pending = self._pending
        if pending is None or down.t != "counted" or down.device != self.name or down.id != pending.upload.id:
            return
        self._settle(down.r, [down.id] if down.ok else [])
        self._advance()

    def _on_question(self, question_id: str, payload: bytes) -> None:
        try:
            answer = self.service.answer(messages.decode(Question, payload))
        except FleetError as error:
            answer = Answer(error=str(error)[:1000])
        self._send(topics.answer(self.fleet, self.name, question_id), messages.encode(answer))

    # What the current round asks for ----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """The next thing that the current manifest asks for and that can be done now; called whenever one is done."""
        self._looked = self._clock()
        manifest = self.manifest
        if manifest is None or not self.link.connected:
            return
        if not self._knows(manifest) or not self._has_graph(manifest):
            return
        self._attempt("state", lambda: self._resolve(manifest))
        if self._pending is None and self._takes_part(manifest):
            self._attempt("train", lambda: self._take_part(manifest))
        if manifest.serve is not None:
            ref = manifest.serve
            self._attempt("serve", lambda: self._want_serve(ref))
        self._rest(manifest)

    def _attempt(self, what: str, action: Callable[[], object]) -> None:
        """Does it, or says why not, here and to the aggregator; what failed waits for a newer manifest."""
        manifest = self.manifest
        if manifest is None or self._gave_up.get(what) == manifest.seq:
            return
        try:
            action()
        except LinkError as error:
            self._log(f"{what}: {error}")
        except FleetError as error:
            self._give_up(what, manifest, error)

    def _give_up(self, what: str, manifest: Manifest, error: FleetError) -> None:
        self._gave_up[what] = manifest.seq
        self._log(f"{what}: {error}")
        if what in ("train", "model"):
            self._seen = None
            self._set_phase("failed")
        about = {"judged_round": manifest.serve.round} if what == "serve" and manifest.serve is not None else {}
        self.report(failed=f"{what}: {error}"[:500], **about)

    def _knows(self, manifest: Manifest) -> bool:
        """Whether this agent has the round's method."""
        known = METHODS.get(manifest.method.name)
        if known is None or known.version != manifest.method.version:
            self._attempt("method", self._method)
            return False
        return True

    def _has_graph(self, manifest: Manifest) -> bool:
        blob = manifest.graph
        if blob is None or self.service.graph_id == blob.id:
            return self.service.graph is not None
        if blob.id == self._bad_graph:
            self._attempt("graph", self._refuse_graph)
            return False
        data = self.home.graph(blob)
        if data is None:
            self._attempt("graph", lambda: self._fetcher.start(blob, bundle.MAX_BYTES, "graph"))
        else:
            self._attempt("graph", lambda: self._install_graph(blob.id, data, new=False))
        return self.service.graph_id == blob.id

    def _refuse_graph(self) -> None:
        raise BundleError("the fleet's graph failed its check here", hint="see this device's log")

    def _install_graph(self, blob_id: str, data: bytes, *, new: bool) -> None:
        self._bad_graph = blob_id  # until it is in use
        graph = bundle.unpack(data)
        manifest = self.manifest
        if manifest is not None and manifest.layout and graph.layout.hash != manifest.layout:
            raise BundleError(f"the graph has layout {graph.layout.hash}", expected=manifest.layout)
        self.service.install(blob_id, graph)
        self._bad_graph = ""
        if new:
            self.home.save_graph(blob_id, data)
        self._announce()

    def _resolve(self, manifest: Manifest) -> None:
        """What is pending is committed or discarded where the manifest says which; else its fate is asked for."""
        pending = self._pending
        if pending is None:
            return
        if pending.round >= manifest.round and manifest.open:
            return self._go_on_offering(manifest, pending)
        if pending.round > manifest.round:
            return  # that round is not closed, and not open now
        record = next((r for r in manifest.counted if r.round == pending.round), None)
        if record is None:
            self._ask("fate", pending.upload.id, pending=PendingRef(pending.round, pending.upload.id))
        elif record.ids is not None:
            self._settle(record.round, list(record.ids))
        elif record.blob is not None:
            self._fetcher.start(record.blob, MAX_COUNTED_BYTES, "counted")

    def _go_on_offering(self, manifest: Manifest, pending: Pending) -> None:
        """Offers the update once per manifest: the aggregator may have begun the round anew, without it."""
        mine = (pending.round, pending.key, pending.upload.base)
        if mine != (manifest.round, state_key(manifest), manifest.model.model):
            self._discard(pending)  # the round is another by now: this can never be counted
        elif self._offered_seq != manifest.seq:
            self._offer(manifest, pending)

    def _settle(self, round_number: int, counted_ids: list[str]) -> None:
        """Commits the pending state when its update is among the counted ones of its round, discards it otherwise."""
        pending = self._pending
        if pending is None or pending.round != round_number:
            return
        if pending.upload.id not in counted_ids:
            return self._discard(pending)
        self.home.commit(pending)
        self._uploader.stop()
        self._pending = None

    def _discard(self, pending: Pending) -> None:
        self._log(f"round {pending.round}: the update was not counted, its state is discarded")
        self.home.discard(pending)
        self._uploader.stop()
        self._pending = None

    def _ask(self, what: str, about: str, **more: Any) -> None:
        """A report that waits for an answer; repeated while none comes."""
        asked, when = self._asked.get(what, ("", 0.0))
        if asked != about or self._clock() - when >= LOOK_S:
            self._asked[what] = (about, self._clock())
            self.report(**more)

    def _takes_part(self, manifest: Manifest) -> bool:
        """Whether this device trains in the open round and has not yet begun."""
        return (
            manifest.open
            and self.settings.train.enabled
            and self.trainer is not None
            and not self.trainer.busy
            and self._seen != _identity(manifest)
            and self._gave_up.get("model") != manifest.seq
            and cohort.includes(manifest.cohort, manifest.round, self.name)
        )

    def _take_part(self, manifest: Manifest) -> None:
        if self._model is not None and self._model.model == manifest.model.model:
            return self._train(manifest, self._model)
        blob = self._blob_for(manifest.model, self._model)
        if blob is not None:
            self._fetcher.start(blob, MAX_MODEL_BYTES, "model")
        else:
            self._ask("full", manifest.model.model, want="full")

    def _rest(self, manifest: Manifest) -> None:
        """Between rounds that nobody collects the trainer's memory is free for others."""
        served = manifest.serve is None or self.service.model == manifest.serve.model
        if self.trainer is not None and not manifest.open and served and not self.trainer.busy:
            self.trainer.stop()

    @staticmethod
    def _blob_for(ref: ModelRef, held: Weights | None) -> Blob | None:
        """The blob that gives this device the model: a delta where it holds the base, else the whole, else none."""
        if ref.base is None or (held is not None and held.model == ref.base):
            return ref.blob
        return ref.full

    def _take_model(self, ref: ModelRef, blob_id: str, data: bytes) -> None:
        try:
            params = self._decode(ref, blob_id, data, self._model)
        except CodecError:
            if ref.base is None or blob_id != ref.blob.id:
                raise
            self._log("the delta does not fit what is held here: the whole model is needed")
            self._model = None
            return
        self._model = Weights(ref.model, ref.round, params)
        self.home.save_weights("model", self._model)

    def _decode(self, ref: ModelRef, blob_id: str, data: bytes, held: Weights | None) -> dict[str, dict[str, Any]]:
        layout, groups = self.service.layout, self._method().shared
        delta = ref.base is not None and blob_id == ref.blob.id
        params = codecs.decode(ref.codec if blob_id == ref.blob.id else "fp32", data, layout, groups)
        if delta and held is not None:
            params = codecs.moved(held.params, params)
        if codecs.identity(params) != ref.model:
            raise CodecError("the decoded model is not the one that was announced", where=f"round {ref.round}")
        return params

    # Training ---------------------------------------------------------------------------------------------------------

    def _method(self) -> Method:
        if self.manifest is None:
            raise MessageError("no round is known yet")
        method = METHODS.get(self.manifest.method.name)
        if method is None or method.version != self.manifest.method.version:
            reference = self.manifest.method
            raise MessageError(f"method {reference.name} version {reference.version}", hint="update this agent")
        return method

    def _train(self, manifest: Manifest, model: Weights) -> None:
        if self.trainer is None:
            return
        self._seen, self._training = _identity(manifest), manifest
        self._set_phase("train")
        state = dict(self.home.state(state_key(manifest)) or {})
        state.pop("residual", None)
        flat = {f"broadcast/{key}": array for key, array in storage.flatten(model.params).items()}
        seed = [int(manifest.scalars.get("seed", 0)), manifest.round, zlib.crc32(self.name.encode())]
        header = {**self._job_header(manifest), "seed": seed, "scalars": dict(manifest.scalars)}
        self.accounts.begin("train")
        self.trainer.submit(Job("train", header, {**flat, **storage.flatten_roles(state)}))

    def _job_header(self, manifest: Manifest) -> dict[str, Any]:
        data = self.settings.data
        split = {"train_fraction": data.train_fraction, "support_seconds": data.support_seconds}
        path = str(self.home.folder / data.samples)
        return {
            "method": manifest.method.name,
            "hyper": dict(manifest.method.hyper),
            "layout": self.service.layout.to_json(),
            "round": manifest.round,
            "data": {"path": path, "split": split},
        }

    def _on_trained(self, done: Done) -> None:
        self.accounts.end("train", done.header.get("flops"))
        manifest, begun = self.manifest, self._training
        self._training = None
        if manifest is None or begun is None or not manifest.open or _identity(manifest) != _identity(begun):
            self._set_phase("idle")  # the round closed without this device
            return self._advance()
        if done.error:
            self._give_up("train", manifest, RoundError(done.error))
        else:
            self._attempt("train", lambda: self._keep(manifest, done))
        self._advance()

    def _keep(self, manifest: Manifest, done: Done) -> None:
        """The update and the state that follows from it are on disk before the update is offered."""
        pending = self._encode(manifest, done)
        self.home.save_pending(pending)
        self._pending = pending
        self._offer(manifest, pending)

    def _encode(self, manifest: Manifest, done: Done) -> Pending:
        method, layout = self._method(), self.service.layout
        roles = storage.unflatten_roles(done.arrays)
        own = layout.ordered(roles.pop("update"))
        name = next((c for c in manifest.up.codecs if c in codecs.CODECS), "fp32")
        before = self.home.state(state_key(manifest)) or {}
        sent = codecs.send(name, own, before.get("residual"), layout, method.shared)
        state: dict[str, trees.Params] = dict(roles)
        if sent.error is not None:
            hyper, _ = schema.read(method.hyper, manifest.method.hyper)
            state = dict(method.client.settle(state, sent.error, hyper))
        if sent.residual is not None:
            state["residual"] = sent.residual
        upload = UploadManifest(
            blob=Blob.of(sent.data, manifest.up.chunk),
            codec=name,
            base=manifest.model.model,
            method=method.name,
            layout=layout.hash,
            dual_epoch=manifest.dual_epoch,
            samples=int(done.header["samples"]),
            scalars=done.header.get("scalars", {}),
            metrics={"loss": float(done.header["loss"])},
            cost=self.accounts.cost(len(sent.data), done.header),
        )
        return Pending(state_key(manifest), manifest.round, upload, sent.data, state)

    def _offer(self, manifest: Manifest, pending: Pending) -> None:
        self._offered_seq = manifest.seq
        self._set_phase("upload")
        self._uploader.offer(pending)

    # Serving ----------------------------------------------------------------------------------------------------------

    def _want_serve(self, ref: ModelRef) -> None:
        """The judged model, from here or from the broker; what the trainer must do for it waits until it is free."""
        if self.service.model == ref.model:
            return
        for held in (self._to_serve, self._model):
            if held is not None and held.model == ref.model:
                return self._personalize(Weights(ref.model, ref.round, held.params))
        self._to_serve = None
        blob = self._blob_for(ref, self._model)
        if blob is not None and self._fetcher.target is None:
            self._fetcher.start(blob, MAX_MODEL_BYTES, "serve")

    def _take_serve(self, ref: ModelRef, blob_id: str, data: bytes) -> None:
        self._to_serve = Weights(ref.model, ref.round, self._decode(ref, blob_id, data, self._model))

    def _personalize(self, weights: Weights) -> None:
        """Proto and models without adaptation at once; gradient steps in the trainer, when it is free."""
        manifest, method, trainer = self.manifest, self._method(), self.trainer
        if manifest is None or (method.personalizer == "sgd" and trainer is not None and trainer.busy):
            return
        by_gradient = self.service.load(method, manifest.method.hyper, weights)
        self._to_serve = None
        if by_gradient and trainer is not None:
            self.accounts.begin("adapt")
            self._adapting = weights.model
            return trainer.submit(Job("adapt", self._job_header(manifest), storage.flatten(weights.params)))
        if by_gradient:
            self._log(f"{method.name} adapts by gradient steps: answering without them (no trainer here)")
        self._judged()

    def _on_adapted(self, done: Done) -> None:
        self.accounts.end("adapt")
        if self._adapting == self.service.model:
            self._attempt("serve", lambda: self._use_adapted(done))
        self._advance()

    def _use_adapted(self, done: Done) -> None:
        if done.error:
            raise RoundError(f"personalization failed: {done.error}")
        self.service.adapted(done.arrays)
        self._judged()

    def _judged(self) -> None:
        """The new predictor answers from now on; how it does on this device's later samples is reported."""
        self.accounts.begin("serve")
        try:
            self._judgements = tuple(self.service.judge())
        finally:
            self.accounts.end("serve")
        self._tell_judgements()

    def _tell_judgements(self) -> None:
        self.report(judged_round=self.service.round, judgements=self._judgements)

    # What is told -----------------------------------------------------------------------------------------------------

    def report(self, **more: Any) -> None:
        """Costs since the start, and what else there is to say."""
        if self.manifest is None:
            return
        report = Report(
            round=self.manifest.round,
            boot=self.boot,
            energy=self.accounts.energy(),
            traffic=self.accounts.traffic(self.link.counters.snapshot()),
            flops=self.accounts.flops,
            new=not self.settings.train.enabled,
            **more,
        )
        self._send(topics.report(self.fleet, self.name), messages.encode(report))

    def _set_phase(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._beat()

    def _beat(self) -> None:
        """Still here, and at what; not retained."""
        self._last_heartbeat = self._clock()
        beat = Presence(st="on", boot=self.boot, ph=self.phase, ver=__version__, beat=True)
        self._send(topics.presence(self.fleet, self.name), messages.encode(beat))

    def _announce(self) -> None:
        """The whole presence, retained."""
        self._last_heartbeat = self._clock()
        self._send(topics.presence(self.fleet, self.name), messages.encode(self.presence()), retain=True)

    def presence(self) -> Presence:
        graph = self.service.graph
        return Presence(
            st="on",
            boot=self.boot,
            ph=self.phase,
            ver=__version__,
            methods={name: method.version for name, method in METHODS.items()},
            codecs=tuple(codecs.CODECS),
            layouts=() if graph is None else (graph.layout.hash,),
            ram=_ram_mib(),
            train=self.settings.train.enabled and self.trainer is not None,
            base="" if self._model is None else self._model.model,
            trained=max(self.home.trained(), self._pending.round if self._pending else 0),
        )


def will(settings: Settings, boot: str) -> tuple[str, bytes]:
    """Topic and payload of the device's last will."""
    topic = topics.presence(settings.device.fleet, settings.device.name)
    return topic, messages.encode(Presence(st="off", boot=boot))


def _identity(manifest: Manifest) -> tuple[int, str, str]:
    """What makes a round the same one: number, key of the training state, weights to train from."""
    return manifest.round, state_key(manifest), manifest.model.model


def _blob_ids(ref: ModelRef) -> tuple[str, ...]:
    return (ref.blob.id,) if ref.full is None else (ref.blob.id, ref.full.id)


def _ram_mib() -> int:
    """Memory of the machine in MiB; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    except (ValueError, OSError):
        return 0
