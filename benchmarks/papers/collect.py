"""Collects a paper's runs into one result: figures by experiment, method and seed, and over seeds.

    experiments
      EXPERIMENT
        settings                what all runs have in common
        methods
          LABEL
            method, hyper
            seeds: {SEED: {round, of, ended, judged, seconds, refused, figures, spent, curve, costs, details}}
            over:  {round, seeds, figures: {NAME: {mean, std, min, max, seeds}}}
            curve: [[round, mean over seeds of the mean accuracy over devices, its spread], …]
            reached: [{target, seeds, at: {MEASURE: {value, sign, std}}, gain}, …]

A figure is named as in a line of ``rounds.jsonl``: ``accuracy.mean``, ``before.accuracy.pooled`` (the served model as
it is), ``new_devices.0.2.accuracy.mean``. ``judged`` is the last evaluated round, ``refused`` the share of updates that
a bound has refused, absent if there is none. Runs that have not begun are absent. A seed has the [round, mean accuracy]
of its evaluations, and for every target that it reached {target, round, spent}. Everything over seeds is computed from
these, so that seeds can be run on different machines. ``over`` has the seeds that have ended; if none has, those that
got furthest. ``reached`` is read as ``metafleet compare`` does, also for runs that have not ended, for the targets of
the experiment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud_server.laboratory.compare import comparison, finished_runs
from cloud_server.laboratory.compare.finished_runs import DEVICES, FinishedRun, Point
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan.experiment import Experiment, Run
from cloud_server.laboratory.run.run_folder import Store
from cloud_server.results.outcome import SIMULATION
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import schema
from fleet_core.base.errors import DataError

FORMAT = 1
NO_FIGURES = ("round", "loss", "participants", "refused", "models_transmitted", "models_transmitted_paper",
              "payload_bytes", "flops", "energy_j", "errors", "seconds", "devices", "not_evaluated", "not_judged")
"""Keys of a line of ``rounds.jsonl`` that do not say how good the devices' answers are. Version 0.1 wrote
``not_judged``."""

Row = Mapping[str, Any]
Methods = Mapping[str, Mapping[str, Any]]
Details = Callable[[str, str, Sequence[Row]], Mapping[str, Any]]
"""(experiment, label, evaluated rounds) -> what a paper needs of a run besides. A round has, in addition to the figures
of its line, ``spent``: by measure, from the first round up to the end of this one."""


@dataclass(frozen=True)
class Made:
    """A run that has begun, with its evaluated rounds."""

    run: Run
    of: int
    ended: bool
    rounds: tuple[Row, ...]
    evaluated: tuple[Row, ...]
    trial: FinishedRun | None


def collected(
    files: Sequence[Path], out: Path, details: Details | None = None, *, kept: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The result of a paper whose experiments are ``files`` and whose runs lie in ``out``/EXPERIMENT.

    kept: an earlier result. Its runs stay if they are not in ``out``, or got further than those there, except for
    experiments and methods whose settings have changed, which ``say`` reports.
    """
    found: dict[str, Any] = {"format": FORMAT, "experiments": {}}
    for path in files:
        asked = experiments.load(path)
        before = _still_true(path.stem, asked, (kept or {}).get("experiments", {}).get(path.stem), say)
        runs = list(_made(asked, out / path.stem))
        if runs or before:
            found["experiments"][path.stem] = _of_experiment(path.stem, asked, runs, before, details)
    return found


def _still_true(name: str, asked: Experiment, kept: Row | None, say: Callable[[str], None]) -> Methods:
    """The kept methods that the experiment still has with the same settings."""
    if kept is None:
        return {}
    if _with_defaults(kept["settings"]) != _settings(asked):
        say(f"{name}: its settings have changed; its kept runs are dropped")
        return {}
    hyper = {run.label: _written(run.hyper) for run in experiments.runs(asked)}
    for label, method in kept["methods"].items():
        if _of_method(method) != hyper.get(label):
            say(f"{name}: no {label} has the settings of the kept runs, which are dropped")
    return {label: method for label, method in kept["methods"].items() if _of_method(method) == hyper.get(label)}


def _of_method(kept: Row) -> Any:
    """The kept hyper-parameters with the defaults of those that came later."""
    found, _ = schema.read(METHODS[kept["method"]].hyper, kept["hyper"])
    return kept["hyper"] if found is None else _written(found)


def _with_defaults(kept: Row) -> Any:
    """Kept settings with the defaults of those that came later."""
    found, _ = schema.read(Experiment, {**kept, "method": []})
    return kept if found is None else _settings(found)


def _settings(asked: Experiment) -> Any:
    settings = comparison.present(_written(asked))
    return {key: value for key, value in settings.items() if key not in ("method", "seeds")}


def _written(value: Any) -> Any:
    """``value`` as a result's JSON has it."""
    return json.loads(json.dumps(schema.plain(value)))


def _made(asked: Experiment, folder: Path) -> Iterator[Made]:
    for run in experiments.runs(asked):
        store = Store(folder / run.name)
        rounds = store.rounds()
        if rounds:
            evaluated = tuple(row for row in rounds if "accuracy" in row)
            data = _data(run, store, rounds, evaluated) if evaluated else None
            trial = finished_runs.of_simulation(data, store.folder) if data else None
            yield Made(run, asked.budget.rounds, store.done, tuple(rounds), evaluated, trial)


def _data(run: Run, store: Store, rounds: Sequence[Row], evaluated: Sequence[Row]) -> Row:
    """A result, also of a run that has none yet."""
    return {"label": run.label, "method": run.method.name, "seed": run.seed, "config": store.asked(),
            "devices": len(evaluated[-1]["devices"]), "rounds": list(rounds),
            "seconds": sum(row["seconds"] for row in rounds)}


def _of_experiment(
    name: str, asked: Experiment, runs: Sequence[Made], kept: Methods, details: Details | None
) -> dict[str, Any]:
    methods: dict[str, Any] = {}
    for run in experiments.runs(asked):
        found = kept.get(run.label, {}).get("seeds", {}).get(str(run.seed))
        made = next((one for one in runs if one.run == run), None)
        if made is not None and (found is None or made.rounds[-1]["round"] >= found["round"]):
            found = _of_run(name, made, details)
        if found is not None:
            method = {"method": run.method.name, "hyper": _written(run.hyper), "seeds": {}}
            methods.setdefault(run.label, method)["seeds"][str(run.seed)] = found
    for label, method in methods.items():
        if method["seeds"] == kept.get(label, {}).get("seeds"):
            methods[label] = dict(kept[label])
        elif any("judged" in one for one in method["seeds"].values()):
            counted = _counted(method["seeds"])
            if not all("curve" in one for one in counted.values()):
                raise DataError(f"{label}: some kept seeds have no curve of their own", where=name,
                                hint="run all of its seeds again")
            method |= {"over": _over(counted), "curve": _curve(counted)}
    for label, reached in _reached(asked, methods).items():
        methods[label]["reached"] = reached
    return {"settings": _settings(asked), "methods": methods}


def _of_run(name: str, one: Made, details: Details | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "round": one.rounds[-1]["round"], "of": one.of, "ended": one.ended,
        "seconds": round(sum(row["seconds"] for row in one.rounds), 1),
    }
    refused, used = (sum(row[key] for row in one.rounds) for key in ("refused", "participants"))
    found |= {"refused": round(refused / (refused + used), 4)} if refused else {}
    if one.trial is not None:
        found |= {"judged": one.evaluated[-1]["round"], "figures": figures(one.evaluated[-1]), "spent": one.trial.spent,
                  "curve": [[point.round, point.scores[DEVICES]["mean"]] for point in one.trial.points]}
        found |= {"costs": _costs(one.trial)} if one.trial.targets else {}
        rows = [{**row, "spent": point.spent} for row, point in zip(one.evaluated, one.trial.points, strict=True)]
        more = details(name, one.run.label, rows) if details else {}
        found |= {"details": dict(more)} if more else {}
    return found


def _costs(trial: FinishedRun) -> list[dict[str, Any]]:
    """For every target that was reached, the first evaluation that reached it."""
    return [{"target": target, "round": point.round, "spent": dict(point.spent)}
            for target in trial.targets if (point := comparison.first_at(trial, target)) is not None]


# Over seeds -----------------------------------------------------------------------------------------------------------


def _counted(seeds: Methods) -> Methods:
    """The seeds that have ended; if none has, those whose last evaluation is the last of all."""
    evaluated = {seed: one for seed, one in seeds.items() if "judged" in one}
    ended = {seed: one for seed, one in evaluated.items() if one["ended"]}
    last = max(one["judged"] for one in evaluated.values())
    return ended or {seed: one for seed, one in evaluated.items() if one["judged"] == last}


def _over(seeds: Methods) -> dict[str, Any]:
    each = [one["figures"] for one in seeds.values()]
    names = [name for name in each[0] if all(name in one for one in each)]
    return {
        "round": min(one["judged"] for one in seeds.values()), "seeds": [int(seed) for seed in seeds],
        "figures": {name: comparison.present(_written(comparison.stat([one[name] for one in each]))) for name in names},
    }


def _curve(seeds: Methods) -> list[list[float | None]]:
    each = [dict(one["curve"]) for one in seeds.values()]
    common = sorted(set.intersection(*(set(one) for one in each)))
    stats = [comparison.stat([one[number] for one in each]) for number in common]
    return [[number, stat.mean, stat.std] for number, stat in zip(common, stats, strict=True)]


def _reached(asked: Experiment, methods: Methods) -> dict[str, Any]:
    """By label, as ``metafleet compare`` computes it, for labels whose seeds all have their costs."""
    known = [
        _trial(label, method["method"], int(seed), one) for label, method in methods.items()
        if all("costs" in one for one in method["seeds"].values()) for seed, one in method["seeds"].items()
    ]
    if not known:
        return {}
    entries = comparison.compare(known, targets=asked.evaluation.targets).entries
    return {entry.label: comparison.present(_written(entry.reached)) for entry in entries}


def _trial(label: str, method: str, seed: int, one: Row) -> FinishedRun:
    """The run with only the evaluations from which its costs and its end come."""
    means = dict(one["curve"])
    spent = {found["round"]: found["spent"] for found in one["costs"]}
    points = [Point(number, {DEVICES: {"mean": means[number]}}, spent[number]) for number in sorted(spent)]
    return FinishedRun(
        where=Path(label), kind=SIMULATION, label=label, method=method, seed=seed, devices=0, setting={}, choices={},
        targets=(), points=tuple(points), last={DEVICES: {"mean": means[one["judged"]]}}, spent=one["spent"],
        seconds=one["seconds"],
    )


def figures(row: Row, at: str = "") -> dict[str, float]:
    """The numbers of an evaluated round's line, by their path in it."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if key in NO_FIGURES:
            continue
        if isinstance(value, Mapping):
            found |= figures(value, f"{at}{key}.")
        elif isinstance(value, (int, float)):
            found[f"{at}{key}"] = value
    return found
