"""Acar's Tables 1 and 2 beside ours: models transmitted until an accuracy, in rounds of Per-FedAvg."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import markdown
from benchmarks.papers import page
from cloud_server.figures.formatting import ABSENT, flops_text

Result = Mapping[str, Any]

EXPERIMENTS = {"acid-5": "ACID-5", "alid-5": "ALID-5"}
METHODS = {
    "per-fedavg-exact": "Per-FedAvg", "pfldyn-proto": "PFLDyn (Proto)", "pfldyn-maml": "PFLDyn (MAML)",
    "pflscaf-proto": "PFLScaf (Proto)", "pflscaf-maml": "PFLScaf (MAML)", "p-avg-proto": "P-Avg (Proto)",
}
MAML = ("per-fedavg-exact", "pfldyn-maml", "pflscaf-maml")
"""These run in separate experiments, EXPERIMENT-maml."""
FLOAT32 = "acid-5-float32"
BASE, OURS = "per-fedavg-exact", "pfldyn-proto"
ROUNDS = (5, 10, 15, 20, 40, 60, 100, 200, 500, 1000)
LIMIT, GAIN = ">1000", "gain"
PICTURE = "curves.png"


def tables(result: Result, paper: Mapping[str, Any]) -> dict[str, str]:
    sent = ["setting", "accuracy", "", *METHODS.values(), f"{METHODS[BASE]} by {METHODS[OURS]}"]
    rounds = ["setting", "method", *map(str, ROUNDS)]
    picture = f"\n![accuracy by rounds]({PICTURE})\n" if _panels(result) else ""
    final = ["setting", "method", "mean over devices", "worst", "best", "operations a round", "seeds"]
    reference = ["round", "the reference", "ours, float32", "ours, bfloat16"]
    return {
        "models": markdown.table(sent, _models(result, paper)),
        "rounds": markdown.table(rounds, _rounds(result)) + picture,
        "final": markdown.table(final, _final(result)),
        "reference": markdown.table(reference, _reference(result, paper)),
    }


def _models(result: Result, paper: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, setting in EXPERIMENTS.items():
        asked = result["experiments"].get(name, {}).get("settings", {}).get("evaluation", {}).get("targets", ())
        for target in sorted({*asked, *(float(key) for key in paper[name] if key != GAIN)}):
            theirs = paper[name].get(f"{target:g}")
            if theirs:
                cells = [LIMIT if theirs[label] is None else str(theirs[label]) for label in METHODS]
                base, own = theirs[BASE] or 1000, theirs[OURS]
                yield [setting, f"{target:.1%}", "paper", *cells, f"{'' if theirs[BASE] else '>'}{base / own:.1f}"]
            cells = [_sent(result, name, label, target) for label in METHODS]
            if any(cell[0].isdigit() for cell in cells) or (theirs and set(cells) != {ABSENT}):
                yield [setting, f"{target:.1%}", "ours", *cells, _gain(result, name, target)]


def place(name: str, label: str) -> str:
    """The experiment of a method."""
    return f"{name}-maml" if label in MAML else name


def _at(result: Result, name: str, label: str, target: float) -> Mapping[str, Any] | None:
    """The cost of an accuracy, in rounds of Per-FedAvg: {value, sign}; None if no round was evaluated."""
    reached = (page.method_of(result, place(name, label), label) or {}).get("reached", ())
    found = next((one for one in reached if one["target"] == target), None)
    return None if found is None else found["at"].get("fallah_rounds")


def _sent(result: Result, name: str, label: str, target: float) -> str:
    found = _at(result, name, label, target)
    return ABSENT if found is None else f"{found.get('sign', '').strip('=')}{found['value']:.0f}"


def _gain(result: Result, name: str, target: float) -> str:
    base, own = (_at(result, name, label, target) for label in (BASE, OURS))
    if base is None or own is None or own.get("sign") == ">":
        return ABSENT
    return f"{'>' if base.get('sign') == '>' else ''}{base['value'] / own['value']:.1f}"


def _by_round(result: Result, name: str, label: str) -> dict[int, float]:
    return {point[0]: point[1] for point in (page.method_of(result, name, label) or {}).get("curve", ())}


def _rounds(result: Result) -> Iterator[list[str]]:
    for name, setting in EXPERIMENTS.items():
        for label, title in METHODS.items():
            curve = _by_round(result, place(name, label), label)
            if curve:
                yield [setting, title, *(f"{100 * curve[n]:.1f}" if n in curve else ABSENT for n in ROUNDS)]


def _final(result: Result) -> Iterator[list[str]]:
    for name, setting in EXPERIMENTS.items():
        for label, title in METHODS.items():
            where = place(name, label)
            cells = [page.cell(result, where, label, f"accuracy.{figure}") for figure in ("mean", "worst", "best")]
            if set(cells) != {ABSENT}:
                yield [setting, title, *cells, _operations(result, where, label), page.seeds(result, where, label)]


def _operations(result: Result, where: str, label: str) -> str:
    """The operations of a round's training, over its devices, as counted from the layers' shapes."""
    spent = [one["spent"] for one in (page.method_of(result, where, label) or {"seeds": {}})["seeds"].values()]
    each = [one["flops"] / one["rounds"] for one in spent if "flops" in one]
    return flops_text(fmean(each)) if each else ABSENT


def _reference(result: Result, paper: Mapping[str, Any]) -> Iterator[list[str]]:
    curves = [_by_round(result, name, OURS) for name in (FLOAT32, "acid-5")]
    for number, value in paper["reference"][OURS].items():
        ours = [curve.get(int(number)) for curve in curves]
        yield [number, f"{value:.3f}", *(ABSENT if one is None else f"{one:.3f}" for one in ours)]


def _panels(result: Result) -> page.Panels:
    places = {f"CIFAR-10 {setting}": (name, f"{name}-maml") for name, setting in EXPERIMENTS.items()}
    return page.panels(result, places, METHODS)


def draw(result: Result, folder: Path) -> None:
    if panels := _panels(result):
        page.curves(folder / PICTURE, panels)
