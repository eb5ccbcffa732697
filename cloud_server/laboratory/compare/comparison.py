"""Compares runs: figures over seeds, curves, and the cost to reach an accuracy in relation to Per-FedAvg.

The cost of a target is defined as in Acar et al. 2021, "Debiasing Model Updates for Improving Personalized Federated
Training", Tables 1 and 2: what was spent up to the first *evaluated* round in which the mean over the devices reaches
it, without interpolation, so it is only as exact as the interval between evaluations. ``>N`` means that N was spent
without reaching it. The gain is Per-FedAvg's cost divided by the run's cost. A spread is the sample standard deviation
over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cloud_server.figures.formatting import bytes_text, flops_text, phase_text
from cloud_server.figures.scores import ACCURACY, FIGURES
from cloud_server.laboratory.compare.finished_runs import BY, DEVICES, FinishedRun, Point
from cloud_server.laboratory.plan.experiment import LATEST, RUNNING, SERVER
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError
from fleet_core.tasks.measured import Figure

FORMAT = 1
EXACT, FAMILY = "per-fedavg-exact", "per-fedavg"
MACRO_F1 = "macro-f1"
TARGETS_OF = (*(key.replace("_", "-") for key in FIGURES), MACRO_F1)
"""The figures that a target may be for: means over the devices, and macro-F1 over all samples with classes."""


@dataclass(frozen=True)
class Measure:
    """A measure of cost. key: its key in ``Point.spent``. title: title of a column or an axis; head: a shorter one.
    text: formats an amount."""

    key: str
    title: str
    head: str
    text: Callable[[float], str]


def number_text(value: float) -> str:
    """Three digits, or all digits before the point: 4, 4.5, 163, 12,000."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


MEASURES = (
    Measure("rounds", "rounds", "rounds", number_text),
    Measure("fallah_rounds", "models in rounds of Per-FedAvg", "Per-FedAvg rounds", number_text),
    Measure("models", "models transmitted", "models", number_text),
    Measure("payload_bytes", "payload", "payload", bytes_text),
    Measure("flops", "arithmetic", "arithmetic", flops_text),
    Measure("joules", "energy", "energy", phase_text),
)
MODELS = {SERVER: "server's model", RUNNING: "running mean", LATEST: "mean of the latest"}
"""The kinds of models under which methods are compared alike, and their titles."""
AXES = tuple(measure for measure in MEASURES if measure.key != "fallah_rounds")


@dataclass(frozen=True)
class Stat:
    """A figure over seeds. std: sample standard deviation, None for one seed."""

    mean: float
    std: float | None
    min: float
    max: float
    seeds: int


@dataclass(frozen=True)
class Step:
    """A round that was evaluated for every seed. accuracy: mean over devices. spent: mean over seeds. models: the
    accuracy under other kinds of models than the served one."""

    round: int
    accuracy: Stat
    spent: Mapping[str, float]
    models: Mapping[str, Stat] = field(default_factory=dict)


@dataclass(frozen=True)
class Bound:
    """An amount (=), or a bound: the amount is more (>) or less (<) than ``value``."""

    value: float
    sign: str = "="
    std: float | None = None


@dataclass(frozen=True)
class Reached:
    """The cost to reach ``target``. seeds: how many seeds reached it. at: measure -> cost. gain: measure -> gain over
    the baseline."""

    target: float
    seeds: int
    at: Mapping[str, Bound]
    gain: Mapping[str, Bound]


@dataclass(frozen=True)
class Entry:
    """The runs of one label, one for each seed. setting: letter in ``Comparison.settings``. final, spent: scores and
    costs at the end."""

    label: str
    method: str
    kind: str
    seeds: tuple[int, ...]
    devices: int
    setting: str
    final: Mapping[str, Mapping[str, Stat]]
    spent: Mapping[str, Stat]
    curve: tuple[Step, ...]
    reached: tuple[Reached, ...] = ()

    @property
    def accuracy(self) -> Stat:
        return self.final[DEVICES]["mean"]


@dataclass(frozen=True)
class Comparison:
    """entries: the best first. settings: letter -> data, partition, model and evaluation. mixed: the parts that differ;
    if any does, this does not compare methods. baseline: the label that gains are relative to. target_of: the figure
    that ``targets`` are for, one of ``TARGETS_OF``. measured: a key of ``FIGURES``, what mean, worst and best are
    of."""

    entries: tuple[Entry, ...]
    targets: tuple[float, ...]
    baseline: str | None
    settings: Mapping[str, Mapping[str, str]]
    mixed: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    target_of: str = ACCURACY.key
    measured: str = ACCURACY.key

    @property
    def figure(self) -> Figure:
        """What mean, worst and best of the devices are of."""
        return FIGURES[self.measured]


def compare(
    runs: Sequence[FinishedRun], *, targets: Sequence[float] = (), baseline: str | None = None, mixed: bool = False,
    remarks: Sequence[str] = (), target_of: str = ACCURACY.key,
) -> Comparison:
    """Compares runs. targets: values of ``target_of``; by default the accuracies named in the experiments, else the
    highest value that Per-FedAvg reached with every seed and the highest that any method reached with every seed.

    Raises ConfigError for runs of different data, partitions or models (unless ``mixed``), for runs whose figures
    are not the same, for duplicate runs, and for an unknown ``baseline``.
    """
    figure = _figure(runs)
    target_of, lower = _target_of(figure, target_of), figure.lower
    settings = _settings(runs)
    differing = tuple(part for part in settings["A"] if len({one[part] for one in settings.values()}) > 1)
    if differing and not mixed:
        raise ConfigError(_refusal(runs, differing), hint="compare them apart, or side by side with --mixed")
    letters = {tuple(one.items()): letter for letter, one in settings.items()}
    groups = _grouped([(run, letters[tuple(run.setting.items())]) for run in runs])
    ranked = sorted(groups.items(), key=lambda group: (_final(group[1]) * (1 if lower else -1), group[0]))
    plain = [_entry(label, group, letters[tuple(group[0].setting.items())]) for label, group in ranked]
    base = _baseline(plain, baseline)
    aim = Aim("macro_f1") if target_of == MACRO_F1 else Aim("mean", lower)
    asked = {t for run in runs for t in run.targets if target_of != MACRO_F1}
    wanted = sorted(set(targets) or asked, reverse=lower) or _best(dict(ranked), base, aim)
    of_base = {target: _cost(groups[base.label], target, aim) for target in wanted} if base else {}
    entries = tuple(
        replace(entry, reached=tuple(
            _reached(groups[entry.label], target, aim, of_base.get(target) if _comparable(entry, base) else None)
            for target in wanted
        ))
        for entry in plain
    )
    return Comparison(entries, tuple(wanted), base.label if base else None, settings, differing, tuple(remarks),
                      target_of, figure.key)


@dataclass(frozen=True)
class Aim:
    """What is to be reached. figure: its key in ``Point.scores``. lower: less is better."""

    figure: str
    lower: bool = False

    @property
    def nothing(self) -> float:
        """The worst possible figure."""
        return math.inf if self.lower else 0.0

    def of(self, point: Point) -> float:
        """The point's figure; the worst possible one if it has none."""
        return point.scores[DEVICES].get(self.figure, self.nothing)

    def reached(self, point: Point, target: float) -> bool:
        return self.of(point) <= target if self.lower else self.of(point) >= target


ACCURATE = Aim("mean")


def _figure(runs: Sequence[FinishedRun]) -> Figure:
    """What all runs have. Raises ConfigError."""
    first = runs[0]
    other = next((run for run in runs if run.figure != first.figure), None)
    if other is not None:
        names = FIGURES[first.figure].name, FIGURES[other.figure].name
        raise ConfigError(f"{first.where} has {names[0]}, and {other.where} {names[1]}", hint="compare them apart")
    return FIGURES[first.figure]


def _target_of(figure: Figure, asked: str) -> str:
    """``asked``, or the runs' own figure in place of an accuracy that they do not have. Raises ConfigError."""
    own = figure.key.replace("_", "-")
    known = {ACCURACY.key, own} | ({MACRO_F1} if figure == ACCURACY else set())
    if asked not in known:
        raise ConfigError(f"these runs have no {asked}", where="--target-of", expected=" or ".join(sorted(known)))
    return own if asked == ACCURACY.key else asked


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Ready for ``json.dumps``; missing figures are left out."""
    plain: dict[str, Any] = present({"format": FORMAT, **schema.plain(comparison)})
    return plain


def present(value: Any) -> Any:
    """Plain values without None."""
    if isinstance(value, dict):
        return {key: present(item) for key, item in value.items() if item is not None}
    return [present(item) for item in value] if isinstance(value, list) else value


def stat(values: Sequence[float]) -> Stat:
    std = statistics.stdev(values) if len(values) > 1 else None
    return Stat(statistics.fmean(values), std, min(values), max(values), len(values))


# Grouping runs --------------------------------------------------------------------------------------------------------


def _settings(runs: Sequence[FinishedRun]) -> dict[str, Mapping[str, str]]:
    """The different settings by letter, A for the first one."""
    found: dict[str, Mapping[str, str]] = {}
    for run in runs:
        if run.setting not in found.values():
            found[_letter(len(found))] = run.setting
    return found


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"A{number}"


def _refusal(runs: Sequence[FinishedRun], differing: Sequence[str]) -> str:
    """The error message: what differs, and between which two runs."""
    first = runs[0]
    other = next(run for run in runs if run.setting != first.setting)
    parts = [part for part in differing if first.setting[part] != other.setting[part]]
    return "\n".join([
        f"these runs have different {', '.join(differing)}, so their figures do not compare methods:",
        *(f"  {run.where}: {part} = {run.setting[part][:300]}" for run in (first, other) for part in parts),
    ])


def _grouped(runs: Sequence[tuple[FinishedRun, str]]) -> dict[str, list[FinishedRun]]:
    """The runs by label. If the runs of a label differ in more than the seed, the differences are added to the
    label."""
    by_label: dict[str, list[tuple[FinishedRun, dict[str, str]]]] = {}
    for run, letter in runs:
        choices = {"method": run.method, "kind": run.kind, "setting": letter, **run.choices}
        by_label.setdefault(run.label, []).append((run, choices))
    groups: dict[str, list[FinishedRun]] = {}
    for label, found in by_label.items():
        every = sorted({key for _, choices in found for key in choices})
        differing = [key for key in every if len({choices.get(key) for _, choices in found}) > 1]
        for run, choices in found:
            parts = [f"{key.rpartition('.')[2]}={choices[key]}" for key in differing if key in choices]
            group = groups.setdefault(f"{label} ({', '.join(parts)})" if differing else label, [])
            twin = next((one for one in group if one.seed == run.seed), None)
            if twin is not None:
                twice = f"seed {run.seed} of '{label}' is there twice"
                raise ConfigError(twice, where=f"{twin.where}, {run.where}")
            group.append(run)
    return groups


def _entry(label: str, group: Sequence[FinishedRun], letter: str) -> Entry:
    first = group[0]
    final = {
        kind: {name: stat([t.last[kind][name] for t in group]) for name in _common(t.last[kind] for t in group)}
        for kind in _common(t.last for t in group)
    }
    spent = {key: stat([t.spent[key] for t in group]) for key in _common(t.spent for t in group)}
    seeds = tuple(sorted(t.seed for t in group))
    return Entry(label, first.method, first.kind, seeds, first.devices, letter, final, spent, _curve(group))


def _curve(group: Sequence[FinishedRun]) -> tuple[Step, ...]:
    by_round = [{point.round: point for point in run.points} for run in group]
    steps = []
    for number in sorted(set.intersection(*(set(points) for points in by_round))):
        points = [of[number] for of in by_round]
        spent = {key: statistics.fmean(p.spent[key] for p in points) for key in _common(p.spent for p in points)}
        under = {model: stat([p.scores[kind]["mean"] for p in points]) for kind in _common(p.scores for p in points)
                 for devices, _, model in [kind.partition(BY)] if model and devices == DEVICES}
        steps.append(Step(number, stat([p.scores[DEVICES]["mean"] for p in points]), spent, under))
    return tuple(steps)


def _final(group: Sequence[FinishedRun]) -> float:
    return statistics.fmean(run.last[DEVICES]["mean"] for run in group)


def _common(tables: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys that all tables have, in the order of the first."""
    first, *others = tables
    return [key for key in first if all(key in other for other in others)]


# The cost to reach a target -------------------------------------------------------------------------------------------


def _baseline(entries: Sequence[Entry], label: str | None) -> Entry | None:
    """The entry with this label; by default exact Per-FedAvg, else another form of it, the best one first; or None.
    Raises ConfigError for an unknown label."""
    named = {entry.label: entry for entry in entries}
    if label is not None:
        if label not in named:
            near = schema.suggest(label, named)
            raise ConfigError(f"no run is labelled '{label}'" + (f" (did you mean '{near}'?)" if near else ""),
                              where="--baseline", expected=f"one of {', '.join(named)}")
        return named[label]
    exact = [entry for entry in entries if entry.method == EXACT]
    return next(iter(exact or [entry for entry in entries if entry.method.startswith(FAMILY)]), None)


def _comparable(entry: Entry, base: Entry | None) -> bool:
    """Whether a gain of ``entry`` over ``base`` is meaningful."""
    return base is not None and entry is not base and entry.setting == base.setting


def _best(groups: Mapping[str, Sequence[FinishedRun]], base: Entry | None, aim: Aim) -> list[float]:
    """The best values that the baseline and that any label reached with every seed, cut to three digits."""
    best, worst, cut = (min, max, math.ceil) if aim.lower else (max, min, math.floor)
    tops = {label: worst(best(map(aim.of, run.points), default=aim.nothing) for run in group)
            for label, group in groups.items()}
    chosen = {best(tops.values()), *([tops[base.label]] if base else [])}
    return sorted({value for top in chosen if math.isfinite(top) and (value := cut(top * 1000) / 1000) > 0},
                  reverse=aim.lower)


def _cost(group: Sequence[FinishedRun], target: float, aim: Aim) -> dict[str, Bound]:
    """Measure -> cost up to the first evaluated round that reaches ``target``, as the mean over seeds. A seed that did
    not reach it counts with its total cost, and the mean is then a lower bound."""
    first = [first_at(run, target, aim) for run in group]
    spent = [run.spent if point is None else point.spent for run, point in zip(group, first, strict=True)]
    costs = {key: stat([one[key] for one in spent]) for key in _common(spent)}
    if all(first):
        return {key: Bound(cost.mean, std=cost.std) for key, cost in costs.items()}
    return {key: Bound(cost.mean, ">") for key, cost in costs.items() if cost.mean}


def first_at(run: FinishedRun, target: float, aim: Aim = ACCURATE) -> Point | None:
    """The first evaluated round that reaches ``target``."""
    return next((point for point in run.points if aim.reached(point, target)), None)


def _reached(group: Sequence[FinishedRun], target: float, aim: Aim, base: Mapping[str, Bound] | None) -> Reached:
    at = _cost(group, target, aim)
    gain = {key: found for key in at if base and key in base and (found := _gain(base[key], at[key]))}
    return Reached(target, sum(first_at(run, target, aim) is not None for run in group), at, gain)


def _gain(base: Bound, own: Bound) -> Bound | None:
    """base ÷ own, possibly a bound; None if the gain is unknown or either cost is zero."""
    if not base.value or not own.value or (base.sign, own.sign) == (">", ">"):
        return None
    return Bound(base.value / own.value, ">" if base.sign == ">" else "<" if own.sign == ">" else "=")
