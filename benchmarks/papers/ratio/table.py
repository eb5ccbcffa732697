"""Models transmitted until an accuracy, in rounds of Per-FedAvg, on Acar's division made small: is the ratio there?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.papers import page
from benchmarks.papers.acar.table import BASE, METHODS, OURS
from cloud_server.figures.formatting import ABSENT
from cloud_server.laboratory.compare import comparison
from cloud_server.laboratory.plan.experiment import LATEST
from cloud_server.laboratory.run.engine import MODELS

Result = Mapping[str, Any]
Row = Mapping[str, Any]

EXPERIMENTS = {"acid-5": "ACID-5", "alid-5": "ALID-5", "alid-5-steps": "ALID-5, five inner steps"}
WORST_TARGETS = (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6)
ROUNDS = (25, 50, 100, 200, 300, 500, 750, 1000)
PICTURE = "curves.png"


def details(experiment: str, label: str, evaluated: Sequence[Row]) -> dict[str, Any]:
    """latest: [[round, mean accuracy under the mean of all devices' latest models], …]. worst: [[rounds of Per-FedAvg
    so far, accuracy of the device that has the lowest], …]."""
    return {
        "latest": [[row["round"], round(row[MODELS][LATEST]["accuracy"]["mean"], 6)]
                   for row in evaluated if MODELS in row],
        "worst": [[row["spent"]["fallah_rounds"], round(row["accuracy"]["worst"], 6)] for row in evaluated],
    }


def tables(result: Result, paper: Mapping[str, Any]) -> dict[str, str]:
    sent = ["setting", "accuracy", *METHODS.values(), f"{METHODS[BASE]} by {METHODS[OURS]}"]
    rounds = ["setting", "method", "evaluated", *map(str, ROUNDS)]
    picture = f"\n![accuracy by rounds]({PICTURE})\n" if _panels(result) else ""
    return {
        "models": markdown.table(sent, _models(result)),
        "worst": markdown.table([*sent, "seeds"], _of_the_worst(result)),
        "rounds": markdown.table(rounds, _rounds(result)) + picture,
        "settings": markdown.table(["method", "settings"], _settings(result)),
    }


def _models(result: Result) -> Iterator[list[str]]:
    for name, setting in EXPERIMENTS.items():
        asked = result["experiments"].get(name, {}).get("settings", {}).get("evaluation", {}).get("targets", ())
        for target in asked:
            found = {label: _at(result, name, label, target) for label in METHODS}
            if any(one is not None and one.get("sign") != ">" for one in found.values()):
                yield [setting, f"{target:.0%}", *map(_text, found.values()), _ratio(found[BASE], found[OURS])]


def _of_the_worst(result: Result) -> Iterator[list[str]]:
    for name, setting in EXPERIMENTS.items():
        methods = {label: page.method_of(result, name, label) or {"seeds": {}} for label in METHODS}
        curves = {label: [one["details"]["worst"] for one in method["seeds"].values() if "worst" in one["details"]]
                  for label, method in methods.items()}
        for target in WORST_TARGETS:
            found = {label: _until(of_seeds, target) for label, of_seeds in curves.items()}
            if any(one is not None and one.get("sign") != ">" for one in found.values()):
                yield [setting, f"{target:.0%}", *map(_text, found.values()), _ratio(found[BASE], found[OURS]),
                       str(min(len(one) for one in curves.values() if one))]


def _until(curves: Sequence[Sequence[Sequence[float]]], target: float) -> Row | None:
    """As ``_at``; a seed that does not reach the target counts with all that it sent."""
    if not curves:
        return None
    spent = [next((sent for sent, worst in curve if worst >= target), None) for curve in curves]
    cost = comparison.stat([curve[-1][0] if one is None else one for one, curve in zip(spent, curves, strict=True)])
    return {"value": cost.mean, "sign": ">"} if None in spent else {"value": cost.mean, "std": cost.std}


def _at(result: Result, name: str, label: str, target: float) -> Row | None:
    """The cost of an accuracy in rounds of Per-FedAvg, mean over seeds: {value, sign, std}; None if nothing ran."""
    reached = (page.method_of(result, name, label) or {}).get("reached", ())
    found = next((one for one in reached if one["target"] == target), None)
    return None if found is None else found["at"].get("fallah_rounds")


def _text(found: Row | None) -> str:
    if found is None:
        return ABSENT
    spread = f" ± {found['std']:.0f}" if found.get("std") is not None else ""
    return f"{found.get('sign', '').strip('=')}{found['value']:.0f}{spread}"


def _ratio(base: Row | None, own: Row | None) -> str:
    if base is None or own is None or own.get("sign") == ">":
        return ABSENT
    return f"{'>' if base.get('sign') == '>' else ''}{base['value'] / own['value']:.1f}"


def _rounds(result: Result) -> Iterator[list[str]]:
    for name, setting in EXPERIMENTS.items():
        for label, title in METHODS.items():
            method = page.method_of(result, name, label) or {"seeds": {}}
            served = {point[0]: f"{100 * point[1]:.1f}" for point in method.get("curve", ())}
            latest = _latest(method)
            for kind, curve in (("as served", served), ("mean of the latest", latest)):
                if curve:
                    yield [setting, title, kind, *(curve.get(number, ABSENT) for number in ROUNDS)]


def _latest(method: Row) -> dict[int, str]:
    values: dict[int, list[float]] = {}
    for one in method["seeds"].values():
        for number, value in one.get("details", {}).get("latest", ()):
            values.setdefault(number, []).append(value)
    return {number: f"{100 * comparison.stat(found).mean:.1f}" for number, found in values.items()}


def _settings(result: Result) -> Iterator[list[str]]:
    for label, title in METHODS.items():
        method = page.method_of(result, "acid-5", label)
        if method is not None:
            chosen = {key: value for key, value in method["hyper"].items()
                      if key in ("client_lr", "inner_lr", "penalty")}
            yield [title, ", ".join(f"`{key} = {value:g}`" for key, value in chosen.items())]


def _panels(result: Result) -> page.Panels:
    return page.panels(result, {f"{setting}, made small": (name,) for name, setting in EXPERIMENTS.items()}, METHODS)


def draw(result: Result, folder: Path) -> None:
    if panels := _panels(result):
        page.curves(folder / PICTURE, panels)
