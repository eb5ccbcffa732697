"""Which method on sensors: how good the answers are on old and new devices, and what they cost.

The measure is that of ``metafleet advise``: macro-F1 of the devices that train and of the new ones, each device
weighing the same. Two methods are distinguished as there: by more than the spread of their difference over seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.papers import choose, page
from cloud_server.figures.formatting import ABSENT, bytes_text, flops_text
from cloud_server.laboratory.advise.candidates import GAP_OF_ONE_SEED, LEAST_GAP
from cloud_server.laboratory.compare import comparison
from cloud_server.laboratory.compare.comparison import Stat
from cloud_server.laboratory.compare.tables import gain_text
from fleet_core.algorithms.methods.registry import METHODS

Result = Mapping[str, Any]
Row = Mapping[str, Any]

CHOSEN = Path(__file__).parent / choose.CHOSEN
SETS = {"heartbeat": "Heart beats", "har": "Human activity"}
TARGETS = {"heartbeat": 0.7, "har": 0.9}
"""The macro-F1 that costs are given for."""
DRAWN = ("fedavg", "fedavg-meta", "pfldyn-proto", "p-avg-proto", "per-fedavg-fo", "fedrep", "knn-per", "local")
BASE = "fedavg-meta"
MEASURES: tuple[tuple[str, Callable[[float], str]], ...] = (("payload_bytes", bytes_text), ("flops", flops_text))


def details(experiment: str, label: str, evaluated: Sequence[Row]) -> dict[str, Any]:
    """score: [[round, macro-F1 of all devices], …]. devices: those that train; all of them take part in every round."""
    scores = [[row["round"], round(score(row), 6)] for row in evaluated]
    return {"score": scores, "devices": len(evaluated[-1]["devices"])}


def score(row: Row) -> float:
    """The macro-F1 of an evaluated round: each device, old or new, has the same weight."""
    parts = [row, *row.get("new_devices", {}).values()]
    weighed = sum(float(one["macro_f1"]) * len(one["devices"]) for one in parts)
    return weighed / sum(len(one["devices"]) for one in parts)


# What is known of a method --------------------------------------------------------------------------------------------


def final(method: Result) -> Stat | None:
    """The final score over the seeds that have ended; None if none has."""
    values = [one["details"]["score"][-1][1] for one in _ended(method)]
    return comparison.stat(values) if values else None


def _ended(method: Result) -> list[Result]:
    return [one for one in method["seeds"].values() if one["ended"]]


def ranked(result: Result, name: str) -> list[tuple[str, Result, Stat]]:
    """(label, the figures of its runs, score) of an experiment, the best first."""
    methods = result["experiments"].get(name, {}).get("methods", {})
    scored = [(label, method, final(method)) for label, method in methods.items()]
    found = [(label, method, one) for label, method, one in scored if one is not None]
    return sorted(found, key=lambda entry: -entry[2].mean)


def apart(best: Stat, other: Stat) -> bool:
    """Whether two scores can be distinguished."""
    if best.std is None or other.std is None:
        return best.mean - other.mean > GAP_OF_ONE_SEED
    return best.mean - other.mean > max(LEAST_GAP, math.hypot(best.std, other.std))


def cost(method: Result, target: float, key: str) -> comparison.Bound | None:
    """The mean over seeds of what a training device spent up to the first evaluated round that reaches ``target``, or
    in all if a seed does not reach it. Every round of a run costs the same. None if it was not counted."""
    spent, all_reach = [], True
    for one in _ended(method):
        if key not in one["spent"]:
            return None
        first = next((number for number, value in one["details"]["score"] if value >= target), None)
        all_reach = all_reach and first is not None
        share = (first or one["round"]) / one["round"]
        spent.append(one["spent"][key] * share / (1 if key == "rounds" else one["details"]["devices"]))
    return comparison.Bound(sum(spent) / len(spent), "=" if all_reach else ">")


# Tables ---------------------------------------------------------------------------------------------------------------


def tables(result: Result, paper: Result) -> dict[str, str]:
    found = {}
    for name in SETS:
        found[name] = markdown.table(
            ["method", "macro-F1, all", "macro-F1", "accuracy", "worst", "ECE", "new: macro-F1", "new: accuracy",
             "new: worst", "new: ECE", "as it is", "seeds"], _how_well(result, name))
        found[f"{name}-costs"] = markdown.table(
            ["method", f"rounds to {TARGETS[name]:g}", "bytes", "gain", "arithmetic", "gain", "bytes a round",
             "arithmetic a round"], _costs(result, name))
    found["edges"] = markdown.table(["set", "the largest rate tried was the best for"], _edges())
    found["both"] = markdown.table(["method", *SETS.values(), "mean", "lowest"], _both(result))
    return found


def _how_well(result: Result, name: str) -> Iterator[list[str]]:
    order = ranked(result, name)
    for label, method, one in order:
        support = result["experiments"][name]["settings"]["evaluation"]["support"][0]
        new = f"new_devices.{support:g}"
        each = ("macro_f1", "accuracy.mean", "accuracy.worst", "calibration_error")
        figures = (*each, *(f"{new}.{figure}" for figure in each), "before.macro_f1")
        mark = "" if apart(order[0][2], one) else " ="
        yield [f"`{label}`", _text(one) + mark, *(_figure(method, figure) for figure in figures), str(one.seeds)]


def _costs(result: Result, name: str) -> Iterator[list[str]]:
    order = ranked(result, name)
    base = next((method for label, method, _ in order if label == BASE), None)
    for label, method, _ in order:
        cells = [_bound(cost(method, TARGETS[name], "rounds"), comparison.number_text)]
        for key, text in MEASURES:
            own = cost(method, TARGETS[name], key)
            theirs = cost(base, TARGETS[name], key) if base is not None and method is not base else None
            cells += [_bound(own, text), _gain(theirs, own)]
        yield [f"`{label}`", *cells, *(_a_round(method, key, text) for key, text in MEASURES)]


def _both(result: Result) -> Iterator[list[str]]:
    scores = {name: {label: one for label, _, one in ranked(result, name)} for name in SETS}
    common = [label for label in scores["heartbeat"] if all(label in of for of in scores.values())]

    def each(label: str) -> list[float]:
        return [scores[name][label].mean for name in SETS]

    for label in sorted(common, key=lambda label: -sum(each(label))):
        yield [f"`{label}`", *(_text(scores[name][label]) for name in SETS), f"{sum(each(label)) / len(SETS):.3f}",
               f"{min(each(label)):.3f}"]


def _edges() -> Iterator[list[str]]:
    """Methods that may still be better: several rates were tried, and the largest was chosen."""
    chosen = json.loads(CHOSEN.read_text()) if CHOSEN.exists() else {}
    for name, title in SETS.items():
        found = []
        for method, several in chosen.get(name, {"methods": {}})["methods"].items():
            rates = [one["hyper"].get("client_lr", METHODS[method].hyper().client_lr) for one in several]
            if min(rates) < max(rates) == rates[several.index(choose.best(several))]:
                found.append(f"`{method}`")
        yield [title, ", ".join(found)]


def _a_round(method: Result, key: str, text: Callable[[float], str]) -> str:
    each = [one["spent"].get(key, math.nan) / one["round"] / one["details"]["devices"] for one in _ended(method)]
    return text(each[0]) if math.isfinite(sum(each)) else ABSENT


def _figure(method: Result, figure: str) -> str:
    found = method["over"]["figures"].get(figure)
    return ABSENT if found is None else _text(Stat(found["mean"], found.get("std"), 0, 0, 1))


def _text(one: Stat) -> str:
    return f"{one.mean:.3f}" + (f" ± {one.std:.3f}" if one.std is not None else "")


def _bound(found: comparison.Bound | None, text: Callable[[float], str]) -> str:
    if found is None:
        return ABSENT
    return (">" if found.sign == ">" else "") + text(found.value)


def _gain(base: comparison.Bound | None, own: comparison.Bound | None) -> str:
    if base is None or own is None or not own.value or base.sign == own.sign == ">":
        return ""
    sign = ">" if base.sign == ">" else "<" if own.sign == ">" else "="
    return gain_text(comparison.Bound(base.value / own.value, sign))


# Curves ---------------------------------------------------------------------------------------------------------------


def draw(result: Result, folder: Path) -> None:
    """The score by rounds, of some methods and of the best on either set."""
    orders = {name: order for name in SETS if (order := ranked(result, name))}
    shown = dict.fromkeys([*DRAWN, *(order[0][0] for order in orders.values())])
    panels = {}
    for name, order in orders.items():
        known = {label: method for label, method, _ in order}
        panels[SETS[name]] = {label: curve(known[label]) for label in shown if label in known}
    if panels:
        page.curves(folder / "curves.png", panels, ylabel="macro-F1, all devices")


def curve(method: Result) -> list[list[Any]]:
    """[[round, mean over seeds, deviation], …]."""
    each = [dict(one["details"]["score"]) for one in _ended(method)]
    stats = {number: comparison.stat([one[number] for one in each]) for number in each[0]}
    return [[number, one.mean, one.std] for number, one in stats.items()]
