"""Recommends a method, model and codec from the runs of ``advise``, and explains the recommendation.

A candidate's score is macro-F1, which weighs a rare class as much as a frequent one, averaged over the devices that
trained and the new ones. Two candidates differ if their scores differ by more than the spread of that difference over
seeds, and by at least half a point. Among the candidates that do not differ from the best, the one that sends the
fewest bytes is chosen; among equals, the one with the best worst device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloud_server.figures.formatting import ABSENT, bytes_text, flops_text, phase_text
from cloud_server.figures.scores import Score
from cloud_server.laboratory.compare.comparison import Stat, present, stat
from cloud_server.laboratory.compare.finished_runs import DEVICES, FinishedRun, Scores
from cloud_server.laboratory.compare.tables import aligned, share, stat_text
from fleet_core.base import schema

CODEC, PLAIN_CODEC = "int8", "fp32"
LEAST_GAP, GAP_OF_ONE_SEED = 0.005, 0.02
RISING, FEW_ROUNDS = 0.01, 20
OTHERS_TOLD = 3
LEGEND = """macro-F1: over all devices, old and new; accuracy, worst device: of those that trained
plain baseline, most frequent class: on all later samples of those that trained
bytes, arithmetic, energy: of one device in one round
"""


@dataclass(frozen=True)
class Candidate:
    """A method with a model, and its figures. score: macro-F1 over all devices, old and new. mean, worst: accuracy of
    the devices that trained; new: mean accuracy of the new ones. payload, flops, joules: of one device in one round.
    risen: increase of the accuracy in the second half of the rounds. pooled: over all test samples of the devices that
    trained; loss: of their last training round. Both are means over seeds."""

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

    @property
    def name(self) -> str:
        return f"{self.method} with {self.model}"


@dataclass(frozen=True)
class Advice:
    """ranked: all candidates, the best score first. chosen: the recommended one. tied: those that do not differ from
    the best. coded: the recommended one with ``CODEC`` on the wire, if that was run."""

    chosen: Candidate
    ranked: tuple[Candidate, ...]
    tied: tuple[Candidate, ...]
    coded: Candidate | None
    codec: str
    rounds: int
    minutes: float
    remarks: tuple[str, ...]


def candidates(runs: Sequence[FinishedRun], cohort: int) -> list[Candidate]:
    """One candidate for each label ``METHOD+MODEL…`` of the runs. cohort: devices per round."""
    groups: dict[str, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return [_candidate(group, cohort) for group in groups.values()]


def _candidate(group: Sequence[FinishedRun], cohort: int) -> Candidate:
    method, model = group[0].label.split("+")[:2]
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
        _mean([run.loss for run in group]),
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
    """Macro-F1 of the devices that train and of the new ones; all devices weigh the same."""
    evaluated = [scores for scores in (run.last[DEVICES], _new(run)) if scores]
    return sum(of["macro_f1"] * of["devices"] for of in evaluated) / sum(of["devices"] for of in evaluated)


def _risen(run: FinishedRun) -> float:
    """Increase of the mean accuracy from the first to the last evaluation."""
    return run.points[-1].scores[DEVICES]["mean"] - run.points[0].scores[DEVICES]["mean"]


# The decision ---------------------------------------------------------------------------------------------------------


def gap(one: Candidate, other: Candidate) -> float:
    """The smallest difference of two scores that counts."""
    if one.score.std is None or other.score.std is None:
        return GAP_OF_ONE_SEED
    return max(LEAST_GAP, math.hypot(one.score.std, other.score.std))


def decide(
    known: Sequence[Candidate], coded: Sequence[Candidate] = (), *, rounds: int = 0, minutes: float = 0.0,
    remarks: tuple[str, ...] = (),
) -> Advice:
    """The advice from one or more candidates. Candidates with fewer seeds than others are not chosen."""
    ranked = sorted(known, key=lambda one: -one.score.mean)
    seeds = max(one.score.seeds for one in ranked)
    evaluated = [one for one in ranked if one.score.seeds == seeds]
    best = evaluated[0]
    tied = [one for one in evaluated if best.score.mean - one.score.mean <= gap(best, one)]
    chosen = min(tied, key=lambda one: (one.payload, -one.worst.mean, -one.score.mean))
    smaller = coded[0] if coded else None
    one = _federated(chosen, ranked)
    costly = smaller is not None and one.score.mean - smaller.score.mean > gap(one, smaller)
    return Advice(chosen, tuple(ranked), tuple(tied), smaller, PLAIN_CODEC if costly else CODEC, rounds, minutes,
                  remarks)


def federated(advice: Advice) -> Candidate:
    """The candidate to make a fleet of: the chosen one, or if that is training alone, the best that is not."""
    return _federated(advice.chosen, advice.ranked)


def _federated(chosen: Candidate, ranked: Sequence[Candidate]) -> Candidate:
    most = max(one.score.seeds for one in ranked)
    sending = sorted((one for one in ranked if one.payload), key=lambda one: (one.score.seeds < most, -one.score.mean))
    return chosen if chosen.payload or not sending else sending[0]


# In words -------------------------------------------------------------------------------------------------------------


def sentences(advice: Advice, facts: Mapping[str, Any]) -> list[str]:
    """The advice as a list of sentences. facts: data, devices, new_devices, support, board, …"""
    parts = (_recommendation, _expected_accuracy, _baselines, _reasons, _alternatives, _bytes, _energy, _certainty)
    return [text for part in parts for text in part(advice, facts)]


def _recommendation(advice: Advice, facts: Mapping[str, Any]) -> Iterator[str]:
    if advice.chosen.payload:
        yield f"Take {advice.chosen.name}, {advice.codec} on the wire."
        return
    yield (f"These devices do as well alone: {advice.chosen.name}, which sends nothing, is not told apart from the "
           f"best. For a fleet all the same, take {federated(advice).name}, {advice.codec} on the wire.")


def _expected_accuracy(advice: Advice, facts: Mapping[str, Any]) -> Iterator[str]:
    one = federated(advice)
    yield (f"A device then answers {_points(one.mean)} of its later samples right (mean over {facts['devices']} devices"
           f"{_over(one.mean)}), the worst device {_points(one.worst)}.")
    if one.new is not None:
        yield (f"The {facts['new_devices']} devices that took no part and learn from the first "
               f"{100 * facts['support']:g} % of their time reach {_points(one.new)}.")


def _baselines(advice: Advice, facts: Mapping[str, Any]) -> Iterator[str]:
    """The simple baselines on the same samples, and the warnings."""
    simple = [(f"a plain baseline, {plain['method']}, that learned from all devices together", plain["accuracy"])
              for plain in (facts.get("plain"),) if plain]
    simple += [("each device's most frequent class", facts["frequent"]["accuracy"])] if "frequent" in facts else []
    if simple:
        yield "Beside it: " + "; ".join(f"{name} has {100 * accuracy:.1f} %" for name, accuracy in simple) + "."
    yield from (f"Warning: {text}." for text in facts.get("warnings", ()))


def _reasons(advice: Advice, facts: Mapping[str, Any]) -> Iterator[str]:
    best, chosen = advice.ranked[0], advice.chosen
    others = [one for one in advice.tied if one != chosen]
    if others:
        listed = together([f"{one.name} ({share(one.score.mean)})" for one in others])
        equals = any(one.payload == chosen.payload for one in others)
        yield (f"Why: its macro-F1 over all devices, old and new, is {share(chosen.score.mean)}, which these runs do "
               f"not tell apart from {listed}; of them it sends the fewest bytes"
               + (", and of equals in that its worst device fares best." if equals else "."))
    else:
        yield (f"Why: its macro-F1 over all devices, old and new, is {share(chosen.score.mean)}, the best of "
               f"{len(advice.ranked)} pairs of method and model by more than the spread.")
    if best.score.mean > chosen.score.mean and best not in advice.tied:
        yield f"{best.name} had {share(best.score.mean)}, but with fewer seeds."
    alone = next((one for one in advice.ranked if not one.payload and one.model == chosen.model), None)
    if alone is not None and chosen.payload:
        yield f"Training alone, without any fleet, comes to {share(alone.score.mean)}."


def _alternatives(advice: Advice, facts: Mapping[str, Any]) -> Iterator[str]:
    one = federated(advice)
    others = [other for other in advice.ranked if (other.method, other.model) != (one.method, one.model)]
    methods = [other for other in others if other.model == one.model and other.payload][:OTHERS_TOLD]
    models = [other for other in others if other.method == one.method][:1]
    for other in (*methods, *models):
        yield f"With {other.name} instead: {', '.join(_differences(other, one))}."


def _differences(other: Candidate, one: Candidate) -> Iterator[str]:
    yield f"macro-F1 {other.score.mean - one.score.mean:+.3f}"
    yield f"accuracy {_signed(other.mean.mean - one.mean.mean)} points"
    yield f"the worst device {_signed(other.worst.mean - one.worst.mean)}"
    if other.new is not None and one.new is not None:
        yield f"new devices {_signed(other.new.mean - one.new.mean)}"
    if one.payload:
        yield _times(other.payload / one.payload, "bytes")
    if one.flops and other.flops:
        yield _times(other.flops / one.flops, "arithmetic")


def _times(ratio: float, what: str) -> str:
    return f"the same {what}" if abs(ratio - 1) < 0.05 else f"{ratio:.2g} times the {what}"


def _bytes(advice: Advice, facts: Mapping[str, Any]) -> Iterator[str]:
    one, coded = federated(advice), advice.coded
    if coded is None:
        yield (f"A device sends and receives {bytes_text(one.payload)} a round without a codec; {CODEC}, a fleet's "
               "default, was not tried.")
        return
    verdict = "more than the spread, so keep full precision" if advice.codec != CODEC else "within the spread"
    yield (f"{CODEC} on the wire brings a device's bytes of a round from {bytes_text(one.payload)} to "
           f"{bytes_text(coded.payload)}, and changes macro-F1 by {coded.score.mean - one.score.mean:+.3f}, {verdict}.")


def _energy(advice: Advice, facts: Mapping[str, Any]) -> Iterator[str]:
    one = advice.coded if advice.coded is not None and advice.codec == CODEC else federated(advice)
    work = f"{flops_text(one.flops)} of training" if one.flops else "training whose operations are not counted"
    if facts.get("board") is None:
        yield f"A round takes a device {work}; joules need --board."
    elif one.joules is None:
        why = "; ".join(f"{term}: {reason}" for term, reason in facts["absent"].items())
        yield f"A round takes a device {work}; joules on {facts['board']} are not known ({why})."
    else:
        yield (f"A round takes a device {work} and {phase_text(one.joules)} on {facts['board']}, as modelled, above "
               "idle.")


def _certainty(advice: Advice, facts: Mapping[str, Any]) -> Iterator[str]:
    one = federated(advice)
    seeds = one.score.seeds
    yield (f"How sure: {advice.rounds} rounds, {seeds} seed{'s' if seeds > 1 else ''} for the best and one for the "
           "others; each method with its own defaults; the same devices in all runs, so that other devices may move "
           f"the figures more than other seeds do; {facts['evaluated']} samples evaluated on. "
           f"{advice.minutes:.1f} minutes this time, of a budget of {facts['budget_minutes']:g}.")
    if advice.rounds < FEW_ROUNDS:
        yield f"{advice.rounds} rounds are few: methods that learn slowly look worse here than they are."
    if one.risen > RISING:
        yield (f"Its accuracy still rose by {100 * one.risen:.1f} points in the second half of the rounds: a larger "
               "budget may change the order.")
    yield from (f"Note: {remark}." for remark in advice.remarks)


def table(advice: Advice, facts: Mapping[str, Any] | None = None) -> str:
    """All candidates, the best first, and the simple baselines in ``facts``."""
    heads = ("", "macro-F1", "accuracy", "worst device", "new devices", "bytes", "arithmetic", "energy", "seeds")
    rows = [
        (one.name, stat_text(one.score), stat_text(one.mean), stat_text(one.worst), stat_text(one.new),
         bytes_text(one.payload), ABSENT if one.flops is None else flops_text(one.flops),
         ABSENT if one.joules is None else phase_text(one.joules), str(one.score.seeds))
        for one in advice.ranked
    ]
    simple = {"plain baseline": (facts or {}).get("plain"), "most frequent class": (facts or {}).get("frequent")}
    others = [(name, share(score["macro_f1"]), share(score["accuracy"]), *[ABSENT] * 6)
              for name, score in simple.items() if score]
    return "\n".join(aligned([heads, *rows, *others])) + "\n" + LEGEND


def to_json(advice: Advice) -> dict[str, Any]:
    """Ready for ``json.dumps``; missing figures are left out."""
    plain: dict[str, Any] = present(schema.plain(advice))
    return plain


def together(words: Sequence[str]) -> str:
    """The words as ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _points(one: Stat) -> str:
    return f"{100 * one.mean:.1f} %" + (f" ± {100 * one.std:.1f}" if one.std is not None else "")


def _over(one: Stat) -> str:
    return f", ± over {one.seeds} seeds" if one.seeds > 1 else "; one seed"


def _signed(share_difference: float) -> str:
    return f"{100 * share_difference:+.1f}"
