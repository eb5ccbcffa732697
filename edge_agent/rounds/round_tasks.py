"""What the current manifest asks of this device: fetch graph and weights, train, personalize, evaluate."""

from __future__ import annotations

from collections.abc import Callable

from edge_agent.compute.adapter import AdapterProcess
from edge_agent.compute.worker import Done, Trainer
from edge_agent.connection.blob_download import Fetcher
from edge_agent.device.agent_costs import AgentCosts
from edge_agent.device.full_disk import Disk
from edge_agent.device.manifest_method import method_of
from edge_agent.device.state import DeviceState
from edge_agent.inference.service import Service
from edge_agent.rounds.attempts import Attempts
from edge_agent.rounds.device_payload import DevicePayload
from edge_agent.rounds.graphs import Graphs
from edge_agent.rounds.manifest_check import ManifestCheck
from edge_agent.rounds.pending_update import PendingUpdates
from edge_agent.rounds.received_models import MAX_MODEL_BYTES, Models
from edge_agent.rounds.reports import LOOK_S, Reporter
from edge_agent.rounds.served_model_update import ServedModelUpdate
from edge_agent.rounds.train_job import TrainJobs, still_asked
from fleet_core.base.errors import FleetError, MessageError, RoundError
from fleet_core.board.device_settings import Settings
from fleet_core.board.limits import Limits
from fleet_core.link.interface import Link
from fleet_core.model import graph_bundle
from fleet_core.protocol.round_messages import Manifest, ModelRef


class RoundTasks:
    """Does one thing after the other, each once it is possible. Only this class runs jobs of the trainer and the
    adapter. check: has the current manifest. announce(): publishes the presence. providers: as in ``Graphs``."""

    def __init__(
        self, settings: Settings, boot: str, home: DeviceState, link: Link, service: Service, accounts: AgentCosts, *,
        trainer: Trainer | None, adapter: Trainer | None, limits: Limits, check: ManifestCheck, fetcher: Fetcher,
        updates: PendingUpdates, reporter: Reporter, disk: Disk, announce: Callable[[], None],
        providers: tuple[str, ...], clock: Callable[[], float], log: Callable[[str], None],
    ):
        self._home, self._link, self._service, self._accounts = home, link, service, accounts
        self._trainer, self._adapter = trainer, adapter or AdapterProcess()
        self._check, self._fetcher, self._updates, self._reporter = check, fetcher, updates, reporter
        self._disk, self._clock, self._demands = disk, clock, settings.privacy
        self.attempts = Attempts(self._on_failed, log)
        self.graphs = Graphs(home, service, fetcher, announce, log, providers)
        self.models = Models(home, service, log)
        self._per_device = DevicePayload(settings.device.name, home, service, fetcher)
        self.training = TrainJobs(settings, boot, home, service, accounts, trainer, limits)
        self.serving = ServedModelUpdate(
            service, self.models, fetcher, accounts, reporter, trainer, self._adapter, self.training, clock, log
        )
        self._looked, self._log = clock(), log

    # Jobs -------------------------------------------------------------------------------------------------------------

    def busy_workers(self) -> list[Trainer]:
        return [worker for worker in (self._trainer, self._adapter) if worker is not None and worker.busy]

    def stop(self) -> None:
        """Ends the child processes."""
        for worker in (self._trainer, self._adapter):
            if worker is not None:
                worker.stop()

    def on_done(self, done: Done) -> None:
        """A job of the trainer or the adapter ended or failed."""
        if done.kind == "train":
            self._on_trained(done)
        else:
            self._accounts.end("adapt")
            self._adapter.stop()
            if self.serving.learns_added:
                self.serving.learned(done)
            else:
                self._attempt("serve", lambda: self.serving.adapted(done, self._check.manifest))
        self.advance()

    def _on_trained(self, done: Done) -> None:
        manifest, begun = self._check.manifest, self.training.ended(done)
        if begun is None or manifest is None:
            return
        if not still_asked(begun, manifest):
            self._reporter.enter("idle")  # the round closed without this device
        elif done.error:
            if done.header.get("disk"):
                self._disk.refuse()
            return self.attempts.give_up("train", manifest, RoundError(done.error))
        if not done.error:
            self._attempt("train", lambda: self._updates.take(
                begun, manifest, lambda size: self._accounts.cost(size, done.header)
            ))

    # What arrives -----------------------------------------------------------------------------------------------------

    def on_manifest(self, before: Manifest | None, manifest: Manifest) -> None:
        """A manifest was accepted. before: the one until now."""
        if before is not None and (manifest.round, not manifest.open) < (before.round, not before.open):
            self.training.forget()  # the rounds went back: the fleet's folder is from a backup
        self._reporter.round = manifest.round
        named = self.models.named(manifest) | self._per_device.named(manifest)
        self._fetcher.keep({blob.id for blob in manifest.blobs()} | named)
        self.advance()

    def on_blob(self, blob_id: str, data: bytes) -> None:
        """A blob arrived whole."""
        manifest = self._check.manifest
        if manifest is None:
            return
        counted = next((r for r in manifest.counted if r.blob is not None and r.blob.id == blob_id), None)
        if manifest.graph is not None and blob_id == manifest.graph.id:
            self._attempt("graph", lambda: self.graphs.take(manifest, blob_id, data))
        elif manifest.backbone is not None and blob_id == manifest.backbone.id:
            self._attempt("graph", lambda: self.graphs.take_backbone(self._service.layout))
        elif manifest.steps is not None and blob_id == manifest.steps.id:
            self._attempt("train", lambda: self._home.save_graph(blob_id, data, kind="steps"))
        elif counted is not None:
            self._updates.on_counted(counted.round, data.decode("ascii", "replace").split())
        elif manifest.open and blob_id in self.models.named(manifest):
            self._attempt("model", lambda: self.models.take_training(manifest, blob_id, data))
        elif manifest.open and self._per_device.is_of(manifest, blob_id):
            self._attempt("model", lambda: self._per_device.take(manifest, blob_id, data))
        elif manifest.serve is not None and blob_id in (blob.id for blob in manifest.serve.blobs()):
            ref = manifest.serve
            self._attempt("serve", lambda: self.models.take_served(manifest, ref, blob_id, data))
        self.advance()

    # What is done next ------------------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether it is time to ask unanswered questions again, because nothing was done for a while."""
        return self._clock() - self._looked > LOOK_S

    def advance(self) -> None:
        """Does the next thing that the current manifest asks for and that is possible now."""
        self._looked = self._clock()
        manifest = self._check.manifest
        if manifest is None or not self._link.connected:
            return
        if not self._knows(manifest) or not self._has_graph(manifest) or self._fetches_steps(manifest):
            return
        self._attempt("state", lambda: self._updates.resolve(manifest))
        able = (self._updates.pending is None and not self.attempts.gave_up("model", manifest)
                and not self._disk.refuses and not self.serving.learns_added)
        ref = self._served_now(manifest)
        if able and self.training.wanted(manifest) and (ref is None or not self.serving.goes_first(manifest, ref)):
            self._attempt("train", lambda: self._take_part(manifest))
        if ref is not None:
            self._attempt("serve", lambda: self.serving.want(manifest, ref))
        self._stop_idle_trainer(manifest)

    def learn_added(self) -> None:
        """Takes gradient steps on samples that were added, while this device has nothing else to compute."""
        manifest = self._check.manifest
        if manifest is None or self.busy_workers() or self.training.wanted(manifest) or self._disk.refuses:
            return
        try:
            undecided = manifest.serve is not None and self._updates.undecided(manifest.serve.round)
            if not (method_of(manifest).keeps_weights and undecided):
                self.serving.learn_added(manifest)
        except FleetError as error:
            self._log(f"added samples are not learned: {error}")

    def _served_now(self, manifest: Manifest) -> ModelRef | None:
        """The served model, unless it failed, or must wait for this device's own training."""
        ref = manifest.serve
        if ref is None or self.attempts.gave_up("serve", manifest):
            return None
        return None if method_of(manifest).keeps_weights and self._updates.undecided(ref.round) else ref

    def _attempt(self, what: str, action: Callable[[], object]) -> None:
        self.attempts.attempt(what, self._check.manifest, action)

    def _on_failed(self, what: str, manifest: Manifest, error: FleetError) -> None:
        """Reports what this device gave up."""
        self._disk.note(error)
        if what in ("train", "model"):
            self.training.forget()
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
        if blob is not None and self._service.graph_id != blob.id:
            self._attempt("graph", lambda: self.graphs.want(manifest, blob))
        graph = self._service.graph
        if graph is None or (blob is not None and self._service.graph_id != blob.id):
            return False
        if not self.graphs.complete(graph.layout) and not self.attempts.gave_up("graph", manifest):
            self._attempt("graph", lambda: self.graphs.want_backbone(manifest, graph.layout))
        return self.graphs.complete(graph.layout)

    def _fetches_steps(self, manifest: Manifest) -> bool:
        """Whether this device still waits for the graph that it trains with."""
        lacking = self.training.lacks(manifest)
        if lacking is None or self.attempts.gave_up("train", manifest):
            return False
        self._attempt("train", lambda: self._fetcher.start(lacking, graph_bundle.MAX_BYTES, "graph"))
        return self._fetcher.target == lacking.id

    def _take_part(self, manifest: Manifest) -> None:
        unmet = self._demands.unmet(secure=manifest.up.secure is not None, noise=manifest.up.local_noise)
        if unmet:
            raise RoundError(f"this device's [privacy] keeps it out: {unmet}")
        if self.models.adopt_training(manifest):
            if self._per_device.is_here(manifest):
                self._reporter.enter("train")
                self.training.begin(manifest, "" if self._per_device.blob is None else self._per_device.blob.id)
            return
        blob = self.models.next_blob(manifest)
        if blob is not None:
            self._fetcher.start(blob, MAX_MODEL_BYTES, "model")
        else:
            self._reporter.ask("full", manifest.model.model, want="full", base=self.models.base)

    def _stop_idle_trainer(self, manifest: Manifest) -> None:
        """Ends the trainer while no round is open, to free its memory."""
        served = manifest.serve is None or self._service.answers_with(manifest.serve, method_of(manifest))
        if self._trainer is not None and not manifest.open and served and not self._trainer.busy:
            self._trainer.stop()
