"""What a device has on its disk to answer with, opened: a slot's weights with their graph and personalization.

Nothing here changes what answers; ``service`` does.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_agent.compute.onnx_session import check_golden, runtime_version
from edge_agent.device.local_samples import LocalData
from edge_agent.device.manifest_method import hyper_of
from edge_agent.device.slots import Slots
from edge_agent.device.state import DeviceState, Weights
from edge_agent.inference import personal_files as owns
from edge_agent.inference.personal_files import PersonalFiles
from edge_agent.inference.personalizers import EMBEDS, Plan, is_whole, plan_of
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

NO_TRAINER = 'its trainer needs torch: pip install "metafleet[train]"'


@dataclass(frozen=True, eq=False)
class Answering:
    """What answers. model, round: of the served model that it was made from. how: it is the device's own, ``none``
    where it is not. classes: of the probabilities, the fleet's and then the device's own. slot: where it lies. graph:
    ``embed`` or ``embed-int8``, which embedded the device's samples and embeds those that are asked for; ``predict``
    where none are."""

    predictor: Predictor
    model: str
    round: int
    how: str
    layout: Layout
    classes: tuple[str, ...]
    slot: str
    graph: str

    @property
    def tells_unknown(self) -> bool:
        """Whether the answers say which samples are of no class that is known here."""
        return self.predictor.familiar is not None


@dataclass(frozen=True, eq=False)
class Served:
    """A served model in its slot: its method, that one's hyper-parameters, its weights, and the graph that they fit."""

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
        """The device's samples, of the layout's classes."""
        return LocalData.of(self.home.folder / self._data["samples"], layout, self._data)

    # Graphs -----------------------------------------------------------------------------------------------------------

    def graph_path(self, weights: Weights | None) -> Path | None:
        """The graph that ``weights`` fit, or else the one that came last; None where there is none."""
        graph = "" if weights is None else weights.facts.get("graph", "")
        path = self.home.graph_path(graph)
        return path if graph and path.exists() else self.home.latest_graph()

    def graph_at(self, path: Path) -> tuple[str, Graph]:
        """(its id, the graph). Raises BundleError."""
        graph_id = path.stem.partition("-")[2]
        if self._graph is None or self._graph[0] != graph_id:
            self._graph = graph_id, graph_bundle.read(path)
        return self._graph

    def hold(self, graph_id: str, graph: Graph) -> None:
        """A graph that came need not be read again."""
        self._graph = graph_id, graph

    def check(self, graph_id: str, graph: Graph) -> None:
        """Raises BundleError for a graph that does not give its golden outputs; once for each runtime."""
        mark = f"{graph_id} {runtime_version()}"
        if mark not in self._checked and self.slots.pointer().checked != mark:
            check_golden(graph)
            with contextlib.suppress(StateError), self.slots.writing():  # else it is checked again
                self.slots.point(replace(self.slots.pointer(), checked=mark))
        self._checked.add(mark)

    # Slots ------------------------------------------------------------------------------------------------------------

    def served(self, slot: str = "") -> Served:
        """The served model in a slot, or in the first that holds one. Raises FleetError."""
        slot = slot or next(iter(self.slots.in_order()), "")
        weights = self.slots.weights(slot) if slot else None
        pointer, path = self.slots.pointer(), self.graph_path(weights)
        back = pointer.rolled_back
        gone = back is not None and weights is not None and back.model == weights.model and slot != pointer.slot
        if weights is None or path is None or gone:
            raise StateError(
                "no model has been served to this device yet", where=str(self.home.folder),
                hint="run 'edge-agent run' until a round was served",
            )
        method, hyper = _remembered(weights, str(self.slots.path(slot, "serve")))
        return Served(slot, method, hyper, weights, *self.graph_at(path))

    def kept(self, slot: str) -> PersonalFiles | None:
        """The personalization in ``slot``, where it is whole and was made with the weights there."""
        try:
            found = PersonalFiles.load(self.slots.path(slot, "personal"))
        except StateError:
            return None
        if found.int8 and not self.slots.int8(slot):
            return None
        return found if found.model == self.home.held(f"slots/{slot}/serve") else None

    def restored(self, served: Served) -> Answering:
        """What the slot answers with, made anew where that takes no more than samples. Raises FleetError."""
        own = self.kept(served.slot)
        if own is None or own.round != served.weights.round:
            plan = self.plan(served.graph, served.method, served.hyper)
            if plan.kind not in EMBEDS and not is_whole(served.method, served.graph):
                raise self.not_made(served)
            own = self.of_samples(plan, served) if plan.kind in EMBEDS else None
        return self.opened(own, served)

    # Ways -------------------------------------------------------------------------------------------------------------

    def plan(
        self, graph: Graph, method: Method, hyper: Any, *, trainer: bool = False, choice: Personalize | None = None
    ) -> Plan:
        """What is to make this method's weights the device's own. hyper: as ``hyper_of`` reads it. trainer: there is
        one. choice: in place of what was chosen here. Raises ConfigError."""
        trained, chosen = self.home.trained_by(method.name), choice or self.slots.way() or self._choice
        return plan_of(chosen, method, hyper, graph, trainer=trainer, trained=trained)

    def of_samples(self, plan: Plan, served: Served, known: PersonalFiles | None = None) -> PersonalFiles:
        """Class means, a fitted head or neighbours, from all samples of this device. known: what was made before. By
        the int8 encoder where the plan wants it and the slot has it. Raises FleetError."""
        self.check(served.graph_id, served.graph)
        data, quantile = self.local(served.graph.layout), self.serve.unknown_quantile
        int8 = self.slots.int8(served.slot) if plan.int8 else b""
        own = owns.of_samples(plan, served.graph, served.weights, data.every(), known, quantile=quantile, int8=int8)
        return replace(own, settings={**own.settings, "added": data.added()})

    def opened(self, own: PersonalFiles | None, served: Served, before: Answering | None = None) -> Answering:
        """What answers with these weights, personalized by ``own`` or as they are. before: what answers now, whose
        sessions are taken where they are the same. Raises FleetError."""
        self.check(served.graph_id, served.graph)
        weights, layout = served.weights, served.graph.layout
        if own is None:
            predictor = Predictor.head(served.graph, trees.only(weights.params, MODEL_GROUPS))
        else:
            samples = self.local(layout).every() if own.how in ("knn", "gp") and own.support is None else None
            alike = before is not None and (before.model, before.slot) == (weights.model, served.slot)
            same = before.predictor if before is not None and alike and before.graph == graph_of(own) else None
            predictor = owns.opened(
                own, served.graph, weights, unknown=self.serve.unknown, samples=samples,
                int8=self.slots.int8(served.slot) if own.int8 and same is None else b"",
                before=same if own.embeds else None,
            )  # fmt: skip
        classes, how = (layout.classes, "none") if own is None else (own.classes, own.how)
        return Answering(predictor, weights.model, weights.round, how, layout, classes, served.slot, graph_of(own))

    def not_made(self, served: Served) -> StateError:
        """Said where a method answers with nothing but what is made on a device, and what would make it."""
        plan = self.plan(served.graph, served.method, served.hyper)
        of = "from its own samples" if plan.kind in EMBEDS else "with weights of its own"
        what, hint = f"a device answers {of} by {served.method.name}", "edge-agent personalize"
        try:
            self.local(served.graph.layout).every()
        except DataError as error:
            what, hint = f"{what}, and {error.what}", "'edge-agent samples add', then 'edge-agent personalize'"
        else:
            what = f"{what}, which are not made yet"
            hint = hint if plan.kind in ("steps", *EMBEDS) else NO_TRAINER
        return StateError(what, where=str(self.home.folder), hint=hint)


def _remembered(weights: Weights, where: str) -> tuple[Method, Any]:
    """The method that weights on the disk are of, and its hyper-parameters. Raises StateError, ConfigError."""
    name = weights.facts.get("method", "")
    method = METHODS.get(name)
    if method is None:
        raise StateError(f"is of method {name[:64]}", where=where, hint=f"update this agent{OR_INSTALL}")
    try:
        return method, hyper_of(method, json.loads(weights.facts["hyper"]))
    except (KeyError, ValueError, RecursionError) as error:
        raise StateError("says no hyper-parameters", where=where, hint="'edge-agent run' fetches it again") from error


def graph_of(own: PersonalFiles | None) -> str:
    """As ``Answering.graph``."""
    if own is None or not own.embeds:
        return "embed" if own is not None and own.how == "fleet-proto" else "predict"
    return "embed-int8" if own.int8 else "embed"
