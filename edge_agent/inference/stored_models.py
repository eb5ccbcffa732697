"""Opens the models that are stored in a device's slots: weights with their graph and their personalization.

Nothing here changes which model answers; ``service`` does.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.compute.onnx_session import check_golden, runtime_version
from edge_agent.device.local_samples import LocalData, as_input
from edge_agent.device.manifest_method import hyper_of
from edge_agent.device.slots import Slots
from edge_agent.device.state import DeviceState, Weights
from edge_agent.inference import personalization
from edge_agent.inference.drift import Known
from edge_agent.inference.personalization import Personalization
from edge_agent.inference.personalizers import EMBEDS, Plan, answers_unpersonalized, plan_of
from edge_agent.inference.predictor import Predictor
from fleet_core.algorithms.interface import Method
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.algorithms.plugins import OR_INSTALL
from fleet_core.base import trees
from fleet_core.base.errors import DataError, StateError
from fleet_core.board.device_settings import Personalize, Serve
from fleet_core.model import graph_bundle
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import MODEL_GROUPS, Layout
from fleet_core.protocol.device_messages import Answer
from fleet_core.tasks.labels import MultiLabel

NO_TRAINER = 'its trainer needs torch: pip install "metafleet[train]"'


@dataclass(frozen=True, eq=False)
class Answering:
    """The model that answers.

    model, round: id and round of the served model that it was made from. how: its personalizer, or ``none``. classes:
    the classes of the probabilities, first the fleet's and then the device's own; empty with a task. slot: where it is
    stored. graph: ``embed`` or ``embed-int8``, which embeds the device's samples and the queries; ``predict`` if
    nothing is embedded. reference: of the samples that it was personalized on, to notice drift; None with classes if
    nothing is embedded, or if samples are too few.
    """

    predictor: Predictor
    model: str
    round: int
    how: str
    layout: Layout
    classes: tuple[str, ...]
    slot: str
    graph: str
    reference: Known | None = None

    @property
    def detects_unknown(self) -> bool:
        """Whether answers say which samples are of an unknown class."""
        return self.predictor.unknown_detector is not None

    def answer(
        self, x: np.ndarray[Any, Any], see: Callable[[Known, np.ndarray[Any, Any]], None] | None = None,
        thresholds: tuple[float, ...] = (),
    ) -> Answer:
        """Labels and probabilities, or numbers, of raw samples [n, *shape]. see: called with the reference and the
        embedded samples, of a task the samples. thresholds: as in ``Measured``. Raises DataError, StateError."""
        out, z = self.predictor.outputs(x)
        probabilities, unknown = self.predictor.of_outputs(out, z)
        task = self.layout.task
        if see is not None and self.reference is not None:
            see(self.reference, z if task is None else x)
        if isinstance(task, MultiLabel):
            return Answer(
                outputs=task.outputs, label_sets=tuple(task.chosen(row, thresholds) for row in probabilities),
                thresholds=thresholds,
                probabilities=tuple(tuple(round(float(p), 6) for p in row) for row in probabilities),
                round=self.round, model=self.model, personalization=self.how, graph=self.graph,
            )
        if task is not None:
            threshold = thresholds[0] if thresholds else None
            return Answer(
                outputs=task.outputs,
                values=tuple(tuple(float(f"{number:.7g}") for number in row) for row in probabilities),
                threshold=threshold,
                alarms=() if threshold is None else tuple(map(bool, probabilities[:, 0] > threshold)),
                round=self.round, model=self.model, personalization=self.how, graph=self.graph,
            )
        return Answer(
            labels=tuple(self.classes[k] for k in probabilities.argmax(1)),
            probabilities=tuple(tuple(round(float(p), 6) for p in row) for row in probabilities),
            unknown=() if unknown is None else tuple(map(bool, unknown)),
            round=self.round,
            model=self.model,
            personalization=self.how,
            classes=self.classes if len(self.classes) > len(self.layout.classes) else (),
            graph=self.graph,
        )


@dataclass(frozen=True, eq=False)
class Served:
    """A served model in its slot. hyper: the method's hyper-parameters. graph: the graph that the weights fit."""

    slot: str
    method: Method
    hyper: Any
    weights: Weights
    graph_id: str
    graph: Graph


class StoredModels:
    """data: the table ``[data]`` of device.toml; choice, serve: its tables ``[personalize]`` and ``[serve]``."""

    def __init__(self, home: DeviceState, data: Mapping[str, Any], choice: Personalize, serve: Serve):
        self.home, self.slots, self.serve = home, Slots(home), serve
        self._data, self._choice = dict(data), choice
        self._graph: tuple[str, Graph] | None = None
        self._checked: set[str] = set()

    def local(self, layout: Layout) -> LocalData:
        """The device's samples, with the layout's classes."""
        return LocalData.of(self.home.folder, self._data["samples"], layout, self._data)

    def as_input(self, layout: Layout, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Raw samples [n, *shape] as the model takes them: features, where it has a backbone. Raises FleetError."""
        return as_input(self.home.folder, layout, x)

    # Graphs -----------------------------------------------------------------------------------------------------------

    def graph_path(self, weights: Weights | None) -> Path | None:
        """The file of the graph that ``weights`` fit, or else of the latest graph; None if there is none."""
        graph = "" if weights is None else weights.facts.get("graph", "")
        path = self.home.graph_path(graph)
        return path if graph and path.exists() else self.home.latest_graph()

    def latest_graph(self) -> tuple[str, Graph]:
        """(id, graph) of the model that answers, or the latest one. Raises StateError if there is none, BundleError."""
        path = self.graph_path(self.slots.weights())
        if path is None or not path.exists():
            raise StateError(
                "the fleet's classes are not known here yet", where=str(self.home.folder),
                hint="run 'edge-agent run' once while the aggregator is up",
            )
        return self.graph_at(path)

    def graph_at(self, path: Path) -> tuple[str, Graph]:
        """(id, graph) in a file. Raises BundleError."""
        graph_id = path.stem.partition("-")[2]
        if self._graph is None or self._graph[0] != graph_id:
            self._graph = graph_id, graph_bundle.read(path)
        return self._graph

    def cache_graph(self, graph_id: str, graph: Graph) -> None:
        self._graph = graph_id, graph

    def check_golden_outputs(self, graph_id: str, graph: Graph) -> None:
        """Checks a graph once per version of onnxruntime. Raises BundleError."""
        mark = f"{graph_id} {runtime_version()}"
        if mark not in self._checked and self.slots.pointer().checked != mark:
            check_golden(graph)
            with contextlib.suppress(StateError), self.slots.writing():  # if not written, it is checked again
                self.slots.point(replace(self.slots.pointer(), checked=mark))
        self._checked.add(mark)

    # Slots ------------------------------------------------------------------------------------------------------------

    def served(self, slot: str = "") -> Served:
        """The served model in ``slot``, or in the first slot that holds one. Raises FleetError."""
        slot = slot or next(iter(self.slots.in_order()), "")
        weights = self.slots.weights(slot) if slot else None
        pointer, path = self.slots.pointer(), self.graph_path(weights)
        back = pointer.rolled_back
        refused = back is not None and weights is not None and back.model == weights.model and slot != pointer.slot
        if weights is None or path is None or refused:
            raise StateError(
                "no model has been served to this device yet", where=str(self.home.folder),
                hint="run 'edge-agent run' until a round was served",
            )
        method, hyper = _method_of(weights, str(self.slots.path(slot, "serve")))
        return Served(slot, method, hyper, weights, *self.graph_at(path))

    def personalization(self, slot: str) -> Personalization | None:
        """The personalization in ``slot``; None if it is damaged or was made for other weights."""
        try:
            personal = Personalization.load(self.slots.path(slot, "personal"))
        except StateError:
            return None
        if personal.int8 and not self.slots.int8(slot):
            return None
        return personal if personal.model == self.home.held(f"slots/{slot}/serve") else None

    def restored(self, served: Served) -> Answering:
        """The model in a slot with its personalization, which is made again if it is missing and samples are enough to
        make it. Raises FleetError."""
        personal = self.personalization(served.slot)
        if personal is None or personal.round != served.weights.round:
            plan = self.plan(served.graph, served.method, served.hyper)
            if plan.kind not in EMBEDS and not answers_unpersonalized(served.method, served.graph):
                raise self.not_personalized(served)
            personal = self.personalize_from_samples(plan, served) if plan.kind in EMBEDS else None
        return self.open(personal, served)

    # Personalization --------------------------------------------------------------------------------------------------

    def plan(
        self, graph: Graph, method: Method, hyper: Any, *, trainer: bool = False, choice: Personalize | None = None
    ) -> Plan:
        """How to personalize weights of this method. hyper: from ``hyper_of``. trainer: a trainer is available. choice:
        replaces the user's stored choice. Raises ConfigError."""
        trained, chosen = self.home.trained_by(method.name), choice or self.slots.choice() or self._choice
        return plan_of(chosen, method, hyper, graph, trainer=trainer, trained=trained)

    def personalize_from_samples(
        self, plan: Plan, served: Served, cached: Personalization | None = None
    ) -> Personalization:
        """A personalization from all samples of this device, with the int8 encoder if the plan asks for it and the slot
        has it. cached: an earlier one, whose embeddings may be reused. Raises FleetError."""
        self.check_golden_outputs(served.graph_id, served.graph)
        data = self.local(served.graph.layout)
        personal = personalization.from_samples(
            plan, served.graph, served.weights, data.every(), cached, quantile=self.serve.unknown_quantile,
            int8=self.slots.int8(served.slot) if plan.int8 else b"",
        )  # fmt: skip
        return replace(personal, settings={**personal.settings, "added": data.added()})

    def open(
        self, personal: Personalization | None, served: Served, before: Answering | None = None, *,
        unpersonalized: Predictor | None = None,
    ) -> Answering:
        """The served model with ``personal``, or unpersonalized for None. before: the model that answers now, whose
        sessions are reused if they are the same. unpersonalized: the open predictor of ``served``, if there is one.
        Raises FleetError."""
        self.check_golden_outputs(served.graph_id, served.graph)
        weights, layout = served.weights, served.graph.layout
        if personal is None or personal.how == "none":
            predictor = unpersonalized or Predictor.head(served.graph, trees.only(weights.params, MODEL_GROUPS))
            return Answering(
                predictor, weights.model, weights.round, "none", layout, layout.classes, served.slot, "predict"
            )
        needs_samples = personal.how in ("knn", "gp", "auto") and personal.support is None
        same_weights = before is not None and (before.model, before.slot) == (weights.model, served.slot)
        reused = before.predictor if before is not None and same_weights and before.graph == personal.graph else None
        predictor = personalization.open_predictor(
            personal, served.graph, weights, unknown=self.serve.unknown,
            samples=self.local(layout).every() if needs_samples else None,
            int8=self.slots.int8(served.slot) if personal.int8 and reused is None else b"",
            before=reused if personal.embeds else None,
        )  # fmt: skip
        return Answering(
            predictor, weights.model, weights.round, personal.how, layout, personal.classes, served.slot,
            personal.graph, personal.reference(layout.task),
        )

    def not_personalized(self, served: Served) -> StateError:
        """The error if the method cannot answer without a personalization and none is there; it says what to do."""
        plan = self.plan(served.graph, served.method, served.hyper)
        of = "from its own samples" if plan.kind in EMBEDS else "with weights of its own"
        what, hint = f"with {served.method.name} a device answers {of}", "edge-agent personalize"
        try:
            self.local(served.graph.layout).every()
        except DataError as error:
            what, hint = f"{what}, and {error.what}", "'edge-agent samples add', then 'edge-agent personalize'"
        else:
            what = f"{what}, which are not made yet"
            hint = hint if plan.kind in ("steps", *EMBEDS) else NO_TRAINER
        return StateError(what, where=str(self.home.folder), hint=hint)


def unpersonalized_predictor(graph: Graph, method: Method, weights: Weights) -> Predictor | None:
    """The predictor of unpersonalized weights; None if they are not a complete model. Raises BundleError,
    CodecError."""
    if not answers_unpersonalized(method, graph):
        return None
    return Predictor.head(graph, trees.only(weights.params, MODEL_GROUPS))


def _method_of(weights: Weights, where: str) -> tuple[Method, Any]:
    """The method of stored weights and its hyper-parameters. Raises StateError, ConfigError."""
    name = weights.facts.get("method", "")
    method = METHODS.get(name)
    if method is None:
        raise StateError(f"is of method {name[:64]}, which is unknown here", where=where,
                         hint=f"update this agent{OR_INSTALL}")
    try:
        return method, hyper_of(method, json.loads(weights.facts["hyper"]))
    except (KeyError, ValueError, RecursionError) as error:
        raise StateError("its hyper-parameters are missing or damaged", where=where,
                         hint="'edge-agent run' fetches it again") from error
