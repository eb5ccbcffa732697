"""MetaVers' tables beside ours: the mean over devices of each device's accuracy, as in the paper."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.papers import page
from cloud_server.figures.formatting import ABSENT

Result = Mapping[str, Any]

ACCURACY, NOVEL = "accuracy.mean", "novel_classes.accuracy.mean"
METHODS = (
    "local", "fedavg", "lg-fedavg", "pfedme", "fedproto", "per-fedavg-fo", "per-fedavg-fo-0.01", "pfedhn", "pfedgp",
    "fedper", "fedrep", "knn-per", "fedbabu", "p-avg-proto", "metavers",
)  # fmt: skip
"""In the paper's order. p-avg-proto, which is only in the paper's Table 3, comes before MetaVers, and a method at other
rates after the one at the common rates."""
SETTINGS = ("cifar-10-50", "cifar-10-100", "omniglot-50", "omniglot-100")
PROGRAM = "-program"
"""Experiments with MetaVers as its authors' program runs it, which is MetaVers here unless the label says otherwise."""
PRINTED = {
    "loss and network as printed": ("", "metavers-printed"),
    "so, but the means of triplets and of centroids' distances": ("", "metavers-means"),
    "loss of the program, network as printed": ("", "metavers-program"),
    "loss as printed, network of the program": (PROGRAM, "metavers-printed"),
    "loss and network of the program": (PROGRAM, "metavers"),
}
"""Variants as printed and as in the program: (experiment, label)."""
LOSSES = {
    "metavers-entropy": "cross-entropy alone", "metavers-fixed": "triplets alone, margin 0.75",
    "metavers-triplet": "triplets alone, growing margin", "metavers": "both",
}
FINETUNED = ("cifar-10-50", "cifar-10-50-finetune")
"""Experiments that differ only in the steps of fine-tuning."""
NOVEL_SETTINGS = ("cifar-10-novel", "omniglot-50", "omniglot-100")
ATTACK = "attack.json"
CASES = ("fedavg", "proto", "proto-leak", "proto-episode", "metavers", "metavers-leak", "metavers-episode")


def tables(result: Result, paper: Mapping[str, Any]) -> dict[str, str]:
    return {
        "accuracy": markdown.table(["method", *(title(name) for name in SETTINGS)], _accuracy(result, paper)),
        "finetune": markdown.table(["method", "steps", "accuracy"], _finetuned(result)),
        "printed": markdown.table(["metavers", *(f"{name}{more}" for name in SETTINGS[2:] for more in ("", ": loss"))],
                                  _printed(result)),
        "losses": markdown.table(["loss", "CINIC-10, 50 (paper)", *SETTINGS], _losses(result, paper)),
        "nvar": markdown.table(["method", "CIFAR-100, 100 (paper)", *SETTINGS], _nvar(result, paper)),
        "novel": markdown.table(["method", "CIFAR-100 (paper)", *NOVEL_SETTINGS], _novel(result, paper)),
        "attack": attack(Path(__file__).parent / ATTACK),
    }


def title(name: str) -> str:
    return f"{name} (paper)" if name.startswith("cifar") else name


def _accuracy(result: Result, paper: Mapping[str, Any]) -> Iterator[list[str]]:
    for method in METHODS:
        cells = []
        for name in SETTINGS:
            theirs = paper.get(name, {}).get(method)
            ours = page.cell(result, place(name, method), method, ACCURACY)
            cells.append(ours + ("" if theirs is None else f" ({theirs:.1f})"))
        yield [method, *cells]


def _finetuned(result: Result) -> Iterator[list[str]]:
    for label in ("fedavg", "fedbabu"):
        for experiment in FINETUNED:
            if method := page.method_of(result, experiment, label):
                steps = str(method["hyper"]["finetune_steps"])
                yield [label, steps, page.cell(result, experiment, label, ACCURACY)]


def place(setting: str, label: str) -> str:
    """The experiment that has the method."""
    return setting + PROGRAM if label in LOSSES else setting


def _printed(result: Result) -> Iterator[list[str]]:
    for name, (form, label) in PRINTED.items():
        cells = [(page.cell(result, setting + form, label, ACCURACY), _loss(result, setting + form, label))
                 for setting in SETTINGS[2:]]
        yield [name, *(text for both in cells for text in both)]


def _loss(result: Result, experiment: str, label: str) -> str:
    """The loss of the last evaluated round, the largest over seeds."""
    method = page.method_of(result, experiment, label)
    each = [one["details"]["loss"] for one in (method or {"seeds": {}})["seeds"].values() if "details" in one]
    return f"{max(each):.1e}" if each else ABSENT


def details(experiment: str, label: str, evaluated: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The training loss of the last evaluated round."""
    return {"loss": evaluated[-1]["loss"]}


def _losses(result: Result, paper: Mapping[str, Any]) -> Iterator[list[str]]:
    for label, name in LOSSES.items():
        cells = [page.cell(result, setting + PROGRAM, label, ACCURACY) for setting in SETTINGS]
        theirs = paper["ablation"]["50"].get(label)
        yield [name, ABSENT if theirs is None else f"{theirs:.1f}", *cells]


def _nvar(result: Result, paper: Mapping[str, Any]) -> Iterator[list[str]]:
    for label in dict.fromkeys((*METHODS, *LOSSES)):
        cells = [page.number(result, place(setting, label), label, "nvar", percent=False) for setting in SETTINGS]
        theirs = paper["nvar"].get(label)
        if theirs is not None or any(cell != ABSENT for cell in cells):
            yield [label, ABSENT if theirs is None else f"{theirs:.1f}", *cells]


def _novel(result: Result, paper: Mapping[str, Any]) -> Iterator[list[str]]:
    for method in dict.fromkeys((*METHODS, "fedavg-meta", *LOSSES)):
        places = [place(setting, method) for setting in NOVEL_SETTINGS]
        cells = [page.cell(result, name, method, NOVEL) for name in places]
        theirs = paper["novel"].get(method)
        if theirs is not None or any(page.mean(result, name, method, NOVEL) is not None for name in places):
            yield [method, ABSENT if theirs is None else f"{theirs:.1f}", *cells]


def attack(path: Path) -> str:
    """Medians over the images, and the correlation of the best one."""
    found = json.loads(path.read_text()) if path.exists() else {"attacks": {}}
    rows = [
        [where, case, f"{one['gradient']:.1e}", f"{one['mse']:.4f}", f"{one['flat']:.4f}", f"{one['psnr']:.1f}",
         f"{one['correlation']:.2f}", f"{max(image['correlation'] for image in one['images']):.2f}"]
        for where, cases in found["attacks"].items()
        for case, one in sorted(cases.items(), key=lambda one: CASES.index(one[0]))
    ]
    return markdown.table(
        ["images, network", "case", "gradient left", "MSE", "of grey", "PSNR in dB", "correlation", "the best"], rows
    )


def draw(result: Result, folder: Path) -> None:
    if panels := page.panels(result, {name: (name, name + PROGRAM) for name in SETTINGS}):
        page.curves(folder / "curves.png", panels)
