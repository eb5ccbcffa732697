"""Makes a paper's page from its runs: result.json, curves, and the tables of README.md.

    python -m benchmarks.papers.page PAPER … [--out build/papers]

It collects the runs below OUT/PAPER into PAPER/result.json (``collect``), in addition to those from other machines. The
page is made from that file and from PAPER/paper.json, the paper's own figures with their source. With ``--kept``
nothing is collected: the page is made from the existing result.json. PAPER/table.py has what is special about a paper:

    tables(result, paper) -> {NAME: Markdown}     for the places <!-- table NAME --> … <!-- end --> of README.md
    draw(result, folder)                          its pictures, if any (they need matplotlib)
    details(experiment, label, evaluated rounds)  what result.json needs of a run besides, if anything

A page can also have the table ``runs``: how far every run is.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.papers import collect, run
from cloud_server.figures.formatting import ABSENT
from cloud_server.laboratory.compare.comparison_charts import style
from fleet_core.base.errors import FleetError
from fleet_core.base.storage import write_atomic, write_json

RESULT, PAPER, PAGE = "result.json", "paper.json", "README.md"
RUNS = "runs"
PANELS = 2
"""Panels in a row, at most."""

Result = Mapping[str, Any]


def made(folder: Path, out: Path | None) -> None:
    """Writes the page in ``folder``; first collects ``out`` if it is not None."""
    special = importlib.import_module(f"benchmarks.papers.{folder.name}.table")
    if out is not None:
        before = json.loads((folder / RESULT).read_text()) if (folder / RESULT).exists() else None
        found = collect.collected(run.files(folder.name), out / folder.name, getattr(special, "details", None),
                                  kept=before, say=lambda line: print(line, file=sys.stderr))
        write_json(folder / RESULT, found)
    result = json.loads((folder / RESULT).read_text())
    if hasattr(special, "draw"):
        special.draw(result, folder)
    write_atomic(folder / PAGE, page(folder, result).encode())


def page(folder: Path, result: Result) -> str:
    """README.md with the tables from ``result``."""
    special = importlib.import_module(f"benchmarks.papers.{folder.name}.table")
    text = (folder / PAGE).read_text()
    paper = json.loads((folder / PAPER).read_text()) if (folder / PAPER).exists() else {}
    tables = dict(special.tables(result, paper))
    if f"<!-- table {RUNS} -->" in text:
        tables[RUNS] = runs(result)
    return markdown.filled(text, tables)


def runs(result: Result) -> str:
    """How far every run is."""
    head = ["experiment", "method", "rounds by seed", "hours"]
    return markdown.table(head, _runs(result))


def _runs(result: Result) -> Iterator[list[str]]:
    for name, one in result["experiments"].items():
        for label, method in one["methods"].items():
            seeds = method["seeds"]
            rounds = ", ".join(f"{seed}: {progress(found)}" for seed, found in seeds.items())
            yield [name, label, rounds, f"{sum(found['seconds'] for found in seeds.values()) / 3600:.1f}"]


def progress(found: Mapping[str, Any]) -> str:
    """``800``, or ``120 of 800, unfinished`` for a run that has not ended."""
    return f"{found['round']:,}" if found["ended"] else f"{found['round']:,} of {found['of']:,}, unfinished"


# For the tables of a paper --------------------------------------------------------------------------------------------


def method_of(result: Result, experiment: str, label: str) -> Mapping[str, Any] | None:
    """The figures of a label's runs; None if none has begun."""
    found: Mapping[str, Any] | None = result["experiments"].get(experiment, {}).get("methods", {}).get(label)
    return found


def mean(result: Result, experiment: str, label: str, figure: str) -> float | None:
    """The mean over seeds; None if it was not measured."""
    one = (method_of(result, experiment, label) or {}).get("over", {}).get("figures", {}).get(figure)
    return None if one is None else float(one["mean"])


def cell(result: Result, experiment: str, label: str, figure: str) -> str:
    """A ``number`` in percent, with the round if the runs have not ended: ``91.20 (round 120 of 800)``."""
    text, method = number(result, experiment, label, figure), method_of(result, experiment, label)
    if method is None or text == ABSENT or whole(result, experiment, label):
        return text
    of = max(found["of"] for found in method["seeds"].values())
    return f"{text} (round {method['over']['round']:,} of {of:,})"


def number(result: Result, experiment: str, label: str, figure: str, *, percent: bool = True) -> str:
    """``94.18 ± 0.06`` over the seeds; a dash for none."""
    one = (method_of(result, experiment, label) or {}).get("over", {}).get("figures", {}).get(figure)
    if one is None:
        return ABSENT
    times, digits = (100, 2) if percent else (1, 4)
    text = f"{times * one['mean']:.{digits}f}"
    return text + (f" ± {times * one['std']:.{digits}f}" if one.get("std") is not None else "")


def whole(result: Result, experiment: str, label: str) -> bool:
    """Whether the label's figures are those of the last round."""
    method = method_of(result, experiment, label) or {}
    return method.get("over", {}).get("round") in {found["of"] for found in method.get("seeds", {}).values()}


def seeds(result: Result, experiment: str, label: str) -> str:
    """The number of seeds in the figures."""
    method = method_of(result, experiment, label)
    return str(len(method["over"]["seeds"])) if method and "over" in method else "0"


Panels = dict[str, dict[str, list[list[Any]]]]


def panels(result: Result, places: Mapping[str, Sequence[str]], names: Mapping[str, str] | None = None) -> Panels:
    """The argument of ``curves``: {title: {name: curve}} of the experiments ``places[title]`` that have curves.

    names: of labels, if they differ from the label. If two experiments of a panel have the same name, the second one
    gets the experiment's name added.
    """
    found: Panels = {}
    for title, experiments in places.items():
        here: dict[str, list[list[Any]]] = {}
        for experiment in experiments:
            for label, method in result["experiments"].get(experiment, {}).get("methods", {}).items():
                name = (names or {}).get(label, label)
                if method.get("curve"):
                    here[f"{name} ({experiment})" if name in here else name] = method["curve"]
        if here:
            found[title] = here
    return found


def _line(panel: Any, curve: list[list[Any]], number: int, label: str) -> None:
    colour, dashes = style(number)
    rounds, means = [point[0] for point in curve], [point[1] for point in curve]
    around = [point[2] or 0.0 for point in curve]
    panel.plot(rounds, means, label=label, color=colour, linestyle=(0, dashes) if dashes else "-", linewidth=1.3,
               marker="." if len(rounds) < 3 else "")
    panel.fill_between(rounds, [m - s for m, s in zip(means, around, strict=True)],
                       [m + s for m, s in zip(means, around, strict=True)], alpha=0.2, color=colour, linewidth=0)


def curves(
    path: Path, panels: Mapping[str, Mapping[str, list[list[Any]]]], *, ylabel: str = "accuracy, mean over devices",
) -> None:
    """A PNG with a panel per title: accuracy by rounds, a band of one deviation over seeds.

    panels: {title: {label: [[round, mean, deviation], …]}}.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    numbers = {label: n for n, label in enumerate(dict.fromkeys(chain.from_iterable(panels.values())))}
    rows = math.ceil(len(panels) / PANELS)
    columns = math.ceil(len(panels) / rows)
    size = 4.8 * columns + 2.0, 3.8 * rows
    image, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for panel in axes.flat[len(panels) :]:
        panel.remove()
    for panel, (title, by_label) in zip(axes.flat[: len(panels)], panels.items(), strict=True):
        for label, curve in by_label.items():
            _line(panel, curve, numbers[label], label)
        panel.set(title=title, xlabel="rounds", ylabel=ylabel)
        panel.grid(alpha=0.3)
    drawn = {line.get_label(): line for panel in axes.flat for line in panel.get_lines()}
    image.legend([drawn[label] for label in numbers], numbers, loc="outside right upper", frameon=False,
                 fontsize="small", handlelength=4)
    image.savefig(path, dpi=130)
    pyplot.close(image)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", nargs="+", choices=run.papers(), metavar="PAPER")
    parser.add_argument("--out", type=Path, default=run.OUT)
    parser.add_argument("--kept", action="store_true", help="make the page of the result.json that is there")
    options = parser.parse_args()
    try:
        for paper in options.papers:
            made(run.HERE / paper, None if options.kept else options.out)
    except FleetError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
