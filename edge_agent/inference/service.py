"""The device's own answers: the graph once, the served model's weights, this device's personalization; no torch.

What answers is replaced in one assignment, and on the disk by one rename (``slots``), so an answer comes from one model
or the other, never from half of both. New weights answer only after they passed their check: finite answers, and the
device's held-back samples answered not much worse than before. Those that fail are rolled back: they are not tried
again until the next round.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_agent.device.local_samples import LocalData
from edge_agent.device.manifest_method import hyper_of
from edge_agent.device.slots import RolledBack, facts_of
from edge_agent.device.state import DeviceState, Weights
from edge_agent.inference import personal_files as owns
from edge_agent.inference.model_check import Evaluator, WorseModel, finite
from edge_agent.inference.personal_files import PersonalFiles
from edge_agent.inference.personalizers import EMBEDS, Plan, is_whole
from edge_agent.inference.predictor import Predictor
from edge_agent.inference.stored_models import Answering, Served, StoredModels
from fleet_core.algorithms.interface import Method
from fleet_core.base import schema, trees
from fleet_core.base.errors import BundleError, CodecError, FleetError, MessageError, StateError
from fleet_core.board.device_settings import Personalize, Serve, Settings
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import MODEL_GROUPS, Layout
from fleet_core.protocol.device_messages import Alone, Answer, Evaluation, Question
from fleet_core.protocol.round_messages import ModelRef

if TYPE_CHECKING:
    from edge_agent.compute.worker import Job


def service_of(home: Path, settings: Settings) -> Service:
    """The service of the device whose folder is ``home``."""
    return Service(DeviceState(home), schema.plain(settings.data), settings.personalize, settings.serve)


class Service:
    """Installs graphs and weights, evaluates and answers. data: the table ``[data]`` of device.toml. Called by several
    threads; one process at a time loads new weights."""

    def __init__(
        self, home: DeviceState, data: Mapping[str, Any], choice: Personalize | None = None, serve: Serve | None = None
    ):
        self.shelf = StoredModels(home, data, choice or Personalize(), serve or Serve())
        self.slots = self.shelf.slots
        self.graph: Graph | None = None
        self.graph_id: str | None = None
        self.model: str | None = None
        """Id of the served model that came last; None for one that is wanted anew."""
        self.round = 0
        """The round of the served model that came last: it answers, is being made the device's own, or was refused."""
        self.answering: Answering | None = None
        self.method: Method | None = None
        self._how = "none"  # what the steps that are under way will be called
        self._slot = ""  # where the model that came last lies
        self._plain: Predictor | None = None
        self._latest: Answering | None = None  # the last that was checked, whether it answers or not
        self._evaluator = Evaluator()
        self._changing = threading.RLock()
        self._stamp: tuple[Any, ...] = ()

    @property
    def layout(self) -> Layout:
        """Raises BundleError before a graph came."""
        if self.graph is None:
            raise BundleError("no graph has arrived yet", hint="wait for the aggregator, or check the broker's address")
        return self.graph.layout

    def install(self, graph_id: str, graph: Graph) -> None:
        """Takes a graph. Before it answers anything it must give its golden outputs here: onnxruntime and its memory
        are not needed on a device that only trains. What answered before goes on until weights came."""
        self.graph, self.graph_id = graph, graph_id
        self.shelf.hold(graph_id, graph)
        self.model, self._plain, self._latest = None, None, None

    def known_classes(self) -> tuple[str, ...]:
        """The fleet's classes, from the graph on disk. Raises StateError before one came."""
        if self.graph is None:
            path = self.shelf.graph_path(self.slots.weights())
            if path is None or not path.exists():
                raise StateError(
                    "the fleet's classes are not known here yet", where=str(self.slots.folder.parent),
                    hint="run 'edge-agent run' once while the aggregator is up",
                )
            self.install(*self.shelf.graph_at(path))
        return self.layout.classes

    def local(self) -> LocalData:
        """The device's samples. Raises BundleError before a graph came."""
        return self.shelf.local(self.layout)

    def answers_with(self, ref: ModelRef, method: Method) -> bool:
        """Whether this model came last, or was rolled back; where groups stay on the device, as in its round."""
        back = self.rolled_back
        if back is not None and (back.model, back.round) == (ref.model, ref.round):
            return True
        return self.model == ref.model and (not method.personal or self.round == ref.round)

    @property
    def rolled_back(self) -> RolledBack | None:
        """The served model that was tried last and is not tried again, if it was."""
        return self.slots.pointer().rolled_back

    # New weights ------------------------------------------------------------------------------------------------------

    def plan(self, method: Method, hyper: Any, *, trainer: bool) -> Plan:
        """What is to make new weights of this method the device's own, as ``Shelf.plan`` says."""
        return self.shelf.plan(self.checked_graph(), method, hyper, trainer=trainer)

    def load(self, method: Method, hyper: Mapping[str, Any], weights: Weights, *, trainer: bool = False) -> Plan:
        """New weights to answer with. What needs no gradient steps is personalized, checked and answers at once;
        for others the plan says who is still to take them (``adapted`` brings what comes of it). Until then the
        weights answer as they are, if what answered before was not the device's own. Raises FleetError."""
        with self._changing:
            read = hyper_of(method, hyper)
            plan = self.plan(method, read, trainer=trainer)
            graph, graph_id, plain = self.checked_graph(), self.graph_id or "", self._plain_of(method, weights)
            kept = replace(weights, facts=facts_of(method.name, hyper, graph_id))
            with self.slots.writing():
                served = Served(self.slots.other(), method, read, kept, graph_id, graph)
                self.slots.stage(served.slot, kept)
            own = self._of_samples(plan, served) if plan.kind in EMBEDS else None
            self.method, self._plain, self._latest, self._how, self._slot = method, plain, None, plan.how, served.slot
            self.model, self.round = weights.model, weights.round
            if own is not None:
                self._offer(own, served)
            elif plain is not None and (plan.kind in ("none", "left") or self._not_own):
                self._offer(None, served)
            return plan

    def adapted(self, arrays: Mapping[str, Any]) -> None:
        """The device's own weights, made from its samples; they stay here. Raises StateError when they cannot be
        kept: then the weights are wanted anew."""
        with self._changing:
            model = self.model
            if model is None or self.slots.slot_of(model) == "":
                raise StateError("no model has been served to this device yet")
            self.model = None
            served = self.shelf.served(self._slot)
            self._offer(owns.of_weights(self._how, served.weights, self.layout.classes, arrays), served)
            self.model = model

    def steps(self, plan: Plan) -> Job:
        """The gradient steps of the graph ``adapt`` on the model that came last, as a job for the adapter."""
        from edge_agent.compute import adapter

        graph = self.shelf.home.graph_path(self.graph_id or "")
        return adapter.job(graph, f"slots/{self._slot}/serve", self.model or "", self.local(), plan.steps, plan.rate)

    def _of_samples(self, plan: Plan, served: Served) -> PersonalFiles:
        known = None if self.answering is None else self.shelf.kept(self.answering.slot)
        return self.shelf.of_samples(plan, served, known)

    @property
    def _not_own(self) -> bool:
        return self.answering is None or self.answering.how == "none"

    def _plain_of(self, method: Method, weights: Weights) -> Predictor | None:
        """The weights as they are, where they answer by themselves."""
        if not is_whole(method, self.checked_graph()):
            return None
        return Predictor.head(self.checked_graph(), trees.only(weights.params, MODEL_GROUPS))

    def _offer(self, own: PersonalFiles | None, served: Served) -> None:
        """The weights that came last, personalized or as they are, answer from now on, if they may."""
        try:
            found = self.shelf.opened(own, served)
        except CodecError as error:  # steps that ran away
            return self._roll_back(served.weights, str(error))
        self._latest = found
        why = self._ill(found)
        if why:
            return self._roll_back(served.weights, why)
        with self.slots.writing():
            if own is not None:
                own.save(self.slots.path(served.slot, "personal"))
            self._turn(found)

    def _turn(self, found: Answering) -> None:
        """What answers from now on, here and on the disk; the lock is held."""
        pointer = self.slots.pointer()
        if pointer.slot != found.slot or pointer.rolled_back is not None:
            self.slots.point(replace(pointer, slot=found.slot, rolled_back=None))
        self.answering, self._stamp = found, self.slots.stamp()

    def _ill(self, found: Answering) -> str:
        """Why it may not answer; empty where it may."""
        if not finite(found.predictor, self.checked_graph()):
            return "answers that are no probabilities"
        return self._worse(found)

    def _worse(self, found: Answering) -> str:
        """Why it may not answer in the place of what answers now; empty where it may."""
        before = self.answering
        if before is None or before.layout.hash != found.layout.hash:
            return ""
        return self._evaluator.worse(found.predictor, before.predictor, self.local(), self.shelf.serve.worse_by)

    def _roll_back(self, weights: Weights, why: str) -> None:
        with self.slots.writing():
            back = RolledBack(weights.model, weights.round, why[:500])
            self.slots.point(replace(self.slots.pointer(), rolled_back=back))
            self._stamp = self.slots.stamp()

    def checked_graph(self) -> Graph:
        """Raises BundleError before a graph came, and for one that does not give its golden outputs."""
        if self.graph is None:
            raise BundleError("no graph has arrived yet")
        self.shelf.check(self.graph_id or "", self.graph)
        return self.graph

    # From disk: answers without an aggregator -------------------------------------------------------------------------

    def restore(self) -> str:
        """The graph, weights and personalization that this device last answered with; where they are damaged, what it
        answered with before. Why those, or nothing. Raises FleetError."""
        with self._changing:
            self._stamp, failed = self.slots.stamp(), None
            for slot in self.slots.in_order():
                try:
                    served = self.shelf.served(slot)
                    self._take(served, self.shelf.restored(served))
                    return "" if failed is None else f"the weights of round {self.round} answer: {failed}"
                except FleetError as error:
                    failed = failed or error
            if failed is not None:
                raise failed
            self.shelf.served()  # says that there is none
            return ""

    def follow(self) -> bool:
        """Takes up what another process has put on the disk since: weights, or a personalization. True when something
        changed. Raises FleetError for what cannot answer; what answered before stays."""
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
            served = self.shelf.served(slot)
            found = self.shelf.restored(served)
            if self.answering is None or self.model in (None, self.answering.model):
                self._take(served, found)
            else:
                self.answering = found  # a newer model is being made the device's own
            return True

    def _take(self, served: Served, found: Answering) -> None:
        """A slot's model answers, and none that is newer is under way."""
        if self.graph is None or self.graph_id != served.graph_id:
            self.install(served.graph_id, served.graph)
        self.answering, self.method, self._slot = found, served.method, served.slot
        self.model, self.round = found.model, found.round

    def take_up(self, own: PersonalFiles | None, served: Served, base: tuple[Any, ...]) -> bool:
        """A personalization of the model in a slot answers from now on, here and on the disk; False where the disk is
        not as it was at ``base`` (``Slots.stamp``). Raises FleetError, of which Worse where the held-back samples
        would be answered worse: then nothing has changed."""
        with self._changing:
            found = self.shelf.opened(own, served, self.answering)
            if not finite(found.predictor, served.graph):
                raise StateError("the personalized model gives answers that are no probabilities")
            why = self._worse(found)
            if why:
                raise WorseModel(why)
            with self.slots.writing():
                if self.slots.stamp() != base:
                    return False
                if own is None:
                    self.slots.drop_personal(served.slot)
                else:
                    own.save(self.slots.path(served.slot, "personal"))
                self._turn(found)
            if self.model is None or self.model == found.model:
                self._take(served, found)
            return True

    # Evaluate and answer ----------------------------------------------------------------------------------------------

    @property
    def personalization(self) -> str:
        """How the answers of the model that came last are the device's own: ``none``, or its method's personalizer."""
        now = self.answering
        return now.how if now is not None and (now.model, now.round) == (self.model, self.round) else "none"

    @property
    def graph_that_answers(self) -> str:
        """As ``Answering.graph``; empty while nothing answers."""
        return "" if self.answering is None else self.answering.graph

    @property
    def answers_as_it_is(self) -> bool:
        """Whether the model that came last answers by itself, before anything makes it the device's own."""
        return self._plain is not None

    def evaluate(self) -> list[Evaluation]:
        """Confusion counts on the later samples, which nothing here has learned from, of the model that came last, also
        where it was rolled back; empty when there are none."""
        data, evaluations = self.local(), []
        stages = [("before", self._plain)]
        found = self._latest or self.answering
        if found is not None and found.how != "none" and (found.model, found.round) == (self.model, self.round):
            stages.append(("after", found.predictor))
        for stage, predictor in stages:
            counts = None if predictor is None else self._evaluator.counts(predictor, data)
            if counts is not None:
                rows = tuple(tuple(int(v) for v in row) for row in counts)
                evaluations.append(Evaluation(stage, "" if self.method is None else self.method.name, rows))
        if len(stages) > 1:
            self._plain = None  # its session is not needed any more
        self._latest = None
        return evaluations

    def alone(self) -> Alone | None:
        """What this device could answer on the same samples without the fleet; None where that cannot be told."""
        return self._evaluator.alone(self.local())

    def held_back(self, predictor: Predictor) -> tuple[int, float] | None:
        """(samples, accuracy) on the later samples; None when there are none."""
        counts = self._evaluator.counts(predictor, self.local())
        return None if counts is None else (int(counts.sum()), float(np.trace(counts) / counts.sum()))

    def predict(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Class probabilities float32 [n, N] of raw samples. Raises StateError before there is something to answer
        with."""
        return self._answering().predictor.probabilities(x)

    def _answering(self) -> Answering:
        if self.answering is not None:
            return self.answering
        raise self.shelf.not_made(self.shelf.served())

    def answer(self, question: Question) -> Answer:
        """Raises FleetError for a question that has no answer."""
        try:
            raw = base64.b64decode(question.x, validate=True)
            x = np.frombuffer(raw, dtype=np.dtype(question.dtype).newbyteorder("<")).reshape(question.shape)
        except ValueError as error:
            raise MessageError(f"the question's array is malformed: {error}") from error
        return self.answers(x.astype(question.dtype))

    def answers(self, x: np.ndarray[Any, Any]) -> Answer:
        """Labels and probabilities of raw samples, and which model and personalization they are from."""
        now = self._answering()
        probabilities, unknown = now.predictor.answers(x)
        labels = tuple(now.classes[k] for k in probabilities.argmax(1))
        rows = tuple(tuple(round(float(p), 6) for p in row) for row in probabilities)
        told = () if unknown is None else tuple(map(bool, unknown))
        classes = now.classes if len(now.classes) > len(now.layout.classes) else ()
        return Answer(labels, rows, told, now.round, now.model, now.how, classes=classes, graph=now.graph)
