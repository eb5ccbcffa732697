"""A new served model: fetched, personalized, evaluated and reported; and gradient steps on samples that were added.

Samples that come together are learned together: the steps begin ``QUIET_S`` after the last one was added, or
``BETWEEN_S`` after the first, and never within ``BETWEEN_S`` of the steps before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edge_agent.compute.worker import Done, Job, Trainer
from edge_agent.connection.blob_download import Fetcher
from edge_agent.device.agent_costs import AgentCosts
from edge_agent.device.local_samples import few_labels
from edge_agent.device.manifest_method import hyper_of, method_of
from edge_agent.device.slots import RolledBack
from edge_agent.device.state import Weights
from edge_agent.inference.personalizers import EMBEDS, Plan
from edge_agent.inference.service import Service
from edge_agent.inference.stored_models import NO_TRAINER, Answering
from edge_agent.rounds.received_models import MAX_MODEL_BYTES, Models
from edge_agent.rounds.reports import Reporter
from edge_agent.rounds.train_job import TrainJobs
from fleet_core.algorithms.interface import Method
from fleet_core.base.errors import FleetError, RoundError
from fleet_core.protocol.device_messages import Alone, Evaluation
from fleet_core.protocol.round_messages import Manifest, ModelRef

QUIET_S, BETWEEN_S = 60.0, 600.0


class AddedSamples:
    """When gradient steps learn them."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._seen, self._last, self._first = -1, 0.0, math.inf  # when samples were added; infinite: none are new
        self._stepped = -math.inf

    def due(self, added_at: int) -> bool:
        """added_at: as ``LocalData.added_at``."""
        now = self._clock()
        if added_at != self._seen:
            self._seen, self._last, self._first = added_at, now, min(now, self._first)
        quiet = self._first < math.inf and now - self._last >= QUIET_S
        return (quiet or now - self._first >= BETWEEN_S) and now - self._stepped >= BETWEEN_S

    def learned(self) -> None:
        """None are new any more."""
        self._first = math.inf

    def stepped(self) -> None:
        """Gradient steps begin."""
        self._stepped = self._clock()


@dataclass(frozen=True)
class Steps:
    """Gradient steps for added samples. now: the model that they begin from. how: the personalizer. added: number of
    added samples. base: ``Slots.stamp`` when they began."""

    now: Answering
    how: str
    added: int
    base: tuple[Any, ...]


class ServedModelUpdate:
    """jobs: those of the trainer. If no trainer can do a manifest's jobs, only the graph ``adapt`` takes gradient
    steps."""

    def __init__(
        self, service: Service, models: Models, fetcher: Fetcher, accounts: AgentCosts, reporter: Reporter,
        trainer: Trainer | None, adapts: Trainer, jobs: TrainJobs, clock: Callable[[], float],
        log: Callable[[str], None],
    ):
        self._service, self._models, self._fetcher = service, models, fetcher
        self._accounts, self._reporter = accounts, reporter
        self._trainer, self._adapter, self._jobs, self._log = trainer, adapts, jobs, log
        self._adapting = ""  # id of the model that gradient steps are personalizing now
        self._added, self._count = AddedSamples(clock), 0  # number of added samples when the last steps began
        self._steps: Steps | None = None
        self._asked = -1  # sequence number of the manifest that asked for it
        self._told = ""  # id of the model whose evaluation was reported since the start
        self._evaluations: tuple[Evaluation, ...] = ()
        self._alone: Alone | None = None
        self._counted = ""  # stamp of the samples that few_labels has looked at

    def goes_first(self, manifest: Manifest, ref: ModelRef) -> bool:
        """Whether the served model must be fetched before the training model, which replaces the base of its delta."""
        wanted = not self._service.answers_with(ref, method_of(manifest))
        return wanted and self._models.needs_training_base(manifest, ref)

    def want(self, manifest: Manifest, ref: ModelRef) -> None:
        """Personalizes the served model, or fetches it. Gradient steps wait until their process is free."""
        method = method_of(manifest)
        if self._service.answers_with(ref, method):
            if ref.model not in (self._told, self._adapting):
                self._tell_of(ref)  # personalized before the agent's restart
            return
        held = self._models.weights(ref.model, method.shared)
        if held is not None:
            return self._personalize(manifest, Weights(ref.model, ref.round, held.params))
        self._models.served = None
        blob = self._models.blob_for(ref, method.shared)
        if blob is not None and self._fetcher.target is None:
            self._fetcher.start(blob, MAX_MODEL_BYTES, "serve")

    def _personalize(self, manifest: Manifest, weights: Weights) -> None:
        """Without gradient steps at once; with them in the trainer or by the graph ``adapt``, when it is free."""
        method = method_of(manifest)
        hyper, trains = hyper_of(method, manifest.method.hyper), bool(self._jobs.engine(manifest))
        worker = self._worker(self._service.plan(method, hyper, trainer=trains))
        if worker is not None and (worker.busy or self._steps is not None):
            return
        plan = self._service.load(method, manifest.method.hyper, weights, trainer=trains)
        self._models.served = None
        if plan.int8 and self._service.graph_that_answers == "embed":
            self._log(f"the weights of round {weights.round} came without an int8 encoder: those of the graph embed")
        if worker is None:
            return self._evaluate(self._without_trainer(method) if plan.kind == "left" else "")
        self._accounts.begin("adapt")
        self._adapting, self._asked, self._count = weights.model, manifest.seq, self._service.local().added()
        self._added.stepped()
        by_trainer = plan.kind == "trainer"
        worker.submit(Job("adapt", self._jobs.header(manifest)) if by_trainer else self._service.steps(plan))

    def _worker(self, plan: Plan) -> Trainer | None:
        """The process that takes the gradient steps, or None."""
        return {"trainer": self._trainer, "steps": self._adapter}.get(plan.kind)

    def _without_trainer(self, method: Method) -> str:
        """Logs and returns what the device cannot do."""
        text = f"{method.name} makes a device's own weights by gradient steps, and there is no trainer here: "
        text += "the fleet's model answers as it is" if self._service.answers_as_it_is else "there are no answers"
        self._log(f"{text} ({NO_TRAINER})")
        return text

    def adapted(self, done: Done, manifest: Manifest | None) -> None:
        """Takes the result of the gradient steps, unless another model is served by now. Raises RoundError if they
        failed, unless a newer ``manifest`` has come: then they are tried again."""
        adapting, self._adapting = self._adapting, ""
        if adapting != self._service.model:
            return
        if done.error:
            self._service.model = None  # fetched again with the next manifest
            error = RoundError(f"personalization failed: {done.error}")
            if manifest is not None and manifest.seq != self._asked:
                return self._log(f"serve: {error}")
            raise error
        used, there = done.header.get("samples"), done.header.get("of", 0)
        if used is not None and used < there:
            self._log(f"personalized on {used} of {there} samples, about as many of each class")
        self._service.adapted(done.arrays, self._count)
        self._evaluate()

    # Added samples ----------------------------------------------------------------------------------------------------

    @property
    def learns_added(self) -> bool:
        """Whether gradient steps on added samples are being taken."""
        return self._steps is not None

    def learn_added(self, manifest: Manifest) -> None:
        """Begins gradient steps on all samples if some were added since the last ones and it is time. No worker may be
        busy. Raises FleetError."""
        service, now = self._service, self._service.answering
        if now is None or service.model not in (None, now.model) or not self._added.due(service.local().added_at()):
            return
        method, trains = method_of(manifest), bool(self._jobs.engine(manifest))
        plan = service.plan(method, hyper_of(method, manifest.method.hyper), trainer=trains)
        added = service.local().added()
        worker, personal = self._worker(plan), service.stored.personalization(now.slot)
        counted = 0 if personal is None else personal.settings.get("added", added)
        by_trainer = plan.kind == "trainer"
        if by_trainer and (manifest.serve is None or manifest.serve.model != now.model):
            return
        self._added.learned()
        if worker is None or counted == added:
            return
        self._steps = Steps(now, plan.how, added, service.slots.stamp())
        self._added.stepped()
        self._accounts.begin("adapt")
        worker.submit(Job("adapt", self._jobs.header(manifest)) if by_trainer else service.steps(plan, again=now))

    def learned(self, done: Done) -> None:
        """Gradient steps on added samples ended: their result answers, unless the device would answer worse, or another
        process has changed what answers."""
        steps, self._steps = self._steps, None
        if steps is None:
            return
        text = f"{steps.added} added sample{'s' * (steps.added > 1)}"
        try:
            if done.error:
                raise RoundError(done.error)
            if self._service.adapted_again(done.arrays, steps.now, steps.how, steps.added, steps.base):
                self._log(f"personalized again, with {text}, by {steps.how}")
        except FleetError as error:
            self._log(f"not personalized again, with {text}: {error}")

    # Reports ----------------------------------------------------------------------------------------------------------

    def _evaluate(self, failed: str = "") -> None:
        """Reports how the new model does on the test samples, and whether it answers or was rolled back."""
        back = self._service.rolled_back
        if back is not None and (back.model, back.round) == (self._service.model, self._service.round):
            failed = rolled_back(back, self._service.answering)
            self._log(failed)
        self._told = self._service.model or ""
        self._accounts.begin("serve")
        try:
            self._evaluations = tuple(self._service.evaluate())
            self._alone = self._service.alone() if self._evaluations else None
            self._say_few()
        finally:
            self._accounts.end("serve")
        self._tell(failed)

    def _say_few(self) -> None:
        """Warns about classes with few labels, once for the same samples."""
        now, data = self._service.answering, self._service.local()
        if now is None or now.how not in EMBEDS or data.task is not None or data.stamp() == self._counted:
            return
        self._counted = data.stamp()
        text = few_labels({name: own + added for name, own, _, added in data.counts()})
        if text:
            self._log(text)

    def _tell_of(self, ref: ModelRef) -> None:
        """After a restart: evaluates again, or reports again that the model was rolled back."""
        back = self._service.rolled_back
        if back is None or (back.model, back.round) != (ref.model, ref.round):
            return self._evaluate()
        self._told = ref.model
        self._reporter.report(evaluated_round=ref.round, failed=rolled_back(back, self._service.answering))

    def _tell(self, failed: str = "") -> None:
        self._reporter.report(
            evaluated_round=self._service.round, evaluations=self._evaluations, alone=self._alone, failed=failed
        )

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The last evaluations, with the round of the evaluated model."""
        return self._evaluations

    def tell_again(self) -> bool:
        """Repeats the last evaluations; False when there are none."""
        if self._evaluations:
            self._tell()
        return bool(self._evaluations)


def rolled_back(back: RolledBack, now: Answering | None) -> str:
    """The log line and report of a model that was rolled back."""
    text = f"the weights of round {back.round} were rolled back: {back.why}"
    return text if now is None else f"{text}; those of round {now.round} answer"
