"""The device's own answers: the graph once, the judged model's weights, this device's personalization; no torch.

The predictor is replaced in one assignment, so an answer comes from one model or the other, never from half of both.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from edge_agent.home import Home, Weights
from edge_agent.local import LocalData
from edge_agent.personalize import Predictor, Prototypes
from edge_agent.session import check_golden, open_kind
from fleet_core import bundle, storage
from fleet_core.algorithms.methods import METHODS
from fleet_core.algorithms.seam import Method
from fleet_core.bundle import Graph
from fleet_core.data.samples import Samples
from fleet_core.errors import BundleError, MessageError, StateError
from fleet_core.layout import Layout
from fleet_core.messages import Answer, Judgement, Question

PERSONAL = "personal.safetensors"
FACTS = "served.json"


class Service:
    """Installs graphs and weights, personalizes, judges and answers. ``local`` makes the device's data for a layout."""

    def __init__(self, home: Home, data: Mapping[str, Any]):
        self._home, self._data = home, dict(data)
        self.graph: Graph | None = None
        self.graph_id: str | None = None
        self._checked = False
        self.model: str | None = None
        self.round = 0
        self._method: Method | None = None
        self._plain: Predictor | None = None
        self._own: Predictor | None = None
        self._by_gradient = False

    @property
    def layout(self) -> Layout:
        """Raises BundleError before a graph came."""
        if self.graph is None:
            raise BundleError("no graph has arrived yet", hint="wait for the aggregator, or check the broker's address")
        return self.graph.layout

    def install(self, graph_id: str, graph: Graph) -> None:
        """Takes a graph. Before it answers anything it must give its golden outputs here: onnxruntime and its memory
        are not needed on a device that only trains."""
        self.graph, self.graph_id, self._checked = graph, graph_id, False
        self.model, self._plain, self._own = None, None, None

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

    # Personalize ------------------------------------------------------------------------------------------------------

    def load(self, method: Method, hyper: Mapping[str, Any], weights: Weights) -> bool:
        """New weights to answer with. Proto personalizes here and now; True when gradient steps are still to be made
        (``adapted`` brings their result), until when the weights answer as they are."""
        steps = hyper.get("inner_steps", hyper.get("finetune_steps", 0)) if method.personalizer == "sgd" else 0
        if method.personalizer == "proto":
            plain = None
            own = self._proto(weights, self._prototypes(weights))
        else:
            plain = own = Predictor.head(self._graph(), weights.params)
        self._remember(method, weights)
        self._method, self._plain, self._own = method, plain, own
        self.model, self.round, self._by_gradient = weights.model, weights.round, False
        return bool(steps)

    def adapted(self, arrays: Mapping[str, Any]) -> None:
        """Weights after gradient steps on this device's samples; they stay here. Raises StateError when they cannot be
        kept: then the weights are wanted anew."""
        model, self.model = self.model, None
        storage.write_arrays(self._home.folder / PERSONAL, arrays, {"weights": model or ""}, mode=0o600)
        self._own = Predictor.head(self._graph(), self.layout.ordered(storage.unflatten(arrays)))
        self.model, self._by_gradient = model, True

    def _prototypes(self, weights: Weights) -> Prototypes:
        support = self.local().own()
        session = open_kind(self._graph(), "embed", weights.params)
        classes = len(self.layout.classes)
        prototypes = Prototypes.from_support(session.run, support.x, support.y, classes, weights.model)
        prototypes.save(self._home.folder / PERSONAL)
        return prototypes

    def _proto(self, weights: Weights, prototypes: Prototypes) -> Predictor:
        return Predictor.proto(self._graph(), weights.params, prototypes)

    def _graph(self) -> Graph:
        """Raises BundleError before a graph came, and for one that does not give its golden outputs."""
        if self.graph is None:
            raise BundleError("no graph has arrived yet")
        if not self._checked:
            check_golden(self.graph)
            self._checked = True
        return self.graph

    # From disk: answers without an aggregator -------------------------------------------------------------------------

    def _remember(self, method: Method, weights: Weights) -> None:
        facts = {"method": method.name, "model": weights.model, "round": weights.round}
        self._home.save_weights("serve", weights)
        storage.write_json(self._home.folder / FACTS, facts, mode=0o600)

    def restore(self) -> None:
        """The graph, weights and personalization that this device last answered with. Raises StateError."""
        path = self._home.latest_graph()
        weights = self._home.weights("serve")
        facts_path = self._home.folder / FACTS
        if path is None or weights is None or not facts_path.exists():
            raise StateError(
                "no model has been served to this device yet", where=str(self._home.folder),
                hint="run 'edge-agent run' until a round was served",
            )
        facts = json.loads(storage.read_bytes(facts_path, limit=4096))
        method = METHODS[facts["method"]]
        self.install(path.stem.partition("-")[2], bundle.unpack(path.read_bytes()))
        self._method, self.model, self.round = method, weights.model, weights.round
        personal = self._home.folder / PERSONAL
        if method.personalizer == "proto":
            known = Prototypes.load(personal) if personal.exists() else None
            fresh = known if known is not None and known.weights == weights.model else self._prototypes(weights)
            self._own = self._proto(weights, fresh)
            return
        self._plain = self._own = Predictor.head(self._graph(), weights.params)
        arrays, metadata = storage.unpack(personal.read_bytes()) if personal.exists() else ({}, {})
        if metadata.get("weights") == weights.model:
            self._own = Predictor.head(self._graph(), self.layout.ordered(storage.unflatten(arrays)))
            self._by_gradient = True

    def personalize(self) -> tuple[Samples, str]:
        """Personalizes anew on the device's samples; (support, how). Raises StateError where that takes gradient
        steps, which the agent's trainer makes."""
        if self._method is None:
            self.restore()
        method, weights = self._method, self._home.weights("serve")
        if method is None or weights is None:
            raise StateError("no model has been served to this device yet")
        if method.personalizer != "proto":
            raise StateError(f"{method.name} personalizes by gradient steps", hint="'edge-agent run' makes them")
        self._own = self._proto(weights, self._prototypes(weights))
        return self.local().own(), self.personalization

    # Judge and answer -------------------------------------------------------------------------------------------------

    @property
    def personalization(self) -> str:
        """How the answers are made the device's own: proto, sgd or none."""
        if self._method is None:
            return "none"
        return "proto" if self._method.personalizer == "proto" else "sgd" if self._by_gradient else "none"

    def judge(self) -> list[Judgement]:
        """Confusion counts on the later samples, which nothing here has learned from; empty when there are none."""
        samples = self.local().judge()
        if samples is None or not len(samples) or self._method is None:
            return []
        judgements = []
        if self._plain is not None:
            judgements.append(self._judgement("before", self._plain, samples))
            if self._by_gradient:
                self._plain = None  # its session is not needed any more
        if self._own is not None and (self._by_gradient or self._plain is None):
            judgements.append(self._judgement("after", self._own, samples))
        return judgements

    def _judgement(self, stage: str, predictor: Predictor, samples: Samples) -> Judgement:
        n = len(self.layout.classes)
        counts = np.zeros((n, n), np.int64)
        np.add.at(counts, (samples.y, predictor.labels(samples.x)), 1)
        name = "" if self._method is None else self._method.name
        return Judgement(stage, name, tuple(tuple(int(v) for v in row) for row in counts))

    def predict(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Class probabilities float32 [n, N] of raw samples. Raises StateError before a model was served."""
        if self._own is None:
            raise StateError("no model has been served to this device yet", hint="wait for a served round")
        return self._own.probabilities(x)

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
        probabilities = self.predict(x)
        labels = tuple(self.layout.classes[k] for k in probabilities.argmax(1))
        rows = tuple(tuple(round(float(p), 6) for p in row) for row in probabilities)
        return Answer(labels, rows, self.round, self.model or "", self.personalization)
