"""From a served model to this device's own answers: fetched or at hand, personalized, evaluated, and told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edge_agent.compute.worker import Done, Job, Trainer
from edge_agent.connection.blob_download import Fetcher
from edge_agent.device.local_samples import few_labels
from edge_agent.device.manifest_method import hyper_of, method_of
from edge_agent.device.slots import RolledBack
from edge_agent.device.state import Weights
from edge_agent.inference.personalizers import EMBEDS, Plan
from edge_agent.inference.service import Service
from edge_agent.inference.stored_models import NO_TRAINER, Answering
from edge_agent.rounds.costs import AgentCosts
from edge_agent.rounds.received_models import MAX_MODEL_BYTES, Models
from edge_agent.rounds.reports import Reporter
from fleet_core.algorithms.interface import Method
from fleet_core.base.errors import RoundError
from fleet_core.protocol.messages import Alone, Evaluation, Manifest, ModelRef


class ServedModelUpdate:
    """``header(manifest)`` is what the trainer is told of a job; without a trainer gradient steps are left out."""

    def __init__(
        self, service: Service, models: Models, fetcher: Fetcher, accounts: AgentCosts, reporter: Reporter,
        trainer: Trainer | None, adapts: Trainer, header: Callable[[Manifest], dict[str, Any]],
        log: Callable[[str], None],
    ):
        self._service, self._models, self._fetcher = service, models, fetcher
        self._accounts, self._reporter = accounts, reporter
        self._trainer, self._adapter, self._header, self._log = trainer, adapts, header, log
        self._adapting = ""  # the model that is being personalized by gradient steps
        self._told = ""  # the model that the aggregator heard of in this life
        self._evaluations: tuple[Evaluation, ...] = ()
        self._alone: Alone | None = None
        self._counted = ""  # the samples whose number was looked at

    def want(self, manifest: Manifest, ref: ModelRef) -> None:
        """The served model, from here or from the broker; what the trainer must do for it waits until it is free."""
        if self._service.answers_with(ref, method_of(manifest)):
            if ref.model not in (self._told, self._adapting):
                self._tell_of(ref)  # it came in an earlier life
            return
        held = self._models.weights(ref.model)
        if held is not None:
            return self._personalize(manifest, Weights(ref.model, ref.round, held.params))
        self._models.served = None
        blob = self._models.blob_for(ref)
        if blob is not None and self._fetcher.target is None:
            self._fetcher.start(blob, MAX_MODEL_BYTES, "serve")

    def _personalize(self, manifest: Manifest, weights: Weights) -> None:
        """What needs no gradient steps at once; those in the trainer or by the graph ``adapt``, when that is free."""
        method = method_of(manifest)
        hyper, trains = hyper_of(method, manifest.method.hyper), self._trainer is not None
        worker = self._worker(self._service.plan(method, hyper, trainer=trains))
        if worker is not None and worker.busy:
            return
        plan = self._service.load(method, manifest.method.hyper, weights, trainer=trains)
        self._models.served = None
        if plan.int8 and self._service.graph_that_answers == "embed":
            self._log(f"the weights of round {weights.round} came without an int8 encoder: those of the graph embed")
        if worker is None:
            return self._evaluate(self._without_trainer(method) if plan.kind == "left" else "")
        self._accounts.begin("adapt")
        self._adapting = weights.model
        worker.submit(Job("adapt", self._header(manifest)) if plan.kind == "trainer" else self._service.steps(plan))

    def _worker(self, plan: Plan) -> Trainer | None:
        """Who takes the gradient steps."""
        return {"trainer": self._trainer, "steps": self._adapter}.get(plan.kind)

    def _without_trainer(self, method: Method) -> str:
        """Said here and to the aggregator: what the device cannot do."""
        text = f"{method.name} makes a device's own weights by gradient steps, and there is no trainer here: "
        text += "the fleet's model answers as it is" if self._service.answers_as_it_is else "there are no answers"
        self._log(f"{text} ({NO_TRAINER})")
        return text

    def adapted(self, done: Done) -> None:
        """What gradient steps made of the served model, unless another is served by now. Raises RoundError."""
        adapting, self._adapting = self._adapting, ""
        if adapting != self._service.model:
            return
        if done.error:
            self._service.model = None  # wanted anew with the next manifest
            raise RoundError(f"personalization failed: {done.error}")
        used, there = done.header.get("samples"), done.header.get("of", 0)
        if used is not None and used < there:
            self._log(f"personalized on {used} of {there} samples, about as many of each class")
        self._service.adapted(done.arrays)
        self._evaluate()

    def _evaluate(self, failed: str = "") -> None:
        """How the new predictor does on this device's later samples is reported; it answers, or was rolled back."""
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
        """Said once for the same samples."""
        now, data = self._service.answering, self._service.local()
        if now is None or now.how not in EMBEDS or data.stamp() == self._counted:
            return
        self._counted = data.stamp()
        text = few_labels({name: own + added for name, own, _, added in data.counts()})
        if text:
            self._log(text)

    def _tell_of(self, ref: ModelRef) -> None:
        """What was evaluated in an earlier life is evaluated again; what was rolled back stays so."""
        back = self._service.rolled_back
        if back is None or (back.model, back.round) != (ref.model, ref.round):
            return self._evaluate()
        self._told = ref.model
        self._reporter.report(evaluated_round=ref.round, failed=rolled_back(back, self._service.answering))

    def _tell(self, failed: str = "") -> None:
        self._reporter.report(
            evaluated_round=self._service.round, evaluations=self._evaluations, alone=self._alone, failed=failed
        )

    def tell_again(self) -> bool:
        """Repeats the last evaluations; False when there are none."""
        if self._evaluations:
            self._tell()
        return bool(self._evaluations)


def rolled_back(back: RolledBack, now: Answering | None) -> str:
    """Said here and to the aggregator."""
    text = f"the weights of round {back.round} were rolled back: {back.why}"
    return text if now is None else f"{text}; those of round {now.round} answer"
