"""Computes the cells of the grid that result.json lacks, and writes result.json after each, then README.md
and the table of docs/robust.md.

    METAFLEET_DATA=CACHE python -m benchmarks.hostile [--data heartbeat-22] [--minutes 60] [--tables]

CACHE: where ``benchmarks/papers/prepare.py heartbeat-22 mnist --cache CACHE`` has put the sets. The same command goes
on where it was ended. --tables: only writes both pages again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from benchmarks.hostile import tables
from benchmarks.hostile.cell import measured
from benchmarks.hostile.grid import DATA, cells, experiment
from cloud_server.laboratory.plan import workload
from fleet_core.base import processes

HERE = Path(__file__).parent


def compute(data: str, minutes: float, path: Path) -> None:
    """Computes as many cells as the time allows."""
    until, known = time.monotonic() + 60 * minutes, tables.rows(path)
    done = {tables.key_of(row) for row in known}
    todo = [cell for cell in cells(data) if cell.key not in done]
    if not todo:
        return
    work = workload.build(experiment(todo[0]))
    for cell in todo:
        if time.monotonic() > until:
            return
        row = measured(cell, work)
        known.append(row)
        tables.write(known, path)
        processes.say(f"{cell.key}: {row.get('accuracy', row.get('ruined'))}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=tuple(DATA), action="append", help="default: all, one after the other")
    parser.add_argument("--minutes", type=float, default=60.0, help="of each set; no new cell is begun after that")
    parser.add_argument("--tables", action="store_true", help="only write the pages from result.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for data in [] if options.tables else options.data or DATA:
        compute(data, options.minutes, HERE / "result.json")
    found = tables.rows(HERE / "result.json")
    tables.fill(found, tables.rows(HERE / "live.json"), HERE / "README.md")
    tables.summarize(found, HERE.parents[1] / "docs" / "robust.md")


if __name__ == "__main__":
    main()
