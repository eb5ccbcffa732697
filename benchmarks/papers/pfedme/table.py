"""pFedMe's Table 1 beside ours. The accuracy is over all test samples together, as the authors' program counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.papers import page
from cloud_server.figures import ABSENT

Result = Mapping[str, Any]

PERSONAL, GLOBAL = "accuracy.pooled", "before.accuracy.pooled"
ROWS = (
    ("fedavg", "fedavg", PERSONAL),
    ("per-fedavg", "per-fedavg-fo", PERSONAL),
    ("pfedme global", "pfedme-beta-2", GLOBAL),
    ("pfedme personal", "pfedme-beta-2", PERSONAL),
)
"""(the paper's row, our label, our figure)."""
BETA_1 = (("pfedme global", "pfedme-beta-1", GLOBAL), ("pfedme personal", "pfedme-beta-1", PERSONAL))
NAMES = {"fedavg": "FedAvg", "per-fedavg": "Per-FedAvg", "pfedme global": "pFedMe, global",
         "pfedme personal": "pFedMe, personal"}
EXPERIMENTS = {"mnist-mlr": "MNIST, MLR", "mnist-dnn": "MNIST, DNN", "synthetic-mlr": "Synthetic, MLR",
               "synthetic-dnn": "Synthetic, DNN"}


def tables(result: Result, paper: Mapping[str, Any]) -> dict[str, str]:
    head = ["setting", "row", "paper", "ours", "difference", "β = 1", "seeds"]
    return {"accuracy": markdown.table(head, _rows(result, paper))}


def _rows(result: Result, paper: Mapping[str, Any]) -> Iterator[list[str]]:
    for experiment, title in EXPERIMENTS.items():
        other = {row: (label, figure) for row, label, figure in BETA_1}
        for row, label, figure in ROWS:
            theirs, spread = paper[experiment][row]
            ours = page.mean(result, experiment, label, figure)
            apart = ABSENT if ours is None else f"{100 * ours - theirs:+.2f}"
            beta_1 = page.cell(result, experiment, *other[row]) if row in other else ""
            reached = page.cell(result, experiment, label, figure)
            yield [title, NAMES[row], f"{theirs:.2f} ± {spread:.2f}", reached, apart, beta_1,
                   page.seeds(result, experiment, label)]


def draw(result: Result, folder: Path) -> None:
    """The accuracy by rounds that ``result`` has curves of."""
    panels = {
        title: {label: found["curve"] for label, found in result["experiments"][name]["methods"].items()
                if found.get("curve")}
        for name, title in EXPERIMENTS.items() if name in result["experiments"]
    }
    if panels:
        page.curves(folder / "curves.png", panels)
