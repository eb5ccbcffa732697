"""What ``freeze = "auto"`` saves and what it costs: bytes, operations and macro-F1 on the heartbeats.

The ten patients of the built-in set train cnn1d for 80 rounds in the laboratory, with three seeds, int8 both ways, once
with every array in every round and once by the schedule. Macro-F1 is measured on a validation part inside each
patient's training part; the usual test samples are not used.

    python benchmarks/freezing/run.py --runs FOLDER [--minutes 60] [--jobs 1] [METHOD ...]

Runs that have ended in FOLDER are kept, so that the same command goes on. After each row it writes result.json and the
table in README.md, beside this file; other rows stay.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import markdown
from benchmarks.cost import codecs
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.run import simulate as simulation
from cloud_server.laboratory.run.engine import Stopped
from cloud_server.laboratory.run.run_folder import Store
from fleet_core.base import processes, storage
from fleet_core.model.select_arrays import AUTO, NEVER, TrainSection

HERE = Path(__file__).parent
METHODS, ROUNDS = ("pfldyn-proto", "fedavg"), 80


def experiment(method: str, freeze: str, rounds: int = ROUNDS) -> experiments.Experiment:
    asked = codecs.experiment("int8", method)
    return replace(asked, budget=replace(asked.budget, rounds=rounds), train=TrainSection(freeze=freeze))


def row(method: str, freeze: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Macro-F1 by seed; bytes and operations of one device in the whole run, and the share of arrays frozen in a round,
    means over the seeds."""
    ended = [Store(folder).result() for folder in folders]
    rounds = [one for result in ended for one in result["rounds"]]
    frozen = [len(one["arrays"]["frozen"]) / len(one["arrays"]["moves"] | dict.fromkeys(one["arrays"]["frozen"]))
              for one in rounds if "arrays" in one]
    return {
        "method": method, "freeze": freeze, "macro_f1": [result["evaluated"]["macro_f1"] for result in ended],
        "bytes": {way: sum(one["payload_bytes"][way] / one["participants"] for one in rounds) / len(ended)
                  for way in ("up", "down")},
        "flops": sum(one["flops"] / one["participants"] for one in rounds) / len(ended),
        "frozen": mean(frozen) if frozen else 0.0,
    }


def compute(runs: Path, minutes: float, jobs: int, methods: Sequence[str]) -> None:
    """A row per method and setting, as many as the time allows; the last one begun is completed."""
    until = time.monotonic() + 60 * minutes
    for method in methods:
        for freeze in (NEVER, AUTO):
            out, asked = runs / f"{method}-{freeze}", experiment(method, freeze)
            folders = [out / run.name for run in experiments.runs(asked)]
            if not all(Store(folder).done for folder in folders):
                if time.monotonic() > until:
                    return
                simulation.simulate(asked, out, simulation.Options(jobs=jobs, device="cpu"))
            found = row(method, freeze, folders)
            processes.say(json.dumps(found))
            write([found])


def write(rows: Sequence[dict[str, Any]], folder: Path = HERE) -> None:
    """result.json and the table of README.md; rows that are there already and not in ``rows`` stay."""
    path = folder / "result.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    named = {(one["method"], one["freeze"]): one for one in (*kept, *rows)}
    rows = [named[key] for method in METHODS for freeze in (NEVER, AUTO) if (key := (method, freeze)) in named]
    seeds = list(range(codecs.SETTINGS[codecs.HEARTBEAT].seeds))
    storage.write_json(path, {"rounds": ROUNDS, "seeds": seeds, "rows": rows})
    page = folder / "README.md"
    page.write_text(markdown.filled(page.read_text(encoding="utf-8"), {"freezing": table(rows)}), encoding="utf-8")


def table(rows: Sequence[dict[str, Any]]) -> str:
    heads = ("method", "freeze", "kB up", "kB down", "GFLOP", "frozen", "macro-F1", "spread", "seeds")
    return markdown.table(heads, map(line, rows))


def line(one: dict[str, Any]) -> tuple[str, ...]:
    figures = one["macro_f1"]
    return (
        f"`{one['method']}`", f"`{one['freeze']}`", *(f"{one['bytes'][way] / 1000:,.0f}" for way in ("up", "down")),
        f"{one['flops'] / 1e9:,.1f}", f"{one['frozen']:.0%}", f"{mean(figures):.3f}",
        f"{stdev(figures):.3f}" if len(figures) > 1 else "-", str(len(figures)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--minutes", type=float, default=60.0, help="no new row is begun after this time")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("methods", nargs="*", metavar="METHOD", default=METHODS, help="default: all")
    options = parser.parse_args()
    try:
        compute(options.runs, options.minutes, options.jobs, options.methods)
    except Stopped:
        processes.say("stopped; the same command goes on")


if __name__ == "__main__":
    main()
