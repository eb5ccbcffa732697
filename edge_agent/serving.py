"""From a judged model to this device's own answers: fetched or at hand, personalized, judged, and told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edge_agent.accounts import Accounts
from edge_agent.fetcher import Fetcher
from edge_agent.home import Weights
from edge_agent.methods import hyper_of, method_of
from edge_agent.models import MAX_MODEL_BYTES, Models
from edge_agent.reporter import Reporter
from edge_agent.service import NO_TRAINER, Service, by_trainer
from edge_agent.worker import Done, Job, Trainer
from fleet_core.algorithms.seam import Method
from fleet_core.errors import RoundError
from fleet_core.messages import Judgement, Manifest, ModelRef


class Serving:
    """``header(manifest)`` is what the trainer is told of a job; without a trainer gradient steps are left out."""

    def __init__(
        self, service: Service, models: Models, fetcher: Fetcher, accounts: Accounts, reporter: Reporter,
        trainer: Trainer | None, header: Callable[[Manifest], dict[str, Any]], log: Callable[[str], None],
    ):
        self._service, self._models, self._fetcher = service, models, fetcher
        self._accounts, self._reporter = accounts, reporter
        self._trainer, self._header, self._log = trainer, header, log
        self._adapting = ""  # the model that the trainer personalizes
        self._judgements: tuple[Judgement, ...] = ()

    def want(self, manifest: Manifest, ref: ModelRef) -> None:
        """The judged model, from here or from the broker; what the trainer must do for it waits until it is free."""
        if self._service.answers_with(ref, method_of(manifest)):
            return
        held = self._models.weights(ref.model)
        if held is not None:
            return self._personalize(manifest, Weights(ref.model, ref.round, held.params))
        self._models.judged = None
        blob = self._models.blob_for(ref)
        if blob is not None and self._fetcher.target is None:
            self._fetcher.start(blob, MAX_MODEL_BYTES, "serve")

    def _personalize(self, manifest: Manifest, weights: Weights) -> None:
        """What needs no torch at once; gradient steps in the trainer, when it is free."""
        method, trainer = method_of(manifest), self._trainer
        if by_trainer(method, hyper_of(method, manifest.method.hyper)) and trainer is not None and trainer.busy:
            return
        by_gradient = self._service.load(method, manifest.method.hyper, weights)
        self._models.judged = None
        if by_gradient and trainer is not None:
            self._accounts.begin("adapt")
            self._adapting = weights.model
            return trainer.submit(Job("adapt", self._header(manifest)))
        self._judge(self._without_trainer(method) if by_gradient else "")

    def _without_trainer(self, method: Method) -> str:
        """Said here and to the aggregator: what the device cannot do."""
        text = f"{method.name} makes a device's own weights by gradient steps, and there is no trainer here: "
        text += "the fleet's model answers as it is" if self._service.answers_as_it_is else "there are no answers"
        self._log(f"{text} ({NO_TRAINER})")
        return text

    def adapted(self, done: Done) -> None:
        """What the trainer made of the served model, unless another is served by now. Raises RoundError."""
        if self._adapting != self._service.model:
            return
        if done.error:
            self._service.model = None  # wanted anew with the next manifest
            raise RoundError(f"personalization failed: {done.error}")
        self._service.adapted(done.arrays)
        self._judge()

    def _judge(self, failed: str = "") -> None:
        """The new predictor answers from now on; how it does on this device's later samples is reported."""
        self._accounts.begin("serve")
        try:
            self._judgements = tuple(self._service.judge())
        finally:
            self._accounts.end("serve")
        self._tell(failed)

    def _tell(self, failed: str = "") -> None:
        self._reporter.report(judged_round=self._service.round, judgements=self._judgements, failed=failed)

    def tell_again(self) -> bool:
        """Repeats the last judgements; False when there are none."""
        if self._judgements:
            self._tell()
        return bool(self._judgements)
