"""The service of a device: installs and personalizes served models, switches to them, answers and evaluates. No torch.

The model that answers is replaced by one assignment in memory and one rename on the disk (``slots``): no answer mixes
two models. A new model answers only after a check: finite answers, and not much worse accuracy on the device's
held-back samples than before. A model that fails is rolled back, and not tried again until the next round.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_agent.device.local_samples import LocalData
from edge_agent.device.manifest_method import hyper_of
from edge_agent.device.slots import RolledBack, facts_of
from edge_agent.device.state import DeviceState, Weights
from edge_agent.inference import personalization
from edge_agent.inference.drift import DriftWatch
from edge_agent.inference.personalization import Personalization
from edge_agent.inference.personalizers import EMBEDS, Plan
from edge_agent.inference.predictor import Predictor
from edge_agent.inference.stored_models import Answering, Served, StoredModels, unpersonalized_predictor
from edge_agent.inference.worse_model_check import Evaluator, HeldBack, WorseModel, gives_probabilities
from fleet_core.algorithms.interface import Method
from fleet_core.base import schema
from fleet_core.base.errors import BundleError, CodecError, FleetError, MessageError, StateError
from fleet_core.board.device_settings import Personalize, Serve, Settings
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import Layout
from fleet_core.protocol.device_messages import Alone, Answer, Evaluation, Question
from fleet_core.protocol.round_messages import ModelRef
from fleet_core.tasks.anomaly import Anomaly
from fleet_core.tasks.labels import MultiLabel

if TYPE_CHECKING:
    from edge_agent.compute.worker import Job

Array = np.ndarray[Any, Any]


def service_of(home: Path, settings: Settings) -> Service:
    """The service of the device whose folder is ``home``."""
    return Service(DeviceState(home), schema.plain(settings.data), settings.personalize, settings.serve)


class Service:
    """data: the table ``[data]`` of device.toml. Several threads may call it; only one process at a time may load new
    weights."""

    def __init__(
        self, home: DeviceState, data: Mapping[str, Any], choice: Personalize | None = None, serve: Serve | None = None
    ):
        self.stored = StoredModels(home, data, choice or Personalize(), serve or Serve())
        self.slots = self.stored.slots
        self.graph: Graph | None = None
        self.graph_id: str | None = None
        self.model: str | None = None
        """Id of the latest served model; None if it must be fetched again."""
        self.round = 0
        """Round of the latest served model, whether it answers, is being personalized or was rolled back."""
        self.answering: Answering | None = None
        self.method: Method | None = None
        self._steps_by = "none"  # the personalizer whose gradient steps are being taken
        self._slot = ""  # of the latest served model
        self._unpersonalized: Predictor | None = None  # of the latest served model
        self._last_checked: Answering | None = None  # accepted or not
        self._evaluator = Evaluator()
        self._changing = threading.RLock()
        self.answered = 0
        """Number of samples answered since the start."""
        self.last_answer_s: float | None = None
        """Unix time of the last answer."""
        self._counting = threading.Lock()
        self._stamp: tuple[Any, ...] = ()
        self.drift = DriftWatch(home.folder)
        self.on_answer: Callable[[Answer, str], None] | None = None
        """Gets every answer that counts as one, and the id of the stored sample that it answers, or an empty text."""

    @property
    def layout(self) -> Layout:
        """The layout of the fleet's model. Raises BundleError before a graph has arrived."""
        if self.graph is None:
            raise BundleError("no graph has arrived yet", hint="wait for the aggregator, or check the broker's address")
        return self.graph.layout

    def install(self, graph_id: str, graph: Graph) -> None:
        """Sets the graph for the next weights. Its golden outputs are checked before it first answers, so that a device
        that only trains needs no onnxruntime. The present model answers until new weights arrive."""
        self.graph, self.graph_id = graph, graph_id
        self.stored.cache_graph(graph_id, graph)
        self.model, self._unpersonalized, self._last_checked = None, None, None

    def known_classes(self) -> tuple[str, ...]:
        """The fleet's classes, from the graph on disk. Raises StateError before one has arrived."""
        if self.graph is None:
            self.install(*self.stored.latest_graph())
        return self.layout.classes

    def checked_graph(self) -> Graph:
        """The graph. Raises BundleError before one has arrived, and if it does not give its golden outputs."""
        if self.graph is None:
            raise BundleError("no graph has arrived yet")
        self.stored.check_golden_outputs(self.graph_id or "", self.graph)
        return self.graph

    def local(self) -> LocalData:
        """The device's samples. Raises BundleError before a graph has arrived."""
        return self.stored.local(self.layout)

    def answers_with(self, ref: ModelRef, method: Method) -> bool:
        """Whether this is the latest model, even if it was rolled back. With personal groups, its round must match
        too."""
        back = self.rolled_back
        if back is not None and (back.model, back.round) == (ref.model, ref.round):
            return True
        return self.model == ref.model and (not method.personal or self.round == ref.round)

    @property
    def rolled_back(self) -> RolledBack | None:
        """The latest served model if it was rolled back."""
        return self.slots.pointer().rolled_back

    # New weights ------------------------------------------------------------------------------------------------------

    def plan(self, method: Method, hyper: Any, *, trainer: bool) -> Plan:
        """How to personalize new weights of this method (``StoredModels.plan``)."""
        return self.stored.plan(self.checked_graph(), method, hyper, trainer=trainer)

    def load(self, method: Method, hyper: Mapping[str, Any], weights: Weights, *, trainer: bool = False) -> Plan:
        """Takes new weights. If the plan needs no gradient steps, they are personalized and checked, and answer at
        once.

        Otherwise the caller lets the steps be taken and calls ``adapted``; until then the weights answer
        unpersonalized, unless a personalized model answers. Raises FleetError.
        """
        with self._changing:
            parameters = hyper_of(method, hyper)
            plan = self.plan(method, parameters, trainer=trainer)
            served = self._staged(method, hyper, parameters, weights)
            unpersonalized = unpersonalized_predictor(served.graph, method, served.weights)
            personal = self._from_samples(plan, served) if plan.kind in EMBEDS else None
            self.method, self.model, self.round = method, weights.model, weights.round
            self._unpersonalized, self._last_checked = unpersonalized, None
            self._steps_by, self._slot = plan.how, served.slot
            nothing_personalized = self.answering is None or self.answering.how == "none"
            if personal is not None:
                self._switch_if_good(personal, served)
            elif unpersonalized is not None and (plan.kind in ("none", "left") or nothing_personalized):
                self._switch_if_good(None, served)
            return plan

    def adapted(self, arrays: Mapping[str, Any], added: int) -> None:
        """Takes the personal weights after gradient steps, as ``group/name``. added: how many samples had been added.
        Raises StateError if they cannot be stored; the served model must then be fetched again."""
        with self._changing:
            model = self.model
            if model is None or self.slots.slot_of(model) == "":
                raise StateError("no model has been served to this device yet")
            self.model = None
            served = self.stored.served(self._slot)
            self._switch_if_good(self._after_steps(self._steps_by, served, arrays, added), served)
            self.model = model

    def adapted_again(
        self, arrays: Mapping[str, Any], now: Answering, how: str, added: int, base: tuple[Any, ...]
    ) -> bool:
        """Lets the model ``now`` answer with other personal weights, after gradient steps on more samples. how: the
        personalizer. added: as in ``adapted``. base, result and errors: as in ``switch_personalization``."""
        served = self.stored.served(now.slot)
        return self.switch_personalization(self._after_steps(how, served, arrays, added), served, base)

    def _after_steps(self, how: str, served: Served, arrays: Mapping[str, Any], added: int) -> Personalization:
        x = None if self.layout.task is None else self.local().every().x
        return personalization.from_weights(how, served.weights, self.layout.classes, arrays, x, added=added)

    def steps(self, plan: Plan, again: Answering | None = None) -> Job:
        """The adapter's job: gradient steps of the graph ``adapt`` on the latest served model, or ``again`` on one that
        answers."""
        from edge_agent.compute import adapter

        slot, model = (self._slot, self.model or "") if again is None else (again.slot, again.model)
        graph = self.stored.home.graph_path(self.graph_id or "")
        return adapter.job(graph, f"slots/{slot}/serve", model, self.local(), plan.steps, plan.rate)

    def _staged(self, method: Method, hyper: Mapping[str, Any], parameters: Any, weights: Weights) -> Served:
        """Writes the new weights to the slot that does not answer, and maps them from there: sessions then share the
        file's pages instead of each holding a copy. parameters: ``hyper`` as the method reads it."""
        graph, graph_id = self.checked_graph(), self.graph_id or ""
        with_facts = replace(weights, facts=facts_of(method.name, hyper, graph_id))
        with self.slots.writing():
            slot = self.slots.other()
            self.slots.stage(slot, with_facts)
        return Served(slot, method, parameters, self.slots.weights(slot) or with_facts, graph_id, graph)

    def _from_samples(self, plan: Plan, served: Served) -> Personalization:
        cached = None if self.answering is None else self.stored.personalization(self.answering.slot)
        return self.stored.personalize_from_samples(plan, served, cached)

    def _switch_if_good(self, personal: Personalization | None, served: Served) -> None:
        """Switches to the latest weights, or rolls them back."""
        try:
            new = self.stored.open(personal, served, unpersonalized=self._unpersonalized)
        except CodecError as error:  # the gradient steps diverged
            return self._roll_back(served.weights, str(error))
        self._last_checked = new
        good = gives_probabilities(new.predictor, self.checked_graph())
        why = self._why_worse(new) if good else f"its answers are not {_kind(new)}"
        if why:
            return self._roll_back(served.weights, why)
        with self.slots.writing():
            if personal is not None:
                personal.save(self.slots.path(served.slot, "personal"))
            self._switch(new)

    def _switch(self, new: Answering) -> None:
        """Lets ``new`` answer from now on, in memory and on the disk. The caller must hold the slots' lock."""
        pointer = self.slots.pointer()
        if pointer.slot != new.slot or pointer.rolled_back is not None:
            self.slots.point(replace(pointer, slot=new.slot, rolled_back=None))
        self.answering, self._stamp = new, self.slots.stamp()
        self.drift.begin(new.reference)

    def _why_worse(self, new: Answering) -> str:
        """Why ``new`` may not replace the model that answers; empty if it may."""
        before = self.answering
        if before is None or before.layout.hash != new.layout.hash:
            return ""
        worse_by = self.stored.serve.worse_by
        return self._evaluator.why_worse(new.predictor, before.predictor, self.local(), worse_by)

    def _roll_back(self, weights: Weights, why: str) -> None:
        with self.slots.writing():
            back = RolledBack(weights.model, weights.round, why[:500])
            self.slots.point(replace(self.slots.pointer(), rolled_back=back))
            self._stamp = self.slots.stamp()

    # From disk: answers without an aggregator -------------------------------------------------------------------------

    def restore(self) -> str:
        """Opens the model that answered last; if it is damaged, opens the model in the other slot, and returns why.
        Raises FleetError."""
        with self._changing:
            self._stamp, failed = self.slots.stamp(), None
            for slot in self.slots.in_order():
                try:
                    served = self.stored.served(slot)
                    self._adopt(served, self.stored.restored(served))
                    return "" if failed is None else f"the weights of round {self.round} answer: {failed}"
                except FleetError as error:
                    failed = failed or error
            if failed is not None:
                raise failed
            self.stored.served()  # raises, because no slot holds a model
            return ""

    def follow(self) -> bool:
        """Opens weights or a personalization that another process has written. True if something changed. Raises
        FleetError if the new model cannot answer; the present model then continues."""
        if self.slots.stamp() == self._stamp:
            return False
        with self._changing:
            stamp, slot = self.slots.stamp(), self.slots.pointer().slot
            if stamp == self._stamp or not slot:
                return False
            if self.answering is None:
                self.restore()
                return True
            self._stamp = stamp
            served = self.stored.served(slot)
            changed = self.stored.restored(served)
            if self.answering is None or self.model in (None, self.answering.model):
                self._adopt(served, changed)
            else:
                self.answering = changed  # a newer model is being personalized
            return True

    def _adopt(self, served: Served, opened: Answering) -> None:
        """Lets a slot's model answer, as the latest one."""
        if self.graph is None or self.graph_id != served.graph_id:
            self.install(served.graph_id, served.graph)
        self.answering, self.method, self._slot = opened, served.method, served.slot
        self.drift.begin(opened.reference)
        self.model, self.round = opened.model, opened.round

    def switch_personalization(self, personal: Personalization | None, served: Served, base: tuple[Any, ...]) -> bool:
        """Lets a slot's model answer with another personalization, in memory and on the disk. False, without a change,
        if the disk has changed since ``base`` (``Slots.stamp``).

        Raises FleetError, among them WorseModel if the held-back samples would be answered worse; nothing changes then.
        """
        with self._changing:
            new = self.stored.open(personal, served, self.answering)
            if not gives_probabilities(new.predictor, served.graph):
                raise StateError(f"the personalized model gives answers that are not {_kind(new)}")
            why = self._why_worse(new)
            if why:
                raise WorseModel(why)
            with self.slots.writing():
                if self.slots.stamp() != base:
                    return False
                if personal is None:
                    self.slots.drop_personal(served.slot)
                else:
                    personal.save(self.slots.path(served.slot, "personal"))
                self._switch(new)
            if self.model is None or self.model == new.model:
                self._adopt(served, new)
            return True

    # Answer and evaluate ----------------------------------------------------------------------------------------------

    @property
    def personalization(self) -> str:
        """The personalizer of the latest served model; ``none`` if it does not answer."""
        now = self.answering
        return now.how if now is not None and self._is_latest(now) else "none"

    @property
    def graph_that_answers(self) -> str:
        """As ``Answering.graph``; empty if nothing answers."""
        return "" if self.answering is None else self.answering.graph

    @property
    def answers_as_it_is(self) -> bool:
        """Whether the latest served model can answer unpersonalized."""
        return self._unpersonalized is not None

    def _is_latest(self, opened: Answering) -> bool:
        return (opened.model, opened.round) == (self.model, self.round)

    def answer(self, question: Question) -> Answer:
        """The answer to a question. Raises FleetError if there is none."""
        try:
            raw = base64.b64decode(question.x, validate=True)
            x = np.frombuffer(raw, dtype=np.dtype(question.dtype).newbyteorder("<")).reshape(question.shape)
        except ValueError as error:
            raise MessageError(f"the question's array is malformed: {error}") from error
        return self.answers(x.astype(question.dtype))

    def answers(self, x: Array, *, again: bool = False, name: str = "") -> Answer:
        """Labels and probabilities, or numbers, of raw samples [n, *shape], with their model and personalization.
        Images of another size and sound are prepared first. again: of stored samples, which are not counted as
        questions, nor watched for drift. name: id of the one sample, if it is stored. Raises StateError if no model
        can answer, DataError."""
        now = self._answering()
        answer = now.answer(
            self.stored.as_input(now.layout, x), None if again else self.drift.see, self._thresholds(now))
        if again:
            return answer
        with self._counting:
            self.answered, self.last_answer_s = self.answered + answer.samples, time.time()
        if self.on_answer is not None:
            self.on_answer(answer, name)
        return answer

    def _thresholds(self, now: Answering) -> tuple[float, ...]:
        """Those of the model ``now``, which the held-back samples give."""
        if not isinstance(now.layout.task, MultiLabel | Anomaly):
            return ()
        return self._evaluator.thresholds(now.predictor, self.stored.local(now.layout))

    def predict(self, x: Array) -> Array:
        """Class probabilities float32 [n, N], or numbers float64 [n, K], of raw samples. Raises StateError if no model
        can answer, DataError."""
        now = self._answering()
        return now.predictor.probabilities(self.stored.as_input(now.layout, x))

    def _answering(self) -> Answering:
        if self.answering is None:
            raise self.stored.not_personalized(self.stored.served())
        return self.answering

    def evaluate(self) -> list[Evaluation]:
        """Confusion counts, or errors, of the latest served model on the held-back samples, before and after
        personalization, even if it was rolled back. Empty if nothing is held back."""
        stages = {"before": self._unpersonalized}
        latest = self._last_checked or self.answering
        if latest is not None and latest.how != "none" and self._is_latest(latest):
            stages["after"] = latest.predictor
        evaluations = self._evaluator.evaluations(stages, "" if self.method is None else self.method.name, self.local())
        if "after" in stages:
            self._unpersonalized = None  # frees its session
        self._last_checked = None
        return evaluations

    def alone(self) -> Alone | None:
        """The baseline without the fleet on the held-back samples; None if it cannot be computed."""
        return self._evaluator.baseline(self.local())

    @property
    def calibration_error(self) -> float | None:
        """That of the model that answers, as ``Evaluator.calibration_error``."""
        return None if self.answering is None else self._evaluator.calibration_error(self.answering.predictor)

    def held_back(self) -> HeldBack | None:
        """How the model that answers does on the held-back samples; None if nothing answers or nothing is held back."""
        return None if self.answering is None else self._evaluator.held_back(self.answering.predictor, self.local())


def _kind(answering: Answering) -> str:
    """What the answers should be."""
    return "probabilities" if answering.layout.task is None else "finite"
