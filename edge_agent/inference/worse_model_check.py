"""Checks a new predictor before it may answer: finite answers, and no worse ones to the device's held-back samples,
by accuracy, or by the measure of the fleet's task."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from edge_agent.compute.onnx_session import Session
from edge_agent.device.local_samples import LocalData
from edge_agent.inference.predictor import Predictor
from fleet_core.base.errors import FleetError, StateError
from fleet_core.model.graph_bundle import Graph
from fleet_core.protocol.device_messages import Alone, Evaluation
from fleet_core.tasks import calibration
from fleet_core.tasks.anomaly import COMPARED, Anomaly
from fleet_core.tasks.measured import Measured
from fleet_core.tasks.task import KINDS

Array = np.ndarray[Any, Any]
Rows = tuple[tuple[int, ...], ...]

MIN_HELD_BACK = 10
"""With fewer held-back samples accuracies are not compared."""

MAX_CACHED = 1 << 20
"""Numbers of a session's outputs on the held-back samples that are cached in memory (4 MiB)."""

MAX_CLASSES = 300
"""With more classes the report leaves out the baseline's confusion counts, which could exceed a message's limit."""

WORSE_BY = "[serve] worse_by in device.toml says how much worse may be"


@dataclass(frozen=True)
class HeldBack:
    """How a model answers the held-back samples. samples: their number. figures: ``accuracy`` and
    ``calibration_error``, or the measures of a task by output. measure, text: the first of them for people, as
    ``accuracy`` and ``0.950``. loss: by which models are compared: lower is better. compared: its name, where the
    measure says something else."""

    samples: int
    figures: Mapping[str, Any]
    measure: str
    text: str
    loss: float
    compared: str = ""


class WorseModel(StateError):
    """The new personalization answers the held-back samples worse, so the previous model stays. why: how both
    answer."""

    def __init__(self, why: str):
        self.why = why
        hint = f"'edge-agent samples list' shows the samples that it is made from; {WORSE_BY}"
        super().__init__(f"not personalized, the former model answers: {why}", hint=hint)


class Evaluator:
    """Confusion counts of predictors, or measures of a task, on the held-back samples, computed once per predictor.

    Session outputs are cached, so that after one more labelled sample only that sample is embedded and the recording is
    not read again. Several threads may ask.
    """

    def __init__(self) -> None:
        self._stamp = ""
        self._truths: Array | None = None  # of the held-back samples; none if nothing is held back
        self._outputs: WeakKeyDictionary[Session, Array] = WeakKeyDictionary()
        self._counts: WeakKeyDictionary[Predictor, Array | Measured] = WeakKeyDictionary()
        self._gaps: WeakKeyDictionary[Predictor, Array] = WeakKeyDictionary()
        self._counting = threading.Lock()
        self._baseline: tuple[str, Alone | None] = "", None  # with the stamp of its samples

    def baseline(self, data: LocalData) -> Alone | None:
        """The baseline without the fleet on the held-back samples, computed once per stamp of ``data``. None if nothing
        is held back or no labelled samples are left to learn from."""
        if self._baseline[0] != data.stamp():
            try:
                self._baseline = data.stamp(), _baseline(data)
            except FleetError:
                self._baseline = data.stamp(), None
        return self._baseline[1]

    def counts(self, predictor: Predictor, data: LocalData) -> Array | Measured | None:
        """int64 [N, N] over the fleet's N classes, rows are the true ones; None if nothing is held back. Probabilities
        of the device's own classes are ignored. Of a task: its measures."""
        with self._counting:
            if data.held_back_stamp() != self._stamp:
                self._stamp = data.held_back_stamp()
                self._counts.clear()
                self._gaps.clear()
                self._outputs.clear()
                self._truths = None
            if predictor not in self._counts:
                truths, answers = self._answered(predictor, data)
                if not len(truths):
                    return None
                self._count(predictor, data, truths, answers)
            return self._counts[predictor]

    def _count(self, predictor: Predictor, data: LocalData, truths: Array, answers: Array) -> None:
        n = len(data.classes)
        if data.task is not None:
            self._counts[predictor] = data.task.measured(truths, answers)
            return
        label, counts = answers[:, :n].argmax(1), np.zeros((n, n), np.int64)
        np.add.at(counts, (truths, label), 1)
        self._gaps[predictor] = calibration.gaps(answers[:, :n].max(1), label == truths)
        self._counts[predictor] = counts

    def calibration_error(self, predictor: Predictor) -> float | None:
        """The expected calibration error on the held-back samples; None as long as these were not answered, and without
        classes."""
        counts, gaps = self._counts.get(predictor), self._gaps.get(predictor)
        if gaps is None or not isinstance(counts, np.ndarray):
            return None
        return calibration.expected_calibration_error(gaps, int(counts.sum()))

    def evaluations(self, stages: Mapping[str, Predictor | None], method: str, data: LocalData) -> list[Evaluation]:
        """The evaluation of each stage that has a predictor; empty if nothing is held back."""
        counts = [(stage, p, self.counts(p, data)) for stage, p in stages.items() if p is not None]
        return [_evaluation(stage, method, found, self._gaps.get(predictor)) for stage, predictor, found in counts
                if found is not None and not (isinstance(found, Measured) and not found.samples)]

    def held_back(self, predictor: Predictor, data: LocalData) -> HeldBack | None:
        """None if nothing is held back."""
        counts = self.counts(predictor, data)
        if isinstance(counts, Measured) and not counts.samples:
            return None
        if isinstance(counts, Measured) and data.task is not None:
            head = KINDS[data.task.kind].MEASURE
            compared = COMPARED[1].name if isinstance(data.task, Anomaly) else ""
            return HeldBack(counts.samples, counts.figures, head, counts.text, counts.distance, compared)
        if not isinstance(counts, np.ndarray):
            return None
        accuracy = float(np.trace(counts) / counts.sum())
        figures = {"accuracy": accuracy, "calibration_error": self.calibration_error(predictor)}
        return HeldBack(int(counts.sum()), figures, "accuracy", f"{accuracy:.3f}", 1 - accuracy)

    def thresholds(self, predictor: Predictor, data: LocalData) -> tuple[float, ...]:
        """By which a task's answers are told, as ``Measured.thresholds``; empty if nothing for them is held back."""
        counts = self.counts(predictor, data)
        return counts.thresholds if isinstance(counts, Measured) else ()

    def why_worse(self, new: Predictor, before: Predictor, data: LocalData, worse_by: float) -> str:
        """How both answer if ``new`` loses more than ``worse_by`` to ``before``; else empty."""
        return why_worse(self.held_back(new, data), self.held_back(before, data), worse_by)

    def _answered(self, predictor: Predictor, data: LocalData) -> tuple[Array, Array]:
        """The truths of the held-back samples and the answers to them. The samples are read if a session has not run on
        them yet; both are empty if nothing is held back."""
        encoder, x = predictor.encoder or predictor.session, None
        if self._truths is None or (len(self._truths) and not {predictor.session, encoder} <= set(self._outputs)):
            samples = data.held_back()
            self._truths, x = (np.zeros(0), None) if samples is None else (samples.y, samples.x)
        if not len(self._truths):
            return self._truths, self._truths
        out = self._run(predictor.session, x)
        z = out if encoder is predictor.session else self._run(encoder, x)
        return self._truths, predictor.of_outputs(out, z)[0]

    def _run(self, session: Session, x: Array | None) -> Array:
        """The session's output on the held-back samples. x: needed unless the output is cached."""
        output = self._outputs.get(session)
        if output is None or (x is not None and len(output) != len(x)):
            assert x is not None
            output = session.run(x)
            if output.size <= MAX_CACHED:
                self._outputs[session] = output
        return output


def why_worse(now: HeldBack | None, then: HeldBack | None, worse_by: float) -> str:
    """How both answer if the model ``now`` loses more than ``worse_by`` to the one ``then``; else empty."""
    if now is None or then is None or now.samples < MIN_HELD_BACK or now.loss - then.loss <= worse_by + 1e-9:
        return ""
    measure, text, before = ((now.compared, f"{now.loss:.3g}", f"{then.loss:.3g}") if now.compared else
                             (now.measure, now.text, then.text))
    return f"{measure} {text} on {now.samples} held-back samples, {before} before"


def gives_probabilities(predictor: Predictor, graph: Graph) -> bool:
    """Whether the answers to the graph's golden samples are finite and, without a task, sum to 1."""
    answers = predictor.probabilities(graph.golden["x"])
    return bool(np.isfinite(answers).all() and (predictor.task or np.allclose(answers.sum(1), 1, atol=1e-3)))


def _evaluation(stage: str, method: str, found: Array | Measured, gaps: Array | None) -> Evaluation:
    if isinstance(found, Measured):
        return Evaluation(stage, method, (), found.samples, found.sums)
    sent = () if gaps is None else tuple(map(float, gaps.round(calibration.DECIMALS)))
    return Evaluation(stage, method, _rows(found), gaps=sent)


def _baseline(data: LocalData) -> Alone | None:
    if data.task is not None:  # R² compares with the mean already
        return None
    from fleet_core.personalization import plain_baseline  # not loaded by a process that only answers

    own, held_back, n = data.own(), data.held_back(), len(data.classes)
    if held_back is None or not len(held_back):
        return None
    most_frequent = int(np.bincount(own.y, minlength=n).argmax())
    if n > MAX_CLASSES or not plain_baseline.applies_to(own.x):
        return Alone(most_frequent)
    baseline = plain_baseline.Baseline.fit(own.x, own.y, n)
    counts = plain_baseline.counted(held_back.y, baseline.labels(held_back.x), n)
    return Alone(most_frequent, baseline.name, _rows(counts))


def _rows(counts_NN: Any) -> Rows:
    """Confusion counts in the form of a message."""
    return tuple(tuple(map(int, row)) for row in counts_NN)
