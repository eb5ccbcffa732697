"""The device's own answers: the graph once, the judged model's weights, this device's personalization; no torch.

The predictor is replaced in one assignment, so an answer comes from one model or the other, never from half of both.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.home import MAX_STATE_BYTES, Home, Weights
from edge_agent.local import LocalData
from edge_agent.methods import hyper_of
from edge_agent.personalize import Predictor
from edge_agent.session import check_golden, open_kind
from edge_agent.settings import Settings
from fleet_core import bundle, schema, storage
from fleet_core.algorithms import trees
from fleet_core.algorithms.methods import METHODS
from fleet_core.algorithms.seam import Method
from fleet_core.bundle import Graph
from fleet_core.data.samples import Samples
from fleet_core.errors import BundleError, ConfigError, DataError, MessageError, StateError
from fleet_core.layout import MODEL_GROUPS, Layout
from fleet_core.messages import Answer, Judgement, ModelRef, Question
from fleet_core.nearest import Prototypes

PERSONAL = "personal.safetensors"
FACTS = "served.json"
NO_TRAINER = 'its trainer needs torch: pip install "metafleet[train]"'


@dataclass(frozen=True)
class Answering:
    """What answers now. model, round: of the judged model that it was made from. how: it is the device's own, ``none``
    or the method's personalizer. layout: that it was made for; another graph may have come since."""

    predictor: Predictor
    model: str
    round: int
    how: str
    layout: Layout


def service_of(home: Path, settings: Settings) -> Service:
    """The service of the device whose folder is ``home``."""
    return Service(Home(home), schema.plain(settings.data))


class Service:
    """Installs graphs and weights, personalizes, judges and answers. ``local`` makes the device's data for a layout."""

    def __init__(self, home: Home, data: Mapping[str, Any]):
        self._home, self._data = home, dict(data)
        self.graph: Graph | None = None
        self.graph_id: str | None = None
        self._checked = False
        self.model: str | None = None
        """Id of the judged model that was served last; None for one that is wanted anew."""
        self.round = 0
        self._method: Method | None = None
        self._plain: Predictor | None = None
        self._now: Answering | None = None
        self._changing = threading.RLock()
        self._seen: tuple[tuple[int, int], ...] = ()

    @property
    def layout(self) -> Layout:
        """Raises BundleError before a graph came."""
        if self.graph is None:
            raise BundleError("no graph has arrived yet", hint="wait for the aggregator, or check the broker's address")
        return self.graph.layout

    def install(self, graph_id: str, graph: Graph) -> None:
        """Takes a graph. Before it answers anything it must give its golden outputs here: onnxruntime and its memory
        are not needed on a device that only trains."""
        self._now = None
        self._take_graph(graph_id, graph)

    def _take_graph(self, graph_id: str, graph: Graph) -> None:
        self.graph, self.graph_id, self._checked = graph, graph_id, False
        self.model, self._plain = None, None

    def known_classes(self) -> tuple[str, ...]:
        """The fleet's classes, from the graph on disk. Raises StateError before one came."""
        path = self._home.latest_graph()
        if self.graph is None and path is None:
            raise StateError(
                "the fleet's classes are not known here yet", where=str(self._home.folder),
                hint="run 'edge-agent run' once while the aggregator is up",
            )
        if self.graph is None and path is not None:
            self.install(path.stem.partition("-")[2], bundle.unpack(path.read_bytes()))
        return self.layout.classes

    def local(self) -> LocalData:
        path = self._home.folder / self._data["samples"]
        split = {key: self._data[key] for key in ("train_fraction", "support_seconds")}
        return LocalData(path, self.layout.classes, **split)

    def answers_with(self, ref: ModelRef, method: Method) -> bool:
        """Whether this model is the one that answers; where groups stay on the device, as they are in its round."""
        return self.model == ref.model and (not method.personal or self.round == ref.round)

    # Personalize ------------------------------------------------------------------------------------------------------

    def load(self, method: Method, hyper: Mapping[str, Any], weights: Weights) -> bool:
        """New weights to answer with. What needs no torch is personalized here and now; True when the trainer is still
        to make the device's own weights (``adapted`` brings them), until when the weights answer as they are, or what
        answered before where they do not."""
        read = hyper_of(method, hyper)
        plain = self._plain_of(weights)
        own = self._nearest(method, read, weights)
        self._remember(method, hyper, weights)
        self._take_in(method, weights, plain, own)
        return own is None and by_trainer(method, read)

    def _take_in(self, method: Method, weights: Weights, plain: Predictor | None, own: Predictor | None) -> None:
        self._method, self._plain = method, plain
        self.model, self.round = weights.model, weights.round
        ready = own or plain
        if ready is not None:
            how = "none" if own is None else method.personalizer
            self._now = Answering(ready, weights.model, weights.round, how, self.layout)

    def adapted(self, arrays: Mapping[str, Any]) -> None:
        """The device's own weights, made from its samples; they stay here. Raises StateError when they cannot be
        kept: then the weights are wanted anew."""
        method, model = self._method, self.model
        if method is None or model is None:
            raise StateError("no model has been served to this device yet")
        self.model = None
        facts = {"weights": model, "round": str(self.round)}
        storage.write_arrays(self._home.folder / PERSONAL, arrays, facts, mode=0o600)
        self._now = Answering(self._own_of(method, arrays), model, self.round, method.personalizer, self.layout)
        self.model = model

    def _own_of(self, method: Method, arrays: Mapping[str, Any]) -> Predictor:
        """Answers with the device's own weights."""
        own = self.layout.ordered(storage.unflatten(arrays))
        if method.personalizer != "fleet-proto":
            return Predictor.head(self._graph(), own)
        weights = self._home.weights("serve")
        if weights is None:
            raise StateError("the fleet's class means are not here", where=str(self._home.folder))
        means = Prototypes.of_fleet(weights.params, weights.model)
        return Predictor.proto(self._graph(), trees.only(own, ("body",)), means)

    def _plain_of(self, weights: Weights) -> Predictor | None:
        """The weights as they are, where they answer by themselves."""
        params = trees.only(weights.params, MODEL_GROUPS)
        whole = {tensor.group for tensor in self.layout.tensors}  # of a linear model, the head alone
        return Predictor.head(self._graph(), params) if "head" in params and params.keys() == whole else None

    def _nearest(self, method: Method, hyper: Any, weights: Weights) -> Predictor | None:
        """Answers from the device's own samples, for methods that need no more."""
        if method.personalizer == "proto":
            return Predictor.proto(self._graph(), weights.params, self._prototypes(weights, hyper.distance))
        if method.personalizer == "knn":
            own = self.local().own()
            return Predictor.knn(self._graph(), weights.params, own.x, own.y, hyper.neighbours, hyper.mixture)
        return None

    def _prototypes(self, weights: Weights, distance: str) -> Prototypes:
        support = self.local().own()
        session = open_kind(self._graph(), "embed", weights.params)
        classes = len(self.layout.classes)
        prototypes = Prototypes.from_support(session.run, support.x, support.y, classes, weights.model, distance)
        prototypes.save(self._home.folder / PERSONAL)
        return prototypes

    def _graph(self) -> Graph:
        """Raises BundleError before a graph came, and for one that does not give its golden outputs."""
        if self.graph is None:
            raise BundleError("no graph has arrived yet")
        if not self._checked:
            check_golden(self.graph)
            self._checked = True
        return self.graph

    # From disk: answers without an aggregator -------------------------------------------------------------------------

    def _remember(self, method: Method, hyper: Mapping[str, Any], weights: Weights) -> None:
        facts = {"method": method.name, "hyper": dict(hyper), "model": weights.model, "round": weights.round}
        self._home.save_weights("serve", weights)
        storage.write_json(self._home.folder / FACTS, facts, mode=0o600)

    def _remembered(self) -> tuple[Method, Any]:
        """The method of the last model that was served, and its hyper-parameters. Raises StateError."""
        path = self._home.folder / FACTS
        facts = json.loads(storage.read_bytes(path, limit=1 << 20))
        method = METHODS.get(facts["method"])
        if method is None:
            raise StateError(f"is of method {facts['method']}", where=str(path), hint="update this agent")
        return method, hyper_of(method, facts.get("hyper", {}))

    def restore(self) -> None:
        """The graph, weights and personalization that this device last answered with; what answered before does so
        until they are ready. Raises StateError."""
        path = self._home.latest_graph()
        weights = self._home.weights("serve")
        if path is None or weights is None or not (self._home.folder / FACTS).exists():
            raise StateError(
                "no model has been served to this device yet", where=str(self._home.folder),
                hint="run 'edge-agent run' until a round was served",
            )
        self._seen = self._disk_stamp()
        method, hyper = self._remembered()
        graph_id = path.stem.partition("-")[2]
        if graph_id != self.graph_id:
            self._take_graph(graph_id, bundle.unpack(path.read_bytes()))
        own = self._kept(method, weights) or self._nearest(method, hyper, weights)
        self._take_in(method, weights, self._plain_of(weights), own)

    def _kept(self, method: Method, weights: Weights) -> Predictor | None:
        """What is the device's own on its disk, where it was made for these weights in this round."""
        path = self._home.folder / PERSONAL
        if method.personalizer == "knn" or not path.exists():
            return None
        arrays, facts = storage.unpack(storage.read_bytes(path, limit=MAX_STATE_BYTES), where=str(path))
        if facts.get("weights") != weights.model or facts.get("round", str(weights.round)) != str(weights.round):
            return None
        if method.personalizer == "proto":
            return Predictor.proto(self._graph(), weights.params, Prototypes.load(path))
        return self._own_of(method, arrays)

    def personalize(self) -> tuple[Samples, str]:
        """Personalizes anew on the device's samples; (support, how). Raises StateError where that takes gradient
        steps, which the agent's trainer makes."""
        if self._method is None:
            self.restore()
        method, weights = self._method, self._home.weights("serve")
        if method is None or weights is None:
            raise StateError("no model has been served to this device yet")
        own = self._nearest(method, self._remembered()[1], weights)
        if own is None:
            raise StateError(f"{method.name} personalizes by gradient steps", hint="'edge-agent run' makes them")
        self._now = Answering(own, weights.model, weights.round, method.personalizer, self.layout)
        self._seen = self._disk_stamp()
        return self.local().own(), method.personalizer

    # What comes while it answers: labelled samples, and what another process made ------------------------------------

    def check_labels(self, labels: Sequence[str]) -> None:
        """Raises ConfigError for a name that is no class of the fleet."""
        classes = self.layout.classes
        for label in labels:
            if label not in classes:
                near = schema.suggest(label, classes)
                raise ConfigError(
                    f"unknown class '{label[:80]}'" + (f" (did you mean '{near}'?)" if near else ""),
                    expected="one of " + ", ".join(classes),
                )

    def learn(self, x: np.ndarray[Any, Any], labels: Sequence[str]) -> dict[str, Any]:
        """Stores raw samples [n, *shape] with the names of their classes as ``edge-agent samples add`` does, and
        personalizes at once. Called by several threads; answers go on meanwhile. What came of it, as plain values.

        Raises DataError for samples of another form, ConfigError for a class that cannot be learned.
        """
        with self._changing:
            spec = self.layout.input
            if not len(x) or x.shape != (len(labels), *spec.shape) or str(x.dtype) != spec.dtype:
                raise DataError(
                    f"samples {x.dtype} {list(x.shape)} with {len(labels)} labels",
                    expected=f"one or more {spec.dtype} {list(spec.shape)}, each with a label",
                )
            if not np.isfinite(x).all():
                raise DataError("a sample holds a value that is not finite")
            self.check_labels(labels)
            total = self.local().add(x, labels)
            facts = {"added": len(x), "added_in_all": total, "round": self.round, "model": self.model or ""}
            try:
                support, how = self.personalize()
            except StateError as error:
                return {**facts, "personalization": self.personalization, "counts_later": error.what}
            return {**facts, "personalization": how, "samples": len(support)}

    def follow(self) -> bool:
        """Takes up what another process has put on the disk since: weights, or a personalization. True when something
        changed. Raises StateError, BundleError or CodecError for what cannot answer; what answered before stays."""
        with self._changing:
            stamp = self._disk_stamp()
            if stamp == self._seen or not (self._home.folder / FACTS).exists():
                return False
            self.restore()
            return True

    def _disk_stamp(self) -> tuple[tuple[int, int], ...]:
        paths = [self._home.folder / name for name in (FACTS, PERSONAL)]
        stats = [path.stat() for path in paths if path.exists()]
        return tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)

    # Judge and answer -------------------------------------------------------------------------------------------------

    @property
    def personalization(self) -> str:
        """How the answers of the last model that was served are the device's own: ``none``, or its method's
        personalizer."""
        now = self._now
        return now.how if now is not None and (now.model, now.round) == (self.model, self.round) else "none"

    @property
    def answers_as_it_is(self) -> bool:
        """Whether the last model that was served answers by itself, before anything makes it the device's own."""
        return self._plain is not None

    def judge(self) -> list[Judgement]:
        """Confusion counts on the later samples, which nothing here has learned from; empty when there are none."""
        samples = self.local().judge()
        if samples is None or not len(samples) or self._method is None:
            return []
        judgements = []
        if self._plain is not None:
            judgements.append(self._judgement("before", self._plain, samples))
            if self.personalization != "none":
                self._plain = None  # its session is not needed any more
        if self._now is not None and self.personalization != "none":
            judgements.append(self._judgement("after", self._now.predictor, samples))
        return judgements

    def _judgement(self, stage: str, predictor: Predictor, samples: Samples) -> Judgement:
        n = len(self.layout.classes)
        counts = np.zeros((n, n), np.int64)
        np.add.at(counts, (samples.y, predictor.labels(samples.x)), 1)
        name = "" if self._method is None else self._method.name
        return Judgement(stage, name, tuple(tuple(int(v) for v in row) for row in counts))

    @property
    def answering(self) -> Answering | None:
        """What answers now, whole; None before there is anything."""
        return self._now

    def predict(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Class probabilities float32 [n, N] of raw samples. Raises StateError before there is something to answer
        with."""
        return self._answering().predictor.probabilities(x)

    def _answering(self) -> Answering:
        if self._now is not None:
            return self._now
        if self._method is None or self.model is None:
            raise StateError("no model has been served to this device yet", hint="wait for a served round")
        raise StateError(f"{self._method.name} answers with weights of a device's own, which are not made yet",
                         where=str(self._home.folder), hint=NO_TRAINER)

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
        probabilities = now.predictor.probabilities(x)
        labels = tuple(now.layout.classes[k] for k in probabilities.argmax(1))
        rows = tuple(tuple(round(float(p), 6) for p in row) for row in probabilities)
        return Answer(labels, rows, round=now.round, model=now.model, personalization=now.how)


def by_trainer(method: Method, hyper: Any) -> bool:
    """Whether the device's own weights take gradient steps, or the groups that its trainer keeps."""
    if method.personalizer == "sgd":
        return bool(method.personal or getattr(hyper, "inner_steps", getattr(hyper, "finetune_steps", 0)))
    return method.personalizer in ("meta-sgd", "own", "moreau", "fleet-proto")
