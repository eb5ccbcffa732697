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
from fleet_core.errors import BundleError, CodecError, FleetError, MessageError
from fleet_core.link.base import Connected, Disconnected, Link, Message
from fleet_core.messages import (
    Answer,
    Blob,
    Counted,
    Down,
    Manifest,
    ModelRef,
    PendingRef,
    Presence,
    Question,
    Report,
    UploadManifest,
)
from fleet_core.signing import Verifier

HEARTBEAT_S = 2.0
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
        self._fetcher = Fetcher(self.fleet, link, clock)
        self._uploader = Uploader(self.fleet, self.name, link, clock)
        self._pending = home.pending()
        self._model: Weights | None = home.weights("model")
        self._round_seen = 0
        self._asked_full: set[str] = set()
        self._asked_fate = -1
        self._last_heartbeat = 0.0
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
        if self.link.connected:
            off = messages.encode(Presence(st="off", boot=self.boot, ver=__version__))
            self.link.publish(topics.presence(self.fleet, self.name), off, retain=True)
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
        training = self.trainer is not None and self.trainer.busy
        if training and self.link.connected and self._clock() - self._last_heartbeat > HEARTBEAT_S:
            self._beat()

    # What arrives -----------------------------------------------------------------------------------------------------

    def _on_connected(self) -> None:
        self.link.subscribe(
            topics.current(self.fleet),
            topics.down(self.fleet, self.name),
            topics.question(self.fleet, self.name, "+"),
        )
        self._announce()
        self._advance()

    def _on_message(self, topic: str, payload: bytes) -> None:
        address = topics.parse(self.fleet, topic)
        if address is None:
            return
        if address.kind == "cur":
            self._on_manifest(payload)
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
        self._advance()

    def _on_chunk(self, blob_id: str, k: int | None, payload: bytes) -> None:
        data = None if k is None else self._fetcher.put(blob_id, k, payload)
        if data is None or self.manifest is None:
            return
        manifest = self.manifest
        kind = self._kind_of(blob_id, manifest)
        self.accounts.payload(f"{kind}_down", len(data))
        if kind == "graph":
            self._install_graph(blob_id, data)
        elif kind == "counted":
            self._settle(data.decode("ascii", "replace").split())
        elif kind == "model":
            self._take_model(manifest.model, blob_id, data)
        elif kind == "serve" and manifest.serve is not None:
            self._take_serve(manifest.serve, blob_id, data)
        self._advance()

    @staticmethod
    def _kind_of(blob_id: str, manifest: Manifest) -> str:
        if manifest.graph is not None and blob_id == manifest.graph.id:
            return "graph"
        if any(record.blob is not None and record.blob.id == blob_id for record in manifest.counted):
            return "counted"
        serves = manifest.serve is not None and blob_id in _blob_ids(manifest.serve)
        trains = manifest.open and blob_id in _blob_ids(manifest.model)
        return "serve" if serves and not trains else "model"

    def _on_down(self, payload: bytes) -> None:
        if payload.startswith(b"ed25519:"):
            return self._on_fate(messages.decode(Down, self._verifier.verify(payload)))
        down = messages.decode(Down, payload)
        if down.t == "need":
            return self._uploader.on_need(down)
        pending = self._pending
        if pending is None or (down.r, down.id) != (pending.round, pending.upload.id):
            return
        self._uploader.stop()
        if down.t == "done":
            self.accounts.payload("update_up", pending.upload.blob.size)
            self._set_phase("idle")
        else:
            self._log(f"round {down.r}: the update was refused: {down.reason}")
            self._forget(pending)
            self._set_phase("refused")
        self.report()

    def _on_fate(self, down: Down) -> None:
        """A signed record of what became of an old update."""
        pending = self._pending
        if pending is not None and down.t == "counted" and down.device == self.name and down.r == pending.round:
            self._settle([down.id] if down.ok else [])
            self._advance()

    def _on_question(self, question_id: str, payload: bytes) -> None:
        try:
            answer = self.service.answer(messages.decode(Question, payload))
        except FleetError as error:
            answer = Answer(error=str(error))
        self.link.publish(topics.answer(self.fleet, self.name, question_id), messages.encode(answer))

    # What the current round asks for ----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """The next thing that the current manifest asks for and that can be done now; called whenever one is done."""
        manifest = self.manifest
        if manifest is None or not self.link.connected:
            return
        if manifest.graph is not None and self.service.graph_id != manifest.graph.id:
            return self._want_graph(manifest.graph)
        if self._pending is not None and not self._settled(manifest, self._pending):
            return
        if self._takes_part(manifest):
            self._take_part(manifest)
        if manifest.serve is not None and self._fetcher.target is None:
            self._want_serve(manifest.serve)

    def _want_graph(self, blob: Blob) -> None:
        path = self.home.graph_path(blob.id)
        if path.exists():
            self._install_graph(blob.id, path.read_bytes())
            return self._advance()
        self._fetcher.start(blob, bundle.MAX_BYTES)

    def _install_graph(self, blob_id: str, data: bytes) -> None:
        graph = bundle.unpack(data)
        manifest = self.manifest
        if manifest is not None and manifest.layout and graph.layout.hash != manifest.layout:
            raise BundleError(f"the graph has layout {graph.layout.hash}", expected=manifest.layout)
        self.service.install(blob_id, graph)
        self.home.save_graph(blob_id, data)
        self._announce()

    def _settled(self, manifest: Manifest, pending: Pending) -> bool:
        """Whether nothing is pending any more; asks where the manifest does not say."""
        if pending.round >= manifest.round and manifest.open:
            if pending.round == manifest.round and pending.key == state_key(manifest) and not self._uploader.active:
                self._offer(pending)  # the aggregator started this round anew: it may not have the update
            return False if pending.key == state_key(manifest) else self._forget(pending)
        record = next((r for r in manifest.counted if r.round == pending.round), None)
        if record is not None:
            return self._settle_by(record)
        if self._asked_fate != manifest.seq:
            self._asked_fate = manifest.seq
            self.report(pending=PendingRef(pending.round, pending.upload.id))
        return False

    def _settle_by(self, record: Counted) -> bool:
        if record.ids is not None:
            return self._settle(list(record.ids))
        if record.blob is not None:
            self._fetcher.start(record.blob, MAX_COUNTED_BYTES)
        return False

    def _settle(self, counted_ids: list[str]) -> bool:
        """Commits the pending state when its update is among the counted ones, discards it otherwise."""
        pending = self._pending
        if pending is not None and f"{pending.upload.id}" in counted_ids:
            self.home.commit(pending)
        elif pending is not None:
            self._log(f"round {pending.round}: the update was not counted, its state is discarded")
            self.home.discard(pending)
        self._uploader.stop()
        self._pending = None
        return True

    def _forget(self, pending: Pending) -> bool:
        self.home.discard(pending)
        self._uploader.stop()
        self._pending = None
        return True

    def _takes_part(self, manifest: Manifest) -> bool:
        """Whether this device trains in the open round and has not yet begun."""
        return (
            manifest.open
            and self.settings.train.enabled
            and self.trainer is not None
            and not self.trainer.busy
            and self._pending is None
            and self._round_seen < manifest.round
            and cohort.includes(manifest.cohort, manifest.round, self.name)
            and METHODS.get(manifest.method.name) is not None
        )

    def _take_part(self, manifest: Manifest) -> None:
        if self._model is not None and self._model.model == manifest.model.model:
            return self._train(manifest, self._model)
        blob = self._blob_for(manifest.model, self._model)
        if blob is not None:
            self._fetcher.start(blob, MAX_MODEL_BYTES)
        elif manifest.model.model not in self._asked_full:
            self._asked_full.add(manifest.model.model)
            self.report(want="full")

    @staticmethod
    def _blob_for(ref: ModelRef, held: Weights | None) -> Blob | None:
        """The blob that gives this device the model: a delta where it holds the base, else the whole, else none."""
        if ref.base is None or (held is not None and held.model == ref.base):
            return ref.blob
        return ref.full

    def _take_model(self, ref: ModelRef, blob_id: str, data: bytes) -> None:
        params = self._decode(ref, blob_id, data, self._model)
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
        self._round_seen = manifest.round
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
        manifest = self.manifest
        if done.error:
            self.accounts.end("train")
            self._log(f"training failed: {done.error}")
            self._set_phase("failed")
            return self.report(failed=done.error[:500])
        self.accounts.end("train", done.header.get("flops"))
        if manifest is None or manifest.round != self._round_seen or not manifest.open:
            self._set_phase("idle")  # the round closed without this device
            return self._advance()
        try:
            self._pending = self._encode(manifest, done)
        except CodecError as error:
            self._log(f"the update is refused: {error}")
            self._set_phase("failed")
            return self.report(failed=str(error)[:500])
        self.home.save_pending(self._pending)
        self._offer(self._pending)
        self._advance()

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

    def _offer(self, pending: Pending) -> None:
        self._set_phase("upload")
        self._uploader.offer(pending)

    # Serving ----------------------------------------------------------------------------------------------------------

    def _want_serve(self, ref: ModelRef) -> None:
        if self.service.model == ref.model:
            return
        held = self.home.weights("serve")
        if held is not None and held.model == ref.model:
            return self._personalize(ref, held)
        if self._model is not None and self._model.model == ref.model:
            return self._personalize(ref, Weights(ref.model, ref.round, self._model.params))
        blob = self._blob_for(ref, self._model)
        if blob is not None:
            self._fetcher.start(blob, MAX_MODEL_BYTES)
        elif ref.model not in self._asked_full:
            self._asked_full.add(ref.model)
            self.report(want="serve-full")

    def _take_serve(self, ref: ModelRef, blob_id: str, data: bytes) -> None:
        weights = Weights(ref.model, ref.round, self._decode(ref, blob_id, data, self._model))
        self.home.save_weights("serve", weights)
        self._personalize(ref, weights)

    def _personalize(self, ref: ModelRef, weights: Weights) -> None:
        """Proto and models without adaptation at once; gradient steps in the trainer, when it is free."""
        manifest, method = self.manifest, self._method()
        if manifest is None or (self.trainer is not None and self.trainer.busy):
            return  # asked for again once the trainer is free
        by_gradient = self.service.load(method, manifest.method.hyper, weights)
        if by_gradient and self.trainer is not None:
            self.accounts.begin("adapt")
            return self.trainer.submit(Job("adapt", self._job_header(manifest), storage.flatten(weights.params)))
        if by_gradient:
            self._log(f"{method.name} adapts by gradient steps: answering without them (no trainer here)")
        self._judged()

    def _on_adapted(self, done: Done) -> None:
        self.accounts.end("adapt")
        if done.error:
            self._log(f"personalization failed: {done.error}")
        else:
            self.service.adapted(done.arrays)
        self._judged()

    def _judged(self) -> None:
        """The new predictor answers from now on; how it does on this device's later samples is reported."""
        self.accounts.begin("serve")
        judgements = self.service.judge()
        self.accounts.end("serve")
        self.report(judged_round=self.service.round, judgements=tuple(judgements))
        self._advance()

    # What is told -----------------------------------------------------------------------------------------------------

    def report(self, **more: Any) -> None:
        """Costs since the start, and what else there is to say."""
        if not self.link.connected or self.manifest is None:
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
        self.link.publish(topics.report(self.fleet, self.name), messages.encode(report))

    def _set_phase(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._beat()

    def _beat(self) -> None:
        """Still here, and at what; not retained."""
        self._last_heartbeat = self._clock()
        if self.link.connected:
            beat = Presence(st="on", boot=self.boot, ph=self.phase, ver=__version__, beat=True)
            self.link.publish(topics.presence(self.fleet, self.name), messages.encode(beat))

    def _announce(self) -> None:
        """The whole presence, retained."""
        self._last_heartbeat = self._clock()
        if self.link.connected:
            topic = topics.presence(self.fleet, self.name)
            self.link.publish(topic, messages.encode(self.presence()), retain=True)

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


def _blob_ids(ref: ModelRef) -> tuple[str, ...]:
    return (ref.blob.id,) if ref.full is None else (ref.blob.id, ref.full.id)


def _ram_mib() -> int:
    """Memory of the machine in MiB; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    except (ValueError, OSError):
        return 0
