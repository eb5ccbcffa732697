"""Fallah's Table 1 beside ours: the step at test on test samples, as in the paper, and on the device's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import markdown
from benchmarks.papers import page
from cloud_server.figures.formatting import ABSENT

Result = Mapping[str, Any]

OWN, THEIRS, BEFORE = "accuracy.mean", "test_step.accuracy.mean", "before.accuracy.mean"
EXPERIMENTS = {
    "mnist-tau-10": "MNIST, τ = 10, rate 0.01",
    "mnist-tau-4": "MNIST, τ = 4, rate 0.01",
    "cifar-10-tau-10": "CIFAR-10, τ = 10, rate 0.001",
    "cifar-10-tau-4-alpha-0.001": "CIFAR-10, τ = 4, rate 0.001",
    "cifar-10-tau-4": "CIFAR-10, τ = 4, rate 0.01",
    "cifar-10-tau-4-pure": "CIFAR-10, τ = 4, rate 0.01, diff. hetero.",
}
NAMES = {"fedavg-update": "FedAvg + update", "per-fedavg-fo": "Per-FedAvg (FO)", "per-fedavg-hf": "Per-FedAvg (HF)"}

STEPS = "steps.json"
TRIED = ("cifar-10-tau-4-alpha-0.001", "cifar-10-tau-4", "cifar-10-tau-4-pure")
PARTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Of the rate of the step at test."""


def tables(result: Result, paper: Mapping[str, Any]) -> dict[str, str]:
    head = ["setting", "row", "paper", "step on test data", "difference", "paper's at round", "step on own data",
            "without a step", "seeds"]
    parts = ["setting", "row", *(f"{part:g} times" for part in PARTS), "seeds"]
    return {"accuracy": markdown.table(head, _rows(result, paper)), "steps": markdown.table(parts, _steps())}


def _rows(result: Result, paper: Mapping[str, Any]) -> Iterator[list[str]]:
    for experiment, title in EXPERIMENTS.items():
        for label, name in NAMES.items():
            theirs, around = paper[experiment][label]
            ours = page.mean(result, experiment, label, THEIRS)
            whole = page.whole(result, experiment, label)
            apart = ABSENT if ours is None or not whole else f"{100 * ours - theirs:+.2f}"
            own, stepped, plain = (page.cell(result, experiment, label, figure) for figure in (OWN, THEIRS, BEFORE))
            yield [title, name, f"{theirs:.2f} ± {around:.2f}", stepped, apart,
                   _reached(result, experiment, label, theirs / 100), own, plain, page.seeds(result, experiment, label)]


def _steps() -> Iterator[list[str]]:
    path = Path(__file__).parent / STEPS
    found = json.loads(path.read_text()) if path.exists() else {}
    for name in TRIED:
        for label, seeds in found.get(name, {}).items():
            means = [100 * fmean(column) for column in zip(*seeds.values(), strict=True)]
            yield [EXPERIMENTS[name], NAMES[label], *(f"{mean:.1f}" for mean in means), str(len(seeds))]


def _reached(result: Result, experiment: str, label: str, accuracy: float) -> str:
    """The first evaluated round at which the mean over seeds is ``accuracy`` or more."""
    method = page.method_of(result, experiment, label)
    if method is None or "over" not in method:
        return ABSENT
    curves = [method["seeds"][str(seed)]["details"]["stepped"] for seed in method["over"]["seeds"]]
    for number in sorted(set.intersection(*(set(curve) for curve in curves)), key=int):
        if fmean(curve[number] for curve in curves) >= accuracy:
            return f"{int(number):,}"
    return ABSENT


def details(experiment: str, label: str, evaluated: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """stepped: {round: mean accuracy over the devices after the step on test samples}."""
    return {"stepped": {str(row["round"]): round(row["test_step"]["accuracy"]["mean"], 6) for row in evaluated}}


def draw(result: Result, folder: Path) -> None:
    """The accuracy by rounds, with the step on a device's own data."""
    if panels := page.panels(result, {title: (name,) for name, title in EXPERIMENTS.items()}, NAMES):
        page.curves(folder / "curves.png", panels)
