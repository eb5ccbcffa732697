"""Whether what is to answer may: finite answers, and the device's held-back samples answered no worse than before."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from edge_agent.compute.onnx_session import Session
from edge_agent.device.local_samples import LocalData
from edge_agent.inference.predictor import Predictor
from fleet_core.base.errors import FleetError, StateError
from fleet_core.model.graph_bundle import Graph
from fleet_core.protocol.device_messages import Alone

Array = np.ndarray[Any, Any]

LEAST = 10
"""Held-back samples below which nothing is compared."""

MAX_KEPT = 1 << 20
"""Numbers of a session's outputs on the held-back samples that are kept in memory (4 MiB)."""

MAX_CLASSES = 300
"""Above it the counts of one more kind of answers could make a report too long for a message."""

WORSE_BY = "[serve] worse_by in device.toml says how much worse may be"


class WorseModel(StateError):
    """What was asked for would answer the held-back samples worse; what answered before goes on. why: both accuracies.
    """

    def __init__(self, why: str):
        self.why = why
        hint = f"'edge-agent samples list' shows what it would be made from; {WORSE_BY}"
        super().__init__(f"not personalized, what answered before goes on: {why}", hint=hint)


class Evaluator:
    """Confusion counts on the samples that nothing here learns from, made once for each predictor. A session is run on
    them once, so that one more labelled sample costs its own embedding alone."""

    def __init__(self) -> None:
        self._stamp = ""
        self._outputs: WeakKeyDictionary[Session, Array] = WeakKeyDictionary()
        self._counts: WeakKeyDictionary[Predictor, Array] = WeakKeyDictionary()
        self._alone: tuple[str, Alone | None] = "", None  # with the stamp of the samples

    def alone(self, data: LocalData) -> Alone | None:
        """What this device could answer on the held-back samples without the fleet, made once for the same samples.
        None where nothing is held back, or nothing labelled is left to learn from."""
        if self._alone[0] != data.stamp():
            try:
                self._alone = data.stamp(), _alone(data)
            except FleetError:
                self._alone = data.stamp(), None
        return self._alone[1]

    def counts(self, predictor: Predictor, data: LocalData) -> Array | None:
        """int64 [N, N] over the fleet's N classes, rows the true ones; None where nothing is held back. Of an answer
        only the fleet's classes count."""
        if data.held_back_stamp() != self._stamp:
            self._stamp, self._counts, self._outputs = data.held_back_stamp(), WeakKeyDictionary(), WeakKeyDictionary()
        if predictor not in self._counts:
            samples, n = data.held_back(), len(data.classes)
            if samples is None or not len(samples):
                return None
            counts = np.zeros((n, n), np.int64)
            np.add.at(counts, (samples.y, self._probabilities(predictor, samples.x)[:, :n].argmax(1)), 1)
            self._counts[predictor] = counts
        return self._counts[predictor]

    def _probabilities(self, predictor: Predictor, x: Array) -> Array:
        out = self._run(predictor.session, x)
        z = out if predictor.encoder is None else self._run(predictor.encoder, x)
        return predictor.of_outputs(out, z)[0]

    def _run(self, session: Session, x: Array) -> Array:
        found = self._outputs.get(session)
        if found is None:
            found = session.run(x)
            if found.size <= MAX_KEPT:
                self._outputs[session] = found
        return found

    def worse(self, new: Predictor, before: Predictor | None, data: LocalData, worse_by: float) -> str:
        """Why ``new`` may not answer in the place of ``before``; empty where it may."""
        now = self.counts(new, data)
        if now is None or before is None or now.sum() < LEAST:
            return ""
        then = self.counts(before, data)
        if then is None:
            return ""
        lost, found = _accuracy(then) - _accuracy(now), _accuracy(now)
        if lost <= worse_by + 1e-9:
            return ""
        return f"accuracy {found:.3f} on {now.sum()} held-back samples, {_accuracy(then):.3f} before"


def finite(predictor: Predictor, graph: Graph) -> bool:
    """Whether the answers to the graph's golden samples are probabilities."""
    found = predictor.probabilities(graph.golden["x"])
    return bool(np.isfinite(found).all() and np.allclose(found.sum(1), 1, atol=1e-3))


def _alone(data: LocalData) -> Alone | None:
    from fleet_core.personalization import plain_baseline  # what only answers does without it

    own, later, n = data.own(), data.held_back(), len(data.classes)
    if later is None or not len(later):
        return None
    frequent = int(np.bincount(own.y, minlength=n).argmax())
    if n > MAX_CLASSES or not plain_baseline.applies_to(own.x):
        return Alone(frequent)
    made = plain_baseline.Baseline.fit(own.x, own.y, n)
    counts = plain_baseline.counted(later.y, made.labels(later.x), n)
    return Alone(frequent, made.name, tuple(tuple(int(v) for v in row) for row in counts))


def _accuracy(counts_NN: Array) -> float:
    return float(np.trace(counts_NN) / counts_NN.sum())
