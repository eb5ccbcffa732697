"""Runs a paper's experiments in the laboratory; the same command resumes them.

    METAFLEET_DATA=CACHE python -m benchmarks.papers.run PAPER [--only EXPERIMENT …] [--methods LABEL …]
        [--seeds N …] [--set KEY=VALUE …] [--minutes M] [--out build/papers] [--jobs N] [--device auto|cpu|cuda]

An experiment is a TOML file of the folder PAPER; its runs lie in OUT/PAPER/EXPERIMENT/LABEL-sSEED, like those of
``metafleet simulate``. ``--methods`` and ``--seeds`` choose some of its runs; ``--minutes`` ends after the rounds in
progress when the time is up. A folder belongs to one experiment: ``--set`` needs another ``--out``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan.experiment import Experiment
from cloud_server.laboratory.run.engine import Stopped
from cloud_server.laboratory.run.simulate import Options, simulate
from fleet_core.base.errors import ConfigError, FleetError

HERE = Path(__file__).parent
OUT = Path("build/papers")


def papers() -> list[str]:
    """The folders that hold experiments."""
    return sorted({path.parent.name for path in HERE.glob("*/*.toml")})


def files(paper: str, only: Sequence[str] = ()) -> list[Path]:
    """The experiments of a paper. Raises ConfigError for unknown names."""
    found = {path.stem: path for path in sorted((HERE / paper).glob("*.toml"))}
    for name in only:
        if name not in found:
            raise ConfigError(f"{paper} has no experiment '{name}'", expected=f"one of {', '.join(found)}")
    return [path for name, path in found.items() if not only or name in only]


def taken(asked: Experiment, seeds: Sequence[int] = (), methods: Sequence[str] = ()) -> Experiment:
    """The experiment with only these seeds and methods; all if none are named. Raises ConfigError."""
    labels = [section.label or section.name for section in asked.method]
    for name in methods:
        if name not in labels:
            raise ConfigError(f"no method is labelled '{name}'", expected=f"one of {', '.join(labels)}")
    chosen = tuple(m for m, label in zip(asked.method, labels, strict=True) if not methods or label in methods)
    return replace(asked, seeds=tuple(seeds) or asked.seeds, method=chosen)


def told(name: str) -> Callable[[str, Mapping[str, Any]], None]:
    """Prints a line on stderr for every evaluated round."""

    def tell(run: str, row: Mapping[str, Any]) -> None:
        if "accuracy" in row:
            accuracy = row["accuracy"]["mean"]
            print(f"{name} {run}: round {row['round']}, accuracy {accuracy:.4f}, loss {row['loss']:.4f}",
                  file=sys.stderr, flush=True)

    return tell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", choices=papers())
    parser.add_argument("--only", nargs="+", default=[], metavar="EXPERIMENT")
    parser.add_argument("--methods", nargs="+", default=[], metavar="LABEL")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], metavar="N")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    how = Options(jobs=options.jobs, device=options.device)
    try:
        for path in files(options.paper, options.only):
            asked = taken(experiments.load(path, options.settings), options.seeds, options.methods)
            simulate(asked, options.out / options.paper / path.stem, how, on_round=told(path.stem),
                     say=lambda line: print(line, file=sys.stderr), stopped=lambda: time.monotonic() > ends)
    except Stopped:
        print("the time is up; the same command resumes", file=sys.stderr)
    except FleetError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
