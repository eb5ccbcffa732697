"""The same runs under three models: macro-F1 of all devices, those that train and new ones, each weighing the same."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.papers import page
from benchmarks.papers.sensors.table import score
from cloud_server.figures.formatting import ABSENT
from cloud_server.laboratory.compare import comparison
from cloud_server.laboratory.compare.comparison import MODELS as COLUMNS
from cloud_server.laboratory.plan.experiment import LATEST, RUNNING, SERVER
from cloud_server.laboratory.run.engine import MODELS

Result = Mapping[str, Any]
Row = Mapping[str, Any]

SETS = {"heartbeat": "Heart beats", "heartbeat-two": "Heart beats, two in a round", "har": "Human activity"}
IS_SERVED = {"pfldyn-proto": RUNNING, "pflscaf-proto": RUNNING}
"""Other methods serve the server's model."""


def details(experiment: str, label: str, evaluated: Sequence[Row]) -> dict[str, Any]:
    """Kind of model -> [[round, macro-F1 of all devices], …]."""
    return {kind: [[row["round"], round(score(row[MODELS][kind]), 6)] for row in evaluated if MODELS in row]
            for kind in COLUMNS}


def draw(result: Result, folder: Path) -> None:
    """A picture for each set: macro-F1 by rounds, a panel for each method, a line for each model."""
    for experiment, title in SETS.items():
        panels = {f"{title}: {label}": {name: _curve(method, kind) for kind, name in COLUMNS.items()}
                  for label, method in _methods(result, experiment) if _rounds(method)}
        if panels:
            page.curves(folder / f"{experiment}.png", panels, ylabel="macro-F1, all devices")


def tables(result: Result, paper: Mapping[str, Any]) -> dict[str, str]:
    head = ["set", "method", "round", *COLUMNS.values(), "served", "seeds"]
    return {
        "models": markdown.table(head, _rows(result)),
        "gaps": markdown.table(["less the server's model", *SETS.values(), "all"], _gaps(result)),
        "calibration": markdown.table(["set", "method", *COLUMNS.values()], _calibration(result)),
    }


def _methods(result: Result, experiment: str) -> Iterator[tuple[str, Row]]:
    yield from result["experiments"].get(experiment, {}).get("methods", {}).items()


def _rows(result: Result) -> Iterator[list[str]]:
    """The first and the last evaluation of each method."""
    for experiment, title in SETS.items():
        for label, method in _methods(result, experiment):
            for number in dict.fromkeys(_rounds(method)[:1] + _rounds(method)[-1:]):
                cells = [_text(_values(method, kind, number)) for kind in COLUMNS]
                served = COLUMNS[IS_SERVED.get(label, SERVER)]
                yield [title, f"`{label}`", str(number), *cells, served, page.seeds(result, experiment, label)]


def _rounds(method: Row) -> list[int]:
    first = next(iter(_ended(method)), None)
    return [] if first is None else [point[0] for point in first["details"][SERVER]]


def _ended(method: Row) -> list[Row]:
    return [one for one in method["seeds"].values() if one["ended"]]


def _values(method: Row, kind: str, number: int) -> list[float]:
    return [value for one in _ended(method) for at, value in one["details"][kind] if at == number]


def _curve(method: Row, kind: str) -> list[list[Any]]:
    stats = [(number, comparison.stat(_values(method, kind, number))) for number in _rounds(method)]
    return [[number, one.mean, one.std] for number, one in stats]


def _text(values: Sequence[float]) -> str:
    if not values:
        return ABSENT
    stat = comparison.stat(values)
    return f"{stat.mean:.3f}" + ("" if stat.std is None else f" ± {stat.std:.3f}")


def _gaps(result: Result) -> Iterator[list[str]]:
    """At the last round, run by run: the mean difference from the server's model, its standard error, and how many runs
    are better."""
    for kind in (RUNNING, LATEST):
        found = {experiment: list(_differences(result, experiment, kind)) for experiment in SETS}
        yield [COLUMNS[kind], *map(_gap, found.values()), _gap([one for each in found.values() for one in each])]


def _differences(result: Result, experiment: str, kind: str) -> Iterator[float]:
    for _, method in _methods(result, experiment):
        for one in _ended(method):
            yield one["details"][kind][-1][1] - one["details"][SERVER][-1][1]


def _gap(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ABSENT
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):+.3f} ± {error:.3f}, {sum(v > 0 for v in values)} of {len(values)} better"


def _calibration(result: Result) -> Iterator[list[str]]:
    """The calibration error of the devices that train at the last round, where it was computed."""
    for experiment, title in SETS.items():
        for label, _ in _methods(result, experiment):
            cells = [page.number(result, experiment, label, f"{MODELS}.{kind}.calibration_error", percent=False)
                     for kind in COLUMNS]
            if set(cells) != {ABSENT}:
                yield [title, f"`{label}`", *cells]
