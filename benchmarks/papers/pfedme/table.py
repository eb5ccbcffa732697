"""pFedMe's Table 1 beside ours. The accuracy is over all test samples together, as the authors' program counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.papers import collect, page
from cloud_server.figures.formatting import ABSENT
from cloud_server.laboratory.compare.comparison import Stat, stat

Result = Mapping[str, Any]

PERSONAL, GLOBAL, TEST_STEP = "accuracy.pooled", "before.accuracy.pooled", "test_step.accuracy.pooled"
PUBLISHED, ALL = "-published", "-published-all"
"""Experiments on the devices of the authors' program; in the second all devices train."""
ROWS = (
    ("fedavg", "fedavg", PUBLISHED, PERSONAL, "FedAvg"),
    ("per-fedavg", "per-fedavg-fo", PUBLISHED, PERSONAL, "Per-FedAvg"),
    ("per-fedavg", "per-fedavg-program", PUBLISHED, TEST_STEP, "Per-FedAvg, as their program computes"),
    ("pfedme global", "pfedme-all", ALL, GLOBAL, "pFedMe, global"),
    ("pfedme personal", "pfedme-all", ALL, PERSONAL, "pFedMe, personal"),
)
"""(the paper's row, our label, our experiment, our figure, its name)."""
APART = (
    ("fedavg", PERSONAL, "FedAvg"),
    ("per-fedavg-fo", PERSONAL, "Per-FedAvg"),
    ("pfedme-beta-2", GLOBAL, "pFedMe, global"),
    ("pfedme-beta-2", PERSONAL, "pFedMe, personal"),
    ("pfedme-beta-1", GLOBAL, "pFedMe with β = 1, global"),
    ("pfedme-beta-1", PERSONAL, "pFedMe with β = 1, personal"),
)
"""(label, figure, name) where no two devices share a sample."""
CENTRAL, SWEEP = "mnist-mlr-central", "mnist-mlr-sweep"
SWEPT = {"base": "as in Table 1, β = 1", "envelope": "λ", "steps": "R", "personal-steps": "K", "server": "β"}
ROUNDS = (40, 200, 400, 800)
EXPERIMENTS = {"mnist-mlr": "MNIST, MLR", "mnist-dnn": "MNIST, DNN", "synthetic-mlr": "Synthetic, MLR",
               "synthetic-dnn": "Synthetic, DNN"}


def tables(result: Result, paper: Mapping[str, Any]) -> dict[str, str]:
    head = ["setting", "row", "paper", "ours, best round", "difference", "ours, last round", "seeds"]
    apart = ["setting", "row", "last round", "best round", "seeds"]
    sweep = ["setting", *(f"{model}, round {number}" for model in ("personal", "global") for number in ROUNDS), "seeds"]
    return {"accuracy": markdown.table(head, _beside(result, paper)),
            "apart": markdown.table(apart, _apart(result)), "sweep": markdown.table(sweep, _sweep(result))}


def _beside(result: Result, paper: Mapping[str, Any]) -> Iterator[list[str]]:
    """The difference is that of the best round, which is also the paper's figure."""
    for setting, title in EXPERIMENTS.items():
        for row, label, form, figure, name in ROWS:
            experiment = setting + form
            theirs, spread = paper[setting][row]
            best = _best(result, experiment, label, figure)
            whole = page.whole(result, experiment, label)
            apart = ABSENT if best is None or not whole else f"{100 * best.mean - theirs:+.2f}"
            yield [title, name, f"{theirs:.2f} ± {spread:.2f}", _text(best), apart,
                   page.cell(result, experiment, label, figure), page.seeds(result, experiment, label)]


def _apart(result: Result) -> Iterator[list[str]]:
    for experiment, title in EXPERIMENTS.items():
        for label, figure, name in APART:
            if page.method_of(result, experiment, label):
                yield [title, name, page.cell(result, experiment, label, figure),
                       _text(_best(result, experiment, label, figure)), page.seeds(result, experiment, label)]
    yield [EXPERIMENTS["mnist-mlr"], "one model, trained on all samples together",
           page.cell(result, CENTRAL, "central", PERSONAL), _text(_best(result, CENTRAL, "central", PERSONAL)),
           page.seeds(result, CENTRAL, "central")]


def _sweep(result: Result) -> Iterator[list[str]]:
    methods = result["experiments"].get(SWEEP, {}).get("methods", {})
    for label in sorted(methods, key=_place):
        method = methods[label]
        each = [one["details"]["rounds"] for one in method["seeds"].values() if "details" in one]
        found = {number: [row[1:] for rows in each for row in rows if row[0] == number] for number in ROUNDS}
        name, value = _changed(label)
        title = f"{SWEPT[name]} = {value}" if value else SWEPT[name]
        cells = [_text(stat([row[which] for row in found[number]])) if found[number] else ABSENT
                 for which in (0, 1) for number in ROUNDS]
        yield [title, *cells, str(len(each))]


def _changed(label: str) -> tuple[str, str]:
    """(name of the setting, value), or (label, "") where none is changed."""
    name, _, value = label.rpartition("-")
    return (name, value) if name else (label, "")


def _place(label: str) -> tuple[int, float]:
    name, value = _changed(label)
    return list(SWEPT).index(name), float(value or 0)


def _best(result: Result, experiment: str, label: str, figure: str) -> Stat | None:
    """The best round's figure over the seeds that ``over`` has."""
    method = page.method_of(result, experiment, label)
    if not method or "over" not in method:
        return None
    found = [method["seeds"][str(seed)]["details"][figure] for seed in method["over"]["seeds"]]
    return stat(found) if found else None


def _text(best: Stat | None) -> str:
    if best is None:
        return ABSENT
    return f"{100 * best.mean:.2f}" + ("" if best.std is None else f" ± {100 * best.std:.2f}")


def details(experiment: str, label: str, evaluated: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The best evaluated round: the authors' program averages the largest accuracy of each run. Of the sweep, rounds:
    [[round, accuracy of the personal models, of the global one], …]."""
    each = [collect.figures(row) for row in evaluated]
    best = {name: max(row[name] for row in each) for name in (PERSONAL, GLOBAL, TEST_STEP) if name in each[0]}
    if experiment != SWEEP:
        return best
    return {**best, "rounds": [[row["round"], round(own[PERSONAL], 6), round(own[GLOBAL], 6)]
                               for row, own in zip(evaluated, each, strict=True)]}


def draw(result: Result, folder: Path) -> None:
    """The accuracy by rounds on the devices of the authors' program, for the available curves."""
    places = {title: (setting + PUBLISHED, setting + ALL) for setting, title in EXPERIMENTS.items()}
    if panels := page.panels(result, places):
        page.curves(folder / "curves.png", panels)
