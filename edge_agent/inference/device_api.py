"""A device in Python: samples go in, answers come out, labels may come later (``from edge_agent import Device``).

It works on the device's folder, beside ``edge-agent run`` or without it: stored samples and models are the same files,
under the same locks. No torch, no connection. docs/python-device.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_agent.device.local_samples import LocalData
from edge_agent.device.sample_buffer import SampleBuffer, Stored
from edge_agent.inference import relearn
from edge_agent.inference.service import Service, service_of
from fleet_core.base.errors import ConfigError, DataError
from fleet_core.board.device_settings import settings_of
from fleet_core.data.prepare import prepared
from fleet_core.tasks.anomaly import SCORE, Anomaly
from fleet_core.tasks.labels import THRESHOLD, MultiLabel
from fleet_core.tasks.regression import Regression

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

BUFFER = "unlabelled"
NEWEST = 1000
"""Number of newest samples that are answered to find the least certain ones."""


@dataclass(frozen=True)
class Answer:
    """The answer to one sample.

    label: the most probable class. probabilities: class or label -> probability. labels: of a fleet with several
    labels: those of the sample; label is then empty. thresholds: label -> the probability from which on it is answered;
    empty if no sample is held back, and all are 0.5. values: of a fleet that predicts numbers: output -> number in the
    user's unit; label and probabilities are then empty. unknown: whether the sample is far from everything that the
    device knows; None if the device does not detect this. alarm, threshold: of a fleet that detects anomalies, whose
    value is the score; None if no quiet sample is held back. round: of the served model. personalization: the
    personalizer.
    """

    label: str
    probabilities: Mapping[str, float]
    unknown: bool | None
    round: int
    personalization: str
    values: Mapping[str, float] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    alarm: bool | None = None
    threshold: float | None = None
    thresholds: Mapping[str, float] = field(default_factory=dict)

    @property
    def certainty(self) -> float:
        """The largest probability; of several labels that of the least certain one, 0.5 at its threshold and 1 at a
        probability of 0 or 1; 0 for numbers."""
        if not self.label and self.probabilities:
            return min(_certainty(p, self.thresholds.get(name, THRESHOLD)) for name, p in self.probabilities.items())
        return max(self.probabilities.values(), default=0.0)


@dataclass(frozen=True)
class UnlabelledSample:
    """A stored sample without a label. id: for ``Device.label``. time: Unix seconds. x: the raw sample [*shape].
    answer: of the model that answers now; None without one."""

    id: str
    time: float
    x: np.ndarray[Any, Any]
    answer: Answer | None

    @property
    def plain(self) -> dict[str, Any]:
        """All but x as plain values."""
        facts: dict[str, Any] = {"id": self.id, "time": self.time}
        if self.answer is not None and self.answer.values:
            facts |= {"values": dict(self.answer.values)}
            facts |= {} if self.answer.alarm is None else {"alarm": self.answer.alarm,
                                                           "threshold": self.answer.threshold}
        elif self.answer is not None and not self.answer.label:
            facts |= {"labels": list(self.answer.labels), "probabilities": dict(self.answer.probabilities)}
        elif self.answer is not None:
            facts |= {"label": self.answer.label, "probabilities": dict(self.answer.probabilities),
                      "unknown": self.answer.unknown}
        return facts


class Device:
    """The device whose folder is ``home``. Several threads and processes may use one folder.

    Raises ConfigError if device.toml cannot be read, StateError before a model of the fleet has arrived.
    """

    def __init__(self, home: str | Path, service: Service | None = None):
        """service: of this folder, if this process has opened one already."""
        home = Path(home)
        settings = settings_of(home)
        limits = settings.unlabelled
        self._service = service or service_of(home, settings)
        self._service.known_classes()
        self._buffer = SampleBuffer(home / BUFFER, limits.max_bytes, limits.max_age_s)

    @property
    def classes(self) -> tuple[str, ...]:
        """The fleet's classes, then this device's own. Raises DataError, StateError if the samples cannot be read."""
        return self._service.local().names()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the numbers that the fleet predicts; empty for classes."""
        task = self._service.layout.task
        return task.outputs if isinstance(task, Regression) else ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels of a fleet with several; else empty."""
        task = self._service.layout.task
        return task.outputs if isinstance(task, MultiLabel) else ()

    def add(
        self, x: ArrayLike, label: str | float | Sequence[float] | Sequence[str] | None = None,
        time: float | None = None,
    ) -> str:
        """Stores a raw sample [*shape] and returns its id. The oldest unlabelled samples are removed when a limit of
        ``[unlabelled]`` in device.toml is passed. label: as in ``label``. time: Unix seconds; None: now.

        Raises DataError for a sample of another shape or dtype, ConfigError for an unknown label, StateError if the
        disk cannot be written. An unlabelled sample stays if it cannot be stored with its label.
        """
        sample = self._sample(x)
        if time is not None and not math.isfinite(time):
            raise DataError(f"time {time}", expected="Unix seconds")
        if label is not None:
            self._storing(label, new=False)
        name = self._buffer.add(sample, time)
        if label is not None:
            self.label(name, label)
        return name

    def predict(self, x: ArrayLike) -> Answer:
        """The answer to a raw sample [*shape] by the newest model and personalization in the folder, whichever process
        wrote them. Raises DataError, StateError if no model can answer."""
        sample = self._sample(x)
        self._service.follow()
        return self._answers(sample[None])[0]

    def label(
        self, id: str, label: str | float | Sequence[float] | Sequence[str], *, new_class: bool = False
    ) -> None:
        """Gives an unlabelled sample its class, or in a fleet that predicts numbers its targets, or in one with several
        labels a list of them, empty for none; the next personalization learns it. new_class: ``label`` may be a new
        class of this device alone.

        Raises ConfigError for an unknown label, DataError if no unlabelled sample has this id (it has a label already,
        or was removed by a limit), StateError.
        """
        store = self._storing(label, new=new_class)
        with self._service.slots.writing():
            local = self._service.local()
            self._buffer.recover(local.is_added)
            with self._buffer.labelling(id, local.added()) as stored:
                if stored is None:
                    raise self._missing(id)
                store(local, self._sample(stored.x)[None])

    def typed(self, text: str) -> str | list[float] | list[str]:
        """A label as people type it, for ``label``: a class; numbers, ``120.5,0.25``; or several labels,
        ``speech,music``, or ``-`` for none. Raises ConfigError."""
        task = self._service.layout.task
        return text if task is None else task.typed(text)

    def _storing(
        self, label: str | float | Sequence[float] | Sequence[str], *, new: bool
    ) -> Callable[[LocalData, np.ndarray[Any, Any]], int]:
        """What stores a sample with this class, or these targets. Raises ConfigError."""
        if isinstance(label, str):
            relearn.check_labels(self._service, [label], new=new)
            return lambda local, x: local.add(x, [label])
        if isinstance(self._service.layout.task, MultiLabel) or _names(label):
            if not isinstance(label, Sequence) or not all(isinstance(name, str) for name in label):
                raise ConfigError(f"the labels are {label}"[:200], expected="a list of names, empty for none")
            y = relearn.checked_label_set(self._service, [str(name) for name in label])
        else:
            y = relearn.checked_targets(self._service, np.atleast_1d(np.asarray(label, np.float64)))
        return lambda local, x: local.add_targets(x, y[None])

    def sample(self, id: str) -> np.ndarray[Any, Any]:
        """An unlabelled sample [*shape]. Raises DataError if there is none with this id, StateError."""
        stored = self._buffer.read(id)
        if stored is None:
            raise self._missing(id)
        return stored.x

    def _missing(self, id: str) -> DataError:
        return DataError(f"no unlabelled sample '{id[:80]}'", where=str(self._buffer.folder),
                         hint="it has a label already, or a limit under [unlabelled] in device.toml removed it")

    def personalize(self) -> str:
        """Personalizes the model on all labelled samples now, and returns how. ``edge-agent run`` does it by itself
        with the next round. Raises ConfigError, DataError without samples, StateError, WorseModel."""
        return relearn.personalize(self._service).how

    def unlabelled(self, limit: int = 20) -> list[UnlabelledSample]:
        """At most ``limit`` unlabelled samples: the least certain of the newest ``NEWEST`` first, or those with the
        highest scores, or the newest first if no model can answer or answers are numbers. Samples of another shape or
        dtype than the model's are left out. Raises StateError."""
        if self._buffer.interrupted():
            with self._service.slots.writing():
                self._buffer.recover(self._service.local().is_added)
        newest = [self._buffer.read(name) for name in reversed(self._buffer.ids()[-NEWEST:])]
        fitting = [stored for stored in newest if stored is not None and self._fits(stored)]
        self._service.follow()
        if self._service.answering is None or not fitting:
            return [UnlabelledSample(stored.id, stored.time, stored.x, None) for stored in fitting[:limit]]
        answers = self._answers(np.stack([stored.x for stored in fitting]), again=True)
        found = [UnlabelledSample(s.id, s.time, s.x, answer) for s, answer in zip(fitting, answers, strict=True)]
        scored = isinstance(self._service.layout.task, Anomaly)
        first = [-answer.values[SCORE] if scored else answer.certainty for answer in answers]
        return [found[n] for n in np.argsort(first, kind="stable")[:limit]]

    def _answers(self, x: np.ndarray[Any, Any], *, again: bool = False) -> list[Answer]:
        """The answers to samples [n, *shape]. again: as in ``Service.answers``."""
        answer = self._service.answers(x, again=again)
        if answer.label_sets:
            thresholds = dict(zip(answer.outputs, answer.thresholds, strict=True)) if answer.thresholds else {}
            return [
                Answer("", dict(zip(answer.outputs, row, strict=True)), None, answer.round, answer.personalization,
                       labels=labels, thresholds=thresholds)
                for labels, row in zip(answer.label_sets, answer.probabilities, strict=True)
            ]
        if answer.alarms:
            return [Answer("", {}, None, answer.round, answer.personalization,
                           dict(zip(answer.outputs, row, strict=True)), alarm=alarm, threshold=answer.threshold)
                    for row, alarm in zip(answer.values, answer.alarms, strict=True)]
        if answer.outputs:
            return [Answer("", {}, None, answer.round, answer.personalization,
                           dict(zip(answer.outputs, row, strict=True))) for row in answer.values]
        names = answer.classes or self._service.layout.classes
        return [
            Answer(
                label, dict(zip(names, row, strict=True)), answer.unknown[i] if answer.unknown else None,
                answer.round, answer.personalization,
            )
            for i, (label, row) in enumerate(zip(answer.labels, answer.probabilities, strict=True))
        ]  # fmt: skip

    def _fits(self, stored: Stored) -> bool:
        spec = self._service.layout.sample
        return stored.x.shape == tuple(spec.shape) and str(stored.x.dtype) == spec.dtype

    def _sample(self, x: ArrayLike) -> np.ndarray[Any, Any]:
        """x as one raw sample of the model; an image of another size and sound are prepared. Raises DataError."""
        spec = self._service.layout.sample
        expected = f"{spec.dtype} {list(spec.shape)}"
        try:
            given = np.asarray(x)
        except ValueError as error:
            raise DataError(f"is not an array: {error}", expected=expected) from error
        sample = given if given.shape == tuple(spec.shape) else prepared(given[None], spec)[0]
        if sample.shape != tuple(spec.shape) or not np.can_cast(sample.dtype, spec.dtype, "same_kind"):
            raise DataError(
                f"a sample {given.dtype} {list(given.shape)}", expected=expected,
                hint="one sample at a time, as it was in the file that the fleet was made of",
            )  # fmt: skip
        sample = sample.astype(spec.dtype)
        if not np.isfinite(sample).all():
            raise DataError("the sample holds a value that is not finite")
        return sample


def _certainty(probability: float, threshold: float) -> float:
    """0.5 at the threshold, 1 at a probability of 0 or 1."""
    if probability < threshold:
        return 1 - probability / threshold / 2
    return 1 - (1 - probability) / (1 - threshold) / 2


def _names(label: Any) -> bool:
    """Whether these are names, and no numbers."""
    return isinstance(label, Sequence) and any(isinstance(name, str) for name in label)
