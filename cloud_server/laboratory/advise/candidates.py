"""The candidates of ``advise``: a method with a model and a codec, its figures, and when two of them differ.

A candidate's score is macro-F1, which weighs a rare class as much as a frequent one, averaged over the devices that
trained and the new ones; of a task without classes, the mean of its figure over these devices. Two candidates differ if
their scores differ by more than the spread of that difference over seeds, and by at least half a point (0.005); with
one seed, by two points. A codec may lose as much as the score in full precision varies over seeds, at
least half a point; how much the score with the codec varies does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cloud_server.figures.scores import ACCURACY, FIGURES, Score
from cloud_server.laboratory.compare.comparison import Stat, stat
from cloud_server.laboratory.compare.finished_runs import DEVICES, FinishedRun, Scores
from cloud_server.laboratory.plan.experiment import PLAIN
from fleet_core.tasks.measured import Figure

LEAST_GAP, GAP_OF_ONE_SEED = 0.005, 0.02
IN_LABEL = "/", "_"  # UP/DOWN is UP_DOWN in a label, which is part of a folder's name


@dataclass(frozen=True)
class Candidate:
    """A method with a model and a codec, and its figures. score: macro-F1 over all devices, old and new. mean, worst:
    accuracy of the devices that trained; new: mean accuracy of the new ones. payload, flops, joules: costs of one
    device in one round. risen: how much better the mean became in the second half of the rounds. pooled: score over all
    test samples of the devices that trained; loss: their loss in the last round. Both are means over seeds. measure: a
    key of ``FIGURES``; of a task without classes score, mean, worst, new and pooled_figure, in place of pooled, are of
    that."""

    method: str
    model: str
    score: Stat
    mean: Stat
    worst: Stat
    new: Stat | None
    payload: float
    flops: float | None
    joules: float | None
    risen: float
    pooled: Score | None = None
    loss: float | None = None
    codec: str = PLAIN
    measure: str = field(default=ACCURACY.key, metadata={"sparse": True})
    pooled_figure: float | None = None

    @property
    def figure(self) -> Figure:
        return FIGURES[self.measure]

    def better(self, value: float) -> float:
        """``value`` of a score, so that more is better."""
        return -value if self.figure.lower else value

    @property
    def name(self) -> str:
        return f"{self.method} with {self.model}"


def label_of(method: str, model: str, codec: str) -> str:
    """The label of a candidate's runs."""
    return "+".join([method, model, *([codec.replace(*IN_LABEL)] if codec != PLAIN else [])])


def candidates(runs: Sequence[FinishedRun], cohort: int) -> list[Candidate]:
    """One candidate for each label of the runs. cohort: devices per round."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return [_candidate(group, cohort) for group in groups.values()]


def _candidate(group: Sequence[FinishedRun], cohort: int) -> Candidate:
    method, model, *codec = group[0].label.split("+")
    new = [_new(run) for run in group]

    def each(key: str) -> float | None:
        spent = [run.spent[key] / (run.spent["rounds"] * cohort) for run in group if key in run.spent]
        return sum(spent) / len(spent) if len(spent) == len(group) else None

    return Candidate(
        method, model, stat([score(run) for run in group]),
        stat([run.last[DEVICES]["mean"] for run in group]),
        stat([run.last[DEVICES]["worst"] for run in group]),
        stat([scores["mean"] for scores in new]) if all(new) else None, each("payload_bytes") or 0.0,
        each("flops"), each("joules"), sum(_risen(run) for run in group) / len(group), _pooled(group),
        _mean([run.loss for run in group]), codec[0].replace(IN_LABEL[1], IN_LABEL[0]) if codec else PLAIN,
        group[0].figure,
        None if group[0].figure == ACCURACY.key else _mean([run.last[DEVICES].get("pooled") for run in group]),
    )


def _pooled(group: Sequence[FinishedRun]) -> Score | None:
    accuracy, f1 = (_mean([run.last[DEVICES].get(key) for run in group]) for key in ("pooled", "macro_f1"))
    return None if accuracy is None or f1 is None else Score(accuracy=accuracy, macro_f1=f1)


def _mean(values: Sequence[float | None]) -> float | None:
    """None if one of the values is missing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _new(run: FinishedRun) -> Scores:
    return next((scores for kind, scores in run.last.items() if kind.startswith("new")), {})


def score(run: FinishedRun) -> float:
    """Macro-F1, or a task's figure, of the devices that train and of the new ones; all devices weigh the same."""
    key = "macro_f1" if run.figure == ACCURACY.key else "mean"
    evaluated = [scores for scores in (run.last[DEVICES], _new(run)) if scores]
    return sum(of[key] * of["devices"] for of in evaluated) / sum(of["devices"] for of in evaluated)


def _risen(run: FinishedRun) -> float:
    """How much better the mean over the devices became from the first to the last evaluation."""
    risen = run.points[-1].scores[DEVICES]["mean"] - run.points[0].scores[DEVICES]["mean"]
    return -risen if FIGURES[run.figure].lower else risen


def behind(one: Candidate, other: Candidate) -> float:
    """How much worse the score of ``other`` is than that of ``one``."""
    return one.better(one.score.mean) - other.better(other.score.mean)


def gap(one: Candidate, other: Candidate) -> float:
    """The smallest difference of two scores that counts."""
    if one.score.std is None or other.score.std is None:
        return GAP_OF_ONE_SEED
    return max(LEAST_GAP, math.hypot(one.score.std, other.score.std))


def most_lost(one: Candidate) -> float:
    """How much worse the score with a codec may be than that of ``one``, in full precision."""
    return GAP_OF_ONE_SEED if one.score.std is None else max(LEAST_GAP, one.score.std)


def cheapest(one: Candidate, coded: Sequence[Candidate]) -> Candidate | None:
    """The candidate of ``coded`` with the fewest bytes among those that lose no more than ``most_lost``; None if all
    lose more. A candidate without all seeds, because a run failed, is not taken. coded: ``one`` with codecs."""
    kept = [other for other in coded
            if other.score.seeds == one.score.seeds and behind(one, other) <= most_lost(one)]
    return min(kept, key=lambda other: other.payload, default=None)
