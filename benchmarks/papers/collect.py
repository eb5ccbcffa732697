"""What a paper's runs gave, as one result: figures by experiment, method and seed, and over seeds.

    experiments
      EXPERIMENT
        settings                what all runs have in common
        methods
          LABEL
            method, hyper
            seeds: {SEED: {round, of, ended, judged, seconds, figures, spent, details}}
            over:  {round, seeds, figures: {NAME: {mean, std, min, max, seeds}}}
            curve: [[round, mean over seeds of the mean accuracy over devices, its spread], …]
            reached: [{target, seeds, at: {MEASURE: {value, sign, std}}, gain}, …]

A figure is named as in a line of ``rounds.jsonl``: ``accuracy.mean``, ``before.accuracy.pooled`` (the judged model as
it is), ``new_devices.0.2.accuracy.mean``. Runs that have not begun are absent. ``over`` has the seeds that have ended;
where none has, all that have begun, at the last round that each of them has judged. ``reached`` is read as
``metafleet compare`` does, also of runs that have not ended, for the targets of the experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud_server.laboratory import compare, trials
from cloud_server.laboratory import experiment as experiments
from cloud_server.laboratory.experiment import Experiment, Run
from cloud_server.laboratory.store import Store
from cloud_server.laboratory.trials import Trial
from fleet_core import schema

FORMAT = 1
NO_FIGURES = ("round", "loss", "participants", "refused", "models_transmitted", "models_transmitted_paper",
              "payload_bytes", "flops", "energy_j", "errors", "seconds", "devices", "not_judged")
"""Of a line of ``rounds.jsonl``: what is no figure of how well the devices do."""

Row = Mapping[str, Any]
Details = Callable[[str, str, Sequence[Row]], Mapping[str, Any]]
"""(experiment, label, judged rounds) -> what a paper wants of a run besides. A round has, besides the figures of its
line, ``spent``: by measure, from the first round up to the end of this one."""


@dataclass(frozen=True)
class Made:
    """A run that has begun, with the rounds that it has judged."""

    run: Run
    of: int
    ended: bool
    rounds: tuple[Row, ...]
    judged: tuple[Row, ...]
    trial: Trial | None


def collected(files: Sequence[Path], out: Path, details: Details | None = None) -> dict[str, Any]:
    """The result of a paper whose experiments are ``files`` and whose runs lie in ``out``/EXPERIMENT."""
    found: dict[str, Any] = {"format": FORMAT, "experiments": {}}
    for path in files:
        asked = experiments.load(path)
        runs = list(_made(asked, out / path.stem))
        if runs:
            found["experiments"][path.stem] = _of_experiment(path.stem, asked, runs, details)
    return found


def _made(asked: Experiment, folder: Path) -> Iterator[Made]:
    for run in experiments.runs(asked):
        store = Store(folder / run.name)
        rounds = store.rounds()
        if rounds:
            judged = tuple(row for row in rounds if "accuracy" in row)
            trial = trials.of_simulation(_data(run, store, rounds, judged), store.folder) if judged else None
            yield Made(run, asked.budget.rounds, store.done, tuple(rounds), judged, trial)


def _data(run: Run, store: Store, rounds: Sequence[Row], judged: Sequence[Row]) -> Row:
    """A result, also of a run that has none yet."""
    return {"label": run.label, "method": run.method.name, "seed": run.seed, "config": store.asked(),
            "devices": len(judged[-1]["devices"]), "rounds": list(rounds),
            "seconds": sum(row["seconds"] for row in rounds)}


def _of_experiment(name: str, asked: Experiment, runs: Sequence[Made], details: Details | None) -> dict[str, Any]:
    settings = schema.plain(asked)
    for key in ("method", "seeds"):
        del settings[key]
    known = [one.trial for one in runs if one.trial is not None]
    targets = asked.judge.targets
    entries = {entry.label: entry for entry in compare.compare(known, targets=targets).entries} if known else {}
    by_label: dict[str, list[Made]] = {}
    for one in runs:
        by_label.setdefault(one.run.label, []).append(one)
    methods: dict[str, Any] = {}
    for label, several in by_label.items():
        methods[label] = {
            "method": several[0].run.method.name, "hyper": schema.plain(several[0].run.hyper),
            "seeds": {str(one.run.seed): _of_run(name, one, details) for one in several},
        }
        judged = [one for one in several if one.judged]
        if judged:
            methods[label] |= {"over": _over(judged), "curve": _curve(judged)}
        if targets and label in entries:
            methods[label]["reached"] = compare.present([schema.plain(one) for one in entries[label].reached])
    return {"settings": compare.present(settings), "methods": methods}


def _of_run(name: str, one: Made, details: Details | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "round": one.rounds[-1]["round"], "of": one.of, "ended": one.ended,
        "seconds": round(sum(row["seconds"] for row in one.rounds), 1),
    }
    if one.trial is not None:
        found |= {"judged": one.judged[-1]["round"], "figures": figures(one.judged[-1]), "spent": one.trial.spent}
        rows = [{**row, "spent": point.spent} for row, point in zip(one.judged, one.trial.points, strict=True)]
        more = details(name, one.run.label, rows) if details else {}
        found |= {"details": dict(more)} if more else {}
    return found


def _over(runs: Sequence[Made]) -> dict[str, Any]:
    counted = [one for one in runs if one.ended] or list(runs)
    rounds = set.intersection(*({row["round"] for row in one.judged} for one in counted))
    if not rounds:
        return {"round": 0, "seeds": [], "figures": {}}
    last = max(rounds)
    each = [figures(next(row for row in one.judged if row["round"] == last)) for one in counted]
    names = [name for name in each[0] if all(name in one for one in each)]
    return {
        "round": last, "seeds": [one.run.seed for one in counted],
        "figures": {name: compare.present(schema.plain(compare.stat([one[name] for one in each]))) for name in names},
    }


def _curve(runs: Sequence[Made]) -> list[list[float | None]]:
    counted = [one for one in runs if one.ended] or list(runs)
    each = [{row["round"]: row["accuracy"]["mean"] for row in one.judged} for one in counted]
    common = sorted(set.intersection(*(set(one) for one in each)))
    stats = [compare.stat([one[number] for one in each]) for number in common]
    return [[number, stat.mean, stat.std] for number, stat in zip(common, stats, strict=True)]


def figures(row: Row, at: str = "") -> dict[str, float]:
    """The numbers of a judged round's line, by their path in it."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if key in NO_FIGURES:
            continue
        if isinstance(value, Mapping):
            found |= figures(value, f"{at}{key}.")
        elif isinstance(value, (int, float)):
            found[f"{at}{key}"] = value
    return found
