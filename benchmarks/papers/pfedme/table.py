"""pFedMe's Table 1 beside ours. The accuracy is over all test samples together, as the authors' program counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.papers import collect, page
from cloud_server.figures import ABSENT
from cloud_server.laboratory.compare import Stat, stat

Result = Mapping[str, Any]

PERSONAL, GLOBAL = "accuracy.pooled", "before.accuracy.pooled"
ROWS = (
    ("fedavg", "fedavg", PERSONAL),
    ("per-fedavg", "per-fedavg-fo", PERSONAL),
    ("pfedme global", "pfedme-beta-2", GLOBAL),
    ("pfedme personal", "pfedme-beta-2", PERSONAL),
)
"""(the paper's row, our label, our figure)."""
CENTRAL = "mnist-mlr-central"
ALL = {"pfedme global": GLOBAL, "pfedme personal": PERSONAL}
"""In the paper's form, in which all devices train."""
NAMES = {"fedavg": "FedAvg", "per-fedavg": "Per-FedAvg", "pfedme global": "pFedMe, global",
         "pfedme personal": "pFedMe, personal"}
EXPERIMENTS = {"mnist-mlr": "MNIST, MLR", "mnist-dnn": "MNIST, DNN", "synthetic-mlr": "Synthetic, MLR",
               "synthetic-dnn": "Synthetic, DNN"}


def tables(result: Result, paper: Mapping[str, Any]) -> dict[str, str]:
    head = ["setting", "row", "paper", "ours, last round", "ours, best round", "difference", "all devices train",
            "β = 1", "seeds"]
    central = [["MNIST, MLR", page.cell(result, CENTRAL, "central", PERSONAL),
                _text(_best(result, CENTRAL, "central", PERSONAL))]]
    return {"accuracy": markdown.table(head, _rows(result, paper)),
            "central": markdown.table(["setting", "last round", "best round"], central)}


def _rows(result: Result, paper: Mapping[str, Any]) -> Iterator[list[str]]:
    """The difference is that of the best round, which the paper's table has."""
    for experiment, title in EXPERIMENTS.items():
        for row, label, figure in ROWS:
            theirs, spread = paper[experiment][row]
            best = _best(result, experiment, label, figure)
            whole = page.whole(result, experiment, label)
            apart = ABSENT if best is None or not whole else f"{100 * best.mean - theirs:+.2f}"
            last = page.cell(result, experiment, label, figure)
            others = ["", ""]
            if row in ALL:
                others = [page.cell(result, f"{experiment}-all", "pfedme-all", ALL[row]),
                          page.cell(result, experiment, "pfedme-beta-1", figure)]
            yield [title, NAMES[row], f"{theirs:.2f} ± {spread:.2f}", last,
                   _text(best), apart, *others,
                   page.seeds(result, experiment, label)]


def _best(result: Result, experiment: str, label: str, figure: str) -> Stat | None:
    """Over the seeds that ``over`` has."""
    method = page.method_of(result, experiment, label)
    if not method or "over" not in method:
        return None
    found = [method["seeds"][str(seed)]["details"][figure] for seed in method["over"]["seeds"]]
    return stat(found) if found else None


def _text(best: Stat | None) -> str:
    if best is None:
        return ABSENT
    return f"{100 * best.mean:.2f}" + ("" if best.std is None else f" ± {100 * best.std:.2f}")


def details(experiment: str, label: str, judged: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The best judged round: the authors' program averages the largest accuracy of each run."""
    return {figure: max(collect.figures(row)[figure] for row in judged) for figure in (PERSONAL, GLOBAL)}


def draw(result: Result, folder: Path) -> None:
    """The accuracy by rounds that ``result`` has curves of."""
    panels = {
        title: {label: found["curve"] for label, found in result["experiments"][name]["methods"].items()
                if found.get("curve")}
        for name, title in EXPERIMENTS.items() if name in result["experiments"]
    }
    if panels:
        page.curves(folder / "curves.png", panels)
