"""Judges a fleet's answers against the most frequent class, and against what a device reaches alone.

All counts are pooled over the devices, so that a device with few samples weighs little. Both comparisons use accuracy
and macro-F1. A warning needs the fleet to be below the mark by both figures, and by one of them even with the sampling
noise in its favour (one-sided, two standard errors of the difference of two binomial shares). If nine of ten samples
are of one class, accuracy is coarse and macro-F1 decides.

- chance: the mark is a fifth (``CHANCE_MARGIN``) of the way from an answer that ignores the sample to a perfect one.
  For accuracy, that answer is the most frequent class of the device's own labelled samples; for macro-F1 the better of
  it and of guessing each class as often as it occurs. If the training loss is near 0 (``MEMORISED``), one standard
  error is enough, because a memorised training set that helps so little is evidence itself.
- alone: the mark is three points (``ALONE_MARGIN``) below the plain baseline that each device fitted to its own
  labelled samples. There is no warning about a fleet that is about as good: samples of one device are more alike than
  independent ones, so a small difference means less than the binomial noise suggests.

Shapes: N classes, M devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cloud_server.figures.formatting import count_text, share_text
from cloud_server.figures.scores import AMOUNT, Score, f1_by_class
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Alone, Evaluation
from fleet_core.tasks import calibration

SIGMAS = 2.0
CHANCE_MARGIN = 0.2
ALONE_MARGIN = 0.03
MISSING_REPORTS = 0.2  # share of the devices that are on whose reports may be missing
MEMORISED = 0.05
"""Training loss below which the training samples are memorised."""
ANOTHER_MODEL = "another model (docs/models.md), more rounds while the loss still falls, or 'metafleet advise FILE'"
LABELS = "whether the labels are mixed up, and whether the channels can tell the classes apart"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """fleet, frequent, alone: scores over the classes that occur, pooled over ``devices`` with ``samples`` test
    samples. frequent: each device answers its most frequent class. alone: a plain baseline on each device, None if not
    measured. warnings: sentences, empty if there is no problem. round: the last evaluated one."""

    round: int = field(metadata=AMOUNT)
    devices: int = field(metadata=AMOUNT)
    samples: int = field(metadata=AMOUNT)
    fleet: Score
    frequent: Score
    alone: Score | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class DeviceAnswers:
    """One device's answers to its test samples, as counts [N, N], row = true class. fleet: its present answers. alone:
    of its plain baseline, or None. frequent: the most frequent class of its own labelled samples. gaps: of the present
    answers, as ``calibration.gaps``; empty if they are not known."""

    fleet: Array
    frequent: int
    alone: Array | None = None
    gaps: Sequence[float] = ()


# The rule -------------------------------------------------------------------------------------------------------------


def near_chance(found: Score, chance: Score, truth_N: Array, loss: float | None = None) -> str:
    """A warning if ``found`` is hardly better than an answer that ignores the sample, else empty. truth_N: the number
    of evaluated samples of each class. loss: of the training, or None."""
    memorised = loss is not None and loss < MEMORISED
    sigmas = SIGMAS / 2 if memorised else SIGMAS
    if not _below(found, chance, truth_N, lambda share: share + CHANCE_MARGIN * (1 - share), sigmas):
        return ""
    return f"memorised: loss {loss:.2g}, accuracy near chance" if memorised else "accuracy near chance"


def learnable(found: Score, chance: Score) -> bool:
    """Whether a plain baseline passes the mark of ``near_chance`` by one of the figures. If not, the samples are to
    blame rather than the model."""
    pairs = (found.accuracy, chance.accuracy), (found.macro_f1, chance.macro_f1)
    return any(mine > theirs + CHANCE_MARGIN * (1 - theirs) for mine, theirs in pairs)


def worse(found: Score, other: Score, truth_N: Array) -> bool:
    """Whether ``found`` is more than ``ALONE_MARGIN`` below ``other``."""
    return _below(found, other, truth_N, lambda share: share - ALONE_MARGIN, SIGMAS)


def _below(found: Score, other: Score, truth_N: Array, mark: Callable[[float], float], sigmas: float) -> bool:
    """Whether ``found`` is below the mark by both figures, and by one of them by more than the noise. mark: computes
    the mark from a figure of ``other``."""
    held_N = np.asarray(truth_N, np.float64)[np.asarray(truth_N) > 0]
    samples = held_N.sum()
    pairs = (
        (found.accuracy, other.accuracy, samples, 1 / samples),
        (found.macro_f1, other.macro_f1, samples, float((1 / held_N).sum()) / len(held_N) ** 2),
    )
    lacking = [mark(theirs) - mine for mine, theirs, _, _ in pairs]
    noise = [math.sqrt((_variance(mine, n) + _variance(theirs, n)) * each) for mine, theirs, n, each in pairs]
    return min(lacking) > 0 and any(gap > sigmas * error for gap, error in zip(lacking, noise, strict=True))


def _variance(share: float, samples: float) -> float:
    """The variance of one sample, smoothed so that it is never 0."""
    smoothed = (share * samples + 1) / (samples + 2)
    return smoothed * (1 - smoothed)


def score(counts_NN: Array, method: str | None = None) -> Score:
    """Accuracy, and macro-F1 over the classes that occur."""
    accuracy = float(np.trace(counts_NN) / counts_NN.sum())
    macro_f1 = float(f1_by_class(counts_NN)[counts_NN.sum(1) > 0].mean())
    return Score(accuracy=accuracy, macro_f1=macro_f1, method=method)


def chance(frequent_NN: Array, truths_MN: Array) -> Score:
    """The best score of an answer that ignores the sample. frequent_NN: counts if each device always answers its most
    frequent class. truths_MN: evaluated samples of each class on each device."""
    guessed_NN = np.einsum("mn,mk->nk", truths_MN, truths_MN / truths_MN.sum(1, keepdims=True))
    always, guessing = score(frequent_NN), score(guessed_NN)
    return Score(accuracy=always.accuracy, macro_f1=max(always.macro_f1, guessing.macro_f1))


def verdict(devices: Sequence[DeviceAnswers], *, round: int = 0, loss: float | None = None) -> Verdict | None:
    """None if no device has a test sample. loss: of the last training round."""
    evaluated = [one for one in devices if one.fleet.sum()]
    if not evaluated:
        return None
    truths_MN = np.array([one.fleet.sum(1) for one in evaluated])
    truth_N, n = truths_MN.sum(0), truths_MN.shape[1]
    frequent_NN = np.zeros((n, n))
    for one, truth in zip(evaluated, truths_MN, strict=True):
        frequent_NN[:, one.frequent] += truth
    fleet, frequent = score(np.sum([one.fleet for one in evaluated], axis=0)), chance(frequent_NN, truths_MN)
    fleet = replace(fleet, calibration_error=calibration.pooled([one.gaps for one in evaluated], int(truth_N.sum())))
    alone_counts = [one.alone for one in evaluated if one.alone is not None]
    alone = score(np.sum(alone_counts, axis=0)) if alone_counts else None
    on = f"on {truth_N.sum()} held-back samples of {count_text(len(evaluated), 'device')}"
    warnings = []
    text = near_chance(fleet, frequent, truth_N, loss)
    if text:
        model_at_fault = alone is not None and learnable(alone, frequent)
        advice = ANOTHER_MODEL if model_at_fault else f"{ANOTHER_MODEL}; look {LABELS}"
        warnings.append(f"{text}: {share_text(fleet.accuracy)} {on}, where each device's most frequent class alone has "
                        f"{share_text(frequent.accuracy)}; try {advice}")
    if alone is not None:
        same_devices_NN = np.sum([one.fleet for one in evaluated if one.alone is not None], axis=0)
        if worse(score(same_devices_NN), alone, same_devices_NN.sum(1)):
            warnings.append(f"a device alone answers better: a plain baseline on its own labelled samples has accuracy "
                            f"{share_text(alone.accuracy)}, the fleet's model {share_text(fleet.accuracy)} {on}; try "
                            f"{ANOTHER_MODEL}")
    return Verdict(round=round, devices=len(evaluated), samples=int(truth_N.sum()), fleet=fleet, frequent=frequent,
                   alone=alone, warnings=tuple(warnings))


def lines(found: Verdict | None) -> list[str]:
    """For the terminal: one line with the compared accuracies, then the warnings; empty if nothing was evaluated."""
    if found is None:
        return []
    texts = ", ".join(f"{name} {share_text(score.accuracy)}" for name, score in compared(found))
    summary = f"accuracy after round {found.round}, {found.samples} held-back samples: {texts}"
    return [summary, *(f"warning: {text}" for text in found.warnings)]


def compared(found: Verdict) -> list[tuple[str, Score]]:
    """(name, score) of the fleet and of what it is compared with."""
    rows = [("the fleet, as its devices answer", found.fleet), ("each device's most frequent class", found.frequent)]
    if found.alone is not None:
        rows.append(("a plain baseline on each device alone", found.alone))
    return rows


# From the ledger ------------------------------------------------------------------------------------------------------


def of_ledger(ledger: Ledger) -> Verdict | None:
    """The verdict on the last evaluation of every enrolled device that reported what it reaches alone; None without
    such a device."""
    enrolled = {device.name for device in ledger.devices() if device.status == "enrolled"}
    alone = {row.device: row for row in ledger.latest(Alone) if row.device in enrolled}
    if not alone:
        return None
    evaluated: dict[str, Evaluation] = {}
    for number in sorted({row.round for row in alone.values()}):
        for row in ledger.each(Evaluation, round=number):  # "after" comes before "before" in the order of the key
            if row.device in alone and row.round == alone[row.device].round and row.stage != "fine_tuned":
                evaluated.setdefault(row.device, row)
    closed = [one for one in ledger.rounds("closed") if one.loss is not None][-1:]
    return verdict(
        list(_answers(evaluated, alone)), round=max((row.round for row in evaluated.values()), default=0),
        loss=closed[0].loss if closed else None,
    )


def _answers(evaluated: Mapping[str, Evaluation], alone: Mapping[str, Alone]) -> Iterable[DeviceAnswers]:
    for name, row in evaluated.items():
        baseline, fleet = alone[name], np.asarray(row.confusion, np.int64)
        counts = np.asarray(baseline.confusion, np.int64) if baseline.confusion else None
        yield DeviceAnswers(fleet, baseline.frequent, counts, row.gaps)


class WarningLog:
    """Logs the verdict's warnings once for each evaluated round in the second half of the rounds, as soon as four of
    five devices that are on have reported on it."""

    def __init__(self, ledger: Ledger, rounds: int, log: Callable[[str], None]):
        self._ledger, self._rounds, self._log = ledger, rounds, log
        self._round, self._reported, self._logged = 0, set[str](), False

    def reported(self, device: str, round: int, on: Collection[str]) -> None:
        """Call it when a device's evaluations of ``round`` are in the ledger. on: the devices that are on."""
        if round != self._round:
            self._round, self._reported, self._logged = round, set(), False
        self._reported.add(device)
        enough = (1 - MISSING_REPORTS) * len(on)
        if self._logged or 2 * round < self._rounds or len(self._reported) < enough:
            return
        if len(set(on) - self._reported) > MISSING_REPORTS * len(on):
            return
        self._logged = True
        found = of_ledger(self._ledger)
        for text in found.warnings if found is not None else ():
            self._log(f"warning: after round {round}: {text}")


