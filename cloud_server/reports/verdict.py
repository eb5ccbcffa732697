"""Whether a fleet's answers are worth anything: beside the most frequent class, and beside what a device does alone.

All counts are pooled over the devices, so that one with few samples weighs little. Two comparisons, each by accuracy
and by macro-F1: a warning needs the fleet below the mark by both, and by one of them even with the sampling noise in
its favour (one-sided, two standard errors of the difference of two binomial shares of so many samples). Where nine of
ten samples are of one class, accuracy is coarse and macro-F1 decides.

- chance: the mark is a fifth (``ROOM``) of the way from an answer that ignores the sample to a perfect one. That answer
  is, by accuracy, the most frequent class of the device's own labelled samples; by macro-F1 the better of it and of
  guessing each class as often as it occurs. Where the training loss is near 0 (``MEMORISED``), one standard error is
  enough: that what is known by heart helps so little is evidence of its own.
- alone: the mark is three points (``POINTS``) below the plain baseline that each device fitted to its own labelled
  samples. A fleet that is about as good is not warned of: samples of one device are more alike than independent ones,
  so that a small difference means less than the noise of so many samples says.

Shapes: N classes, M devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cloud_server.records.ledger import Ledger
from cloud_server.records.ledger_tables import Alone, Evaluation
from cloud_server.reports.formatting import share_text
from cloud_server.reports.scores import AMOUNT, Score

SIGMAS = 2.0
ROOM = 0.2
POINTS = 0.03
MISSING = 0.2  # of the devices that are on, whose reports are not waited for
MEMORISED = 0.05
"""A training loss below which the training samples are known by heart."""
ANOTHER_MODEL = "another model (docs/models.md), more rounds while the loss still falls, or 'metafleet advise FILE'"
LABELS = "whether the labels are mixed up, and whether the channels can tell the classes apart"

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """fleet, frequent, alone: pooled over ``devices`` with ``samples`` held-back samples, over the classes that occur.
    frequent: the most frequent class of each device. alone: a plain baseline on each device, None where not measured.
    warnings: sentences; empty where nothing is wrong. round: the last that was evaluated."""

    round: int = field(metadata=AMOUNT)
    devices: int = field(metadata=AMOUNT)
    samples: int = field(metadata=AMOUNT)
    fleet: Score
    frequent: Score
    alone: Score | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Answers:
    """Of one device on its held-back samples, counts [N, N], row = true class. fleet: as the device answers now.
    frequent: the most frequent class of its own labelled samples. alone: of its plain baseline, or None."""

    fleet: Array
    frequent: int
    alone: Array | None = None


# The rule -------------------------------------------------------------------------------------------------------------


def near_chance(found: Score, chance: Score, truth_N: Array, loss: float | None = None) -> str:
    """In words whether ``found`` is hardly better than an answer that ignores the sample; empty where it is better.
    truth_N: the evaluated samples of each class. loss: of the training, or None."""
    memorised = loss is not None and loss < MEMORISED
    sigmas = SIGMAS / 2 if memorised else SIGMAS
    if not _below(found, chance, truth_N, lambda share: share + ROOM * (1 - share), sigmas):
        return ""
    return f"memorised: loss {loss:.2g}, accuracy near chance" if memorised else "accuracy near chance"


def learnable(found: Score, chance: Score) -> bool:
    """Whether a plain baseline passes the mark of ``near_chance`` by either figure. If not, look at the samples."""
    pairs = (found.accuracy, chance.accuracy), (found.macro_f1, chance.macro_f1)
    return any(mine > theirs + ROOM * (1 - theirs) for mine, theirs in pairs)


def worse(found: Score, other: Score, truth_N: Array) -> bool:
    """Whether ``found`` is more than ``POINTS`` below ``other``."""
    return _below(found, other, truth_N, lambda share: share - POINTS, SIGMAS)


def _below(found: Score, other: Score, truth_N: Array, mark: Callable[[float], float], sigmas: float) -> bool:
    """By accuracy and by macro-F1, and by one of them by more than the noise. mark: from a figure of ``other``."""
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
    """Of one sample; never 0, however few were asked."""
    smoothed = (share * samples + 1) / (samples + 2)
    return smoothed * (1 - smoothed)


def score(counts_NN: Array, method: str | None = None) -> Score:
    """Accuracy, and macro-F1 over the classes that occur."""
    truth_N, answers_N = counts_NN.sum(1), counts_NN.sum(0)
    f1_N = 2 * np.diagonal(counts_NN) / np.maximum(truth_N + answers_N, 1e-12)
    accuracy = float(np.trace(counts_NN) / counts_NN.sum())
    return Score(accuracy=accuracy, macro_f1=float(f1_N[truth_N > 0].mean()), method=method)


def chance(frequent_NN: Array, truths_MN: Array) -> Score:
    """frequent_NN: counts of the most frequent class as the answer to everything. truths_MN: samples of each class that
    each device was evaluated on."""
    guessed_NN = np.einsum("mn,mk->nk", truths_MN, truths_MN / truths_MN.sum(1, keepdims=True))
    always, guessing = score(frequent_NN), score(guessed_NN)
    return Score(accuracy=always.accuracy, macro_f1=max(always.macro_f1, guessing.macro_f1))


def verdict(devices: Sequence[Answers], *, round: int = 0, loss: float | None = None) -> Verdict | None:
    """None where no device has a held-back sample. loss: of the last round of training."""
    evaluated = [one for one in devices if one.fleet.sum()]
    if not evaluated:
        return None
    truths_MN = np.array([one.fleet.sum(1) for one in evaluated])
    truth_N, n = truths_MN.sum(0), truths_MN.shape[1]
    frequent_NN = np.zeros((n, n))
    for one, truth in zip(evaluated, truths_MN, strict=True):
        frequent_NN[:, one.frequent] += truth
    fleet = score(np.sum([one.fleet for one in evaluated], axis=0))
    ignoring = chance(frequent_NN, truths_MN)
    both = [(one.fleet, one.alone) for one in evaluated if one.alone is not None]
    alone = score(np.sum([theirs for _, theirs in both], axis=0)) if both else None
    said = []
    on = f"on {truth_N.sum()} held-back samples of {_devices(len(evaluated))}"
    began = near_chance(fleet, ignoring, truth_N, loss)
    if began:
        by_plain = alone is not None and learnable(alone, ignoring)
        said.append(f"{began}: {share_text(fleet.accuracy)} {on}, where each device's most frequent class alone has "
                    f"{share_text(ignoring.accuracy)}; try {ANOTHER_MODEL}" + ("" if by_plain else f"; look {LABELS}"))
    if alone is not None:
        together_NN = np.sum([ours for ours, _ in both], axis=0)
        if worse(score(together_NN), alone, together_NN.sum(1)):
            said.append(f"a device alone answers better: a plain baseline on its own labelled samples has accuracy "
                        f"{share_text(alone.accuracy)}, the fleet's model {share_text(fleet.accuracy)} {on}; try "
                        f"{ANOTHER_MODEL}")
    return Verdict(round=round, devices=len(evaluated), samples=int(truth_N.sum()), fleet=fleet, frequent=ignoring,
                   alone=alone, warnings=tuple(said))


def lines(found: Verdict | None) -> list[str]:
    """For the terminal: the warnings, or in one line what was compared; nothing where nothing was evaluated."""
    if found is None:
        return []
    texts = ", ".join(f"{name} {share_text(score.accuracy)}" for name, score in compared(found))
    told = f"accuracy after round {found.round}, {found.samples} held-back samples: {texts}"
    return [told, *(f"warning: {text}" for text in found.warnings)]


def compared(found: Verdict) -> list[tuple[str, Score]]:
    """What was compared, in words, and its score."""
    rows = [("the fleet, as its devices answer", found.fleet), ("each device's most frequent class", found.frequent)]
    if found.alone is not None:
        rows.append(("a plain baseline on each device alone", found.alone))
    return rows


def _devices(number: int) -> str:
    return f"{number} device{'s' * (number != 1)}"


# From the ledger ------------------------------------------------------------------------------------------------------


def of_ledger(ledger: Ledger) -> Verdict | None:
    """Of the last evaluation of every enrolled device that said what it can do alone; None without one."""
    enrolled = {device.name for device in ledger.devices() if device.status == "enrolled"}
    alone = {row.device: row for row in ledger.each(Alone) if row.device in enrolled}
    if not alone:
        return None
    evaluated: dict[str, Evaluation] = {}
    for row in ledger.each(Evaluation):  # "after" comes before "before" in the order of the key
        if row.device in alone and row.round == alone[row.device].round and row.stage != "fine_tuned":
            evaluated.setdefault(row.device, row)
    closed = [one for one in ledger.rounds("closed") if one.loss is not None][-1:]
    return verdict(
        list(_answers(evaluated, alone)), round=max((row.round for row in evaluated.values()), default=0),
        loss=closed[0].loss if closed else None,
    )


def _answers(evaluated: Mapping[str, Evaluation], alone: Mapping[str, Alone]) -> Iterable[Answers]:
    for name, row in evaluated.items():
        theirs, fleet = alone[name], np.asarray(row.confusion, np.int64)
        counts = np.asarray(theirs.confusion, np.int64) if theirs.confusion else None
        yield Answers(fleet, theirs.frequent, counts)


class Watch:
    """Logs the warnings once for each evaluated round of the second half of the rounds, when four of five devices that
    are on have reported on it."""

    def __init__(self, ledger: Ledger, rounds: int, log: Callable[[str], None]):
        self._ledger, self._rounds, self._log = ledger, rounds, log
        self._round, self._reported, self._told = 0, set[str](), False

    def reported(self, device: str, round: int, on: Collection[str]) -> None:
        """A device's evaluations of ``round`` are in the ledger. on: the devices that are there."""
        if round != self._round:
            self._round, self._reported, self._told = round, set(), False
        self._reported.add(device)
        missing = len(set(on) - self._reported)
        if self._told or 2 * round < self._rounds or missing > MISSING * len(on):
            return
        self._told = True
        found = of_ledger(self._ledger)
        for text in found.warnings if found is not None else ():
            self._log(f"warning: after round {round}: {text}")
