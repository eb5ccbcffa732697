"""Whether what is to answer may: finite answers, and the device's held-back samples answered no worse than before."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from edge_agent.local import LocalData
from edge_agent.personalize import Predictor
from fleet_core.bundle import Graph

Array = np.ndarray[Any, Any]

LEAST = 10
"""Held-back samples below which nothing is compared."""


class Judge:
    """Confusion counts on the samples that nothing here learns from, made once for each predictor."""

    def __init__(self) -> None:
        self._stamp = ""
        self._counts: WeakKeyDictionary[Predictor, Array] = WeakKeyDictionary()

    def counts(self, predictor: Predictor, data: LocalData) -> Array | None:
        """int64 [N, N] over the fleet's N classes, rows the true ones; None where nothing is held back. Of an answer
        only the fleet's classes count."""
        if data.stamp() != self._stamp:
            self._stamp, self._counts = data.stamp(), WeakKeyDictionary()
        if predictor not in self._counts:
            samples, n = data.judge(), len(data.classes)
            if samples is None or not len(samples):
                return None
            counts = np.zeros((n, n), np.int64)
            np.add.at(counts, (samples.y, predictor.probabilities(samples.x)[:, :n].argmax(1)), 1)
            self._counts[predictor] = counts
        return self._counts[predictor]

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


def _accuracy(counts_NN: Array) -> float:
    return float(np.trace(counts_NN) / counts_NN.sum())
