"""Recommends a method, model and codec from the runs of ``advise``, and explains the recommendation.

Among the candidates that do not differ from the best, the one that sends the fewest bytes is chosen; among equals, the
one with the best worst device. Of the codecs that were tried with it and lose no more macro-F1 than
``candidates.most_lost``, the one with the fewest bytes is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloud_server.figures.formatting import ABSENT, bytes_text, flops_text, phase_text
from cloud_server.figures.scores import ACCURACY
from cloud_server.laboratory.advise.candidates import LEAST_GAP, Candidate, behind, cheapest, gap, most_lost
from cloud_server.laboratory.advise.simple_baselines import SimpleBaselines
from cloud_server.laboratory.advise.task_baselines import TITLES, TaskBaselines
from cloud_server.laboratory.compare.comparison import Stat, present
from cloud_server.laboratory.compare.tables import aligned, share, stat_text
from fleet_core.base import schema

CODEC, EXACT = "int8", "fp32"
"""The recommended codec if none was tried (a fleet's default), and the recommended codec if every codec that was tried
loses too much."""
RISING, FEW_ROUNDS = 0.01, 20
OTHERS_TOLD = 3
LEGEND = """macro-F1: over all devices, old and new; accuracy, worst device: of those that trained
plain baseline, most frequent class: on all later samples of those that trained
bytes, arithmetic, energy: of one device in one round
"""
TASK_LEGEND = """{figure}, {better} is better: all devices: old and new; worst device: of those that trained
without a fleet: on all later samples of those that trained
bytes, arithmetic, energy: of one device in one round
"""


@dataclass(frozen=True)
class Advice:
    """ranked: all candidates, the best score first. chosen: the recommended one. tied: those that do not differ from
    the best. coded: the candidate for a fleet with each codec that was tried, in that order. codec: the recommended
    codec, NAME or UP/DOWN."""

    chosen: Candidate
    ranked: tuple[Candidate, ...]
    tied: tuple[Candidate, ...]
    coded: tuple[Candidate, ...]
    codec: str
    rounds: int
    minutes: float
    remarks: tuple[str, ...]


# The decision ---------------------------------------------------------------------------------------------------------


def decide(
    known: Sequence[Candidate], coded: Sequence[Candidate] = (), *, rounds: int = 0, minutes: float = 0.0,
    remarks: tuple[str, ...] = (),
) -> Advice:
    """The advice from one or more candidates. Candidates with fewer seeds than others are not chosen."""
    ranked = sorted(known, key=lambda one: -one.better(one.score.mean))
    seeds = max(one.score.seeds for one in ranked)
    evaluated = [one for one in ranked if one.score.seeds == seeds]
    best = evaluated[0]
    tied = [one for one in evaluated if behind(best, one) <= gap(best, one)]
    chosen = min(tied, key=lambda one: (one.payload, -one.better(one.worst.mean), -one.better(one.score.mean)))
    taken = cheapest(_federated(chosen, ranked), coded)
    codec = taken.codec if taken else EXACT if coded else CODEC
    return Advice(chosen, tuple(ranked), tuple(tied), tuple(coded), codec, rounds, minutes, remarks)


def federated(advice: Advice) -> Candidate:
    """The candidate for a fleet: the chosen one; if that is training alone, the best of the others."""
    return _federated(advice.chosen, advice.ranked)


def on_the_wire(advice: Advice) -> Candidate:
    """The candidate for a fleet, with the recommended codec if that was tried."""
    return next((one for one in advice.coded if one.codec == advice.codec), federated(advice))


def _federated(chosen: Candidate, ranked: Sequence[Candidate]) -> Candidate:
    most = max(one.score.seeds for one in ranked)
    sending = sorted((one for one in ranked if one.payload),
                     key=lambda one: (one.score.seeds < most, -one.better(one.score.mean)))
    return chosen if chosen.payload or not sending else sending[0]


def baseline_facts(advice: Advice, baselines: SimpleBaselines | TaskBaselines) -> dict[str, Any]:
    """The scores of the simple baselines, and warnings about candidates that are no better."""
    one = federated(advice)
    others = [*((other.name, other) for other in advice.ranked if other is not one),
              *((f"{other.name}, {other.codec}", other) for other in advice.coded)]
    if isinstance(baselines, TaskBaselines):
        warnings = [text for name, other in [(one.name, one), *others] if other.pooled_figure is not None
                    for text in baselines.warnings(name, other.pooled_figure, advice.rounds, plain=other is one)]
        return {**baselines.facts(), "warnings": warnings}
    warnings = [] if one.pooled is None else baselines.warnings(one.name, one.pooled, one.loss, advice.rounds)
    for name, other in others:
        if other.pooled is not None:
            warnings += baselines.near_chance(name, other.pooled, other.loss, advice.rounds)
    facts = {"plain": baselines.plain, "frequent": baselines.frequent}
    return {**{name: schema.plain(score) for name, score in facts.items() if score is not None}, "warnings": warnings}


# In words -------------------------------------------------------------------------------------------------------------


def sentences(advice: Advice, facts: Mapping[str, Any]) -> list[str]:
    """The advice as a list of sentences. facts: data, devices, new_devices, support, board, …"""
    parts = (_recommendation, _expected_accuracy, _baselines, _reasons, _alternatives, _bytes, _energy, _certainty)
    return [text for part in parts for text in part(advice, facts)]


def _recommendation(advice: Advice, facts: Mapping[str, Any]) -> Iterator[str]:
    if advice.chosen.payload:
        yield f"Take {advice.chosen.name}, {advice.codec} on the wire."
        return
    yield (f"These devices do as well alone: {advice.chosen.name}, which sends nothing, cannot be told apart from the "
           f"best. If you want a fleet anyway, take {federated(advice).name}, {advice.codec} on the wire.")


def _expected_accuracy(advice: Advice, facts: Mapping[str, Any]) -> Iterator[str]:
    one = federated(advice)
    if one.figure != ACCURACY:
        yield (f"A device then has the {one.figure.name} {stat_text(one.mean)} on its later samples (mean over "
               f"{facts['devices']} devices{_over(one.mean)}), the worst device {stat_text(one.worst)}.")
        if one.new is not None:
            yield (f"The {facts['new_devices']} devices that took no part and learn from the first "
                   f"{100 * facts['support']:g} % of their time have {stat_text(one.new)}.")
        return
    yield (f"A device then answers {_points(one.mean)} of its later samples right (mean over {facts['devices']} devices"
           f"{_over(one.mean)}), the worst device {_points(one.worst)}.")
    if one.new is not None:
        yield (f"The {facts['new_devices']} devices that took no part and learn from the first "
               f"{100 * facts['support']:g} % of their time reach {_points(one.new)}.")


def _baselines(advice: Advice, facts: Mapping[str, Any]) -> Iterator[str]:
    """The simple baselines on the same samples, and the warnings."""
    simple = [(f"a plain baseline, {plain['method']}, that learned from all devices together", plain["accuracy"])
              for plain in (facts.get("plain"),) if isinstance(plain, Mapping)]
    simple += [("each device's most frequent class", facts["frequent"]["accuracy"])] if "frequent" in facts else []
    of_task = _of_task(facts)
    if of_task:
        yield "For comparison: " + "; ".join(f"{title} has {value:.3f}" for title, value in of_task) + "."
    elif simple:
        yield "For comparison: " + "; ".join(f"{name} has {100 * accuracy:.1f} %" for name, accuracy in simple) + "."
    yield from (f"Warning: {text}." for text in facts.get("warnings", ()))


def _of_task(facts: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(title, figure) of the baselines of a task without classes; empty for classes."""
    return [(title, facts[key]) for key, title in TITLES.items() if key in facts] if "measure" in facts else []


def _reasons(advice: Advice, facts: Mapping[str, Any]) -> Iterator[str]:
    best, chosen = advice.ranked[0], advice.chosen
    others = [one for one in advice.tied if one != chosen]
    if others:
        listed = together([f"{one.name} ({share(one.score.mean)})" for one in others])
        equals = any(one.payload == chosen.payload for one in others)
        yield (f"Why: its {_figure(chosen)} over all devices, old and new, is {share(chosen.score.mean)}, which these "
               f"runs do not tell apart from {listed}; of these it sends the fewest bytes"
               + (", and of those that send equally few its worst device is the best." if equals else "."))
    else:
        yield (f"Why: its {_figure(chosen)} over all devices, old and new, is {share(chosen.score.mean)}, the best of "
               f"{len(advice.ranked)} pairs of method and model by more than the spread.")
    if behind(best, chosen) > 0 and best not in advice.tied:
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
    yield f"{_figure(one)} {other.score.mean - one.score.mean:+.3f}"
    signed = _signed
    if one.figure != ACCURACY:
        signed = "{:+.3f}".format
    else:
        yield f"accuracy {signed(other.mean.mean - one.mean.mean)} points"
    yield f"the worst device {signed(other.worst.mean - one.worst.mean)}"
    if other.new is not None and one.new is not None:
        yield f"new devices {signed(other.new.mean - one.new.mean)}"
    if one.payload:
        yield _times(other.payload / one.payload, "bytes")
    if one.flops and other.flops:
        yield _times(other.flops / one.flops, "arithmetic")


def _times(ratio: float, what: str) -> str:
    return f"the same {what}" if abs(ratio - 1) < 0.05 else f"{ratio:.2g} times the {what}"


def _bytes(advice: Advice, facts: Mapping[str, Any]) -> Iterator[str]:
    one, taken = federated(advice), on_the_wire(advice)
    if not advice.coded:
        yield (f"A device sends and receives {bytes_text(one.payload)} a round without a codec; {CODEC}, a fleet's "
               "default, was not tried.")
        return
    most = most_lost(one)
    why = "one seed" if one.score.std is None else "half a point" if most == LEAST_GAP else "the spread without a codec"
    others = together([f"{other.codec} {other.score.mean - one.score.mean:+.3f}" for other in advice.coded
                       if other != taken])
    if taken == one:
        yield (f"A device sends and receives {bytes_text(one.payload)} a round without a codec; each that was tried "
               f"loses more than {most:.3f} of {_figure(one)} ({why}): {others}.")
        return
    yield (f"{taken.codec} on the wire brings a device's bytes of a round from {bytes_text(one.payload)} to "
           f"{bytes_text(taken.payload)}, and changes {_figure(one)} by {taken.score.mean - one.score.mean:+.3f}.")
    if others:
        yield (f"Of the codecs tried it sends the fewest bytes and loses no more than {most:.3f} ({why}); the others: "
               f"{others}.")


def _energy(advice: Advice, facts: Mapping[str, Any]) -> Iterator[str]:
    one = on_the_wire(advice)
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
        moved = f"accuracy still rose by {100 * one.risen:.1f} points" if one.figure == ACCURACY else (
            f"{one.figure.name} still became better by {one.risen:.3f}")
        yield f"Its {moved} in the second half of the rounds: a larger budget may change the order."
    yield from (f"Note: {remark}." for remark in advice.remarks)


def table(advice: Advice, facts: Mapping[str, Any] | None = None) -> str:
    """All candidates, the best first, the recommended one with each codec, and the simple baselines in ``facts``."""
    figure = advice.chosen.figure
    figures = ("macro-F1", "accuracy") if figure == ACCURACY else ("all devices", "trained")
    heads = ("", *figures, "worst device", "new devices", "bytes", "arithmetic", "energy", "seeds")
    named = [*((one.name, one) for one in advice.ranked), *((f"{one.name}, {one.codec}", one) for one in advice.coded)]
    rows = [
        (name, stat_text(one.score), stat_text(one.mean), stat_text(one.worst), stat_text(one.new),
         bytes_text(one.payload), ABSENT if one.flops is None else flops_text(one.flops),
         ABSENT if one.joules is None else phase_text(one.joules), str(one.score.seeds))
        for name, one in named
    ]
    known = facts or {}
    legend = LEGEND
    if figure != ACCURACY:
        legend = TASK_LEGEND.format(figure=figure.name, better="less" if figure.lower else "more")
        others = [(title, ABSENT, share(value), *[ABSENT] * 6) for title, value in _of_task(known)]
    else:
        simple = {"plain baseline": known.get("plain"), "most frequent class": known.get("frequent")}
        others = [(name, share(score["macro_f1"]), share(score["accuracy"]), *[ABSENT] * 6)
                  for name, score in simple.items() if score]
    return "\n".join(aligned([heads, *rows, *others])) + "\n" + legend


def to_json(advice: Advice) -> dict[str, Any]:
    """Ready for ``json.dumps``; missing figures are left out."""
    plain: dict[str, Any] = present(schema.plain(advice))
    return plain


def together(words: Sequence[str]) -> str:
    """The words as ``a, b and c``; empty without any."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _figure(one: Candidate) -> str:
    """What a score is."""
    return "macro-F1" if one.figure == ACCURACY else one.figure.name


def _points(one: Stat) -> str:
    return f"{100 * one.mean:.1f} %" + (f" ± {100 * one.std:.1f}" if one.std is not None else "")


def _over(one: Stat) -> str:
    return f", ± over {one.seeds} seeds" if one.seeds > 1 else "; one seed"


def _signed(share_difference: float) -> str:
    return f"{100 * share_difference:+.1f}"
