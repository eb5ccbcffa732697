"""The same runs under three models: macro-F1 of all devices, those that train and new ones, each weighing the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import markdown
from benchmarks.papers import page
from benchmarks.papers.sensors.table import SETS, score
from cloud_server.figures.formatting import ABSENT
from cloud_server.laboratory.compare import comparison
from cloud_server.laboratory.plan.experiment import LATEST, RUNNING, SERVER
from cloud_server.laboratory.run.engine import MODELS

Result = Mapping[str, Any]
Row = Mapping[str, Any]

COLUMNS = {SERVER: "the server's", RUNNING: "running mean", LATEST: "mean of the latest"}
IS_SERVED = {"pfldyn-proto": RUNNING, "pflscaf-proto": RUNNING}
"""Other methods serve the server's model."""


def details(experiment: str, label: str, evaluated: Sequence[Row]) -> dict[str, Any]:
    """Kind of model -> [[round, macro-F1 of all devices], …]."""
    return {kind: [[row["round"], round(score(row[MODELS][kind]), 6)] for row in evaluated if MODELS in row]
            for kind in COLUMNS}


def tables(result: Result, paper: Mapping[str, Any]) -> dict[str, str]:
    head = ["set", "method", "round", *COLUMNS.values(), "served", "seeds"]
    return {"models": markdown.table(head, _rows(result)), "gaps": markdown.table(
        ["model", *(f"{title}, last round" for title in SETS.values()), "mean"], _means(result))}


def _rows(result: Result) -> Iterator[list[str]]:
    for experiment, title in SETS.items():
        for label, method in result["experiments"].get(experiment, {}).get("methods", {}).items():
            for number in _rounds(method):
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


def _text(values: Sequence[float]) -> str:
    if not values:
        return ABSENT
    stat = comparison.stat(values)
    return f"{stat.mean:.3f}" + ("" if stat.std is None else f" ± {stat.std:.3f}")


def _means(result: Result) -> Iterator[list[str]]:
    """Over methods, of the means over seeds."""
    for kind, title in COLUMNS.items():
        cells, each = list[str](), list[float]()
        for experiment in SETS:
            methods = result["experiments"].get(experiment, {}).get("methods", {}).values()
            last = [comparison.stat(_values(method, kind, _rounds(method)[-1])).mean for method in methods
                    if _rounds(method)]
            each += [sum(last) / len(last)] if last else []
            cells.append(f"{each[-1]:.3f}" if last else ABSENT)
        yield [title, *cells, f"{sum(each) / len(each):.3f}" if len(each) == len(SETS) else ABSENT]
