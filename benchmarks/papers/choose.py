"""Chooses every method's hyper-parameters from a small grid; the page's test samples are not used.

    METAFLEET_DATA=CACHE python -m benchmarks.papers.choose PAPER [--only NAME …] [--methods NAME …]
        [--minutes M] [--out build/papers] [--jobs N]

``PAPER/grid/NAME.toml`` are experiments with ``evaluation.within_training``: the training samples are split once more,
and some of the training devices take the place of new ones, if there are any. The measure is that of ``metafleet
advise``: macro-F1 of the devices that train and of the new ones, each device weighing the same, its mean over the
grid's seeds; of equal candidates the first. The same command resumes. When a grid is done, ``PAPER/chosen.json`` has
all its candidates, and ``PAPER/NAME.toml`` the chosen settings below its line. With ``--methods`` only the candidates
of these methods are tried, and those of others stay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.papers.run import told
from cloud_server.laboratory.advise.candidates import score
from cloud_server.laboratory.compare import finished_runs
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.run.engine import Stopped
from cloud_server.laboratory.run.simulate import Options, simulate
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import schema
from fleet_core.base.errors import FleetError
from fleet_core.base.storage import write_atomic, write_json

HERE = Path(__file__).parent
OUT = Path("build/papers")
CHOSEN = "chosen.json"
LINE = "# ---- chosen: python -m benchmarks.papers.choose\n"
DIGITS = 4

Candidate = dict[str, Any]


def candidates(folders: Sequence[Path]) -> dict[str, list[Candidate]]:
    """By method, in the order of the grid: {hyper: what differs from the defaults, macro_f1: the mean over seeds}, of
    runs that ended."""
    scores: dict[tuple[str, str], list[float]] = {}
    for folder in folders:
        path = folder / "result.json"
        trial = finished_runs.read(path)
        own = json.dumps(differing(trial.method, json.loads(path.read_text())["config"]["hyper"]))
        scores.setdefault((trial.method, own), []).append(score(trial))
    found: dict[str, list[Candidate]] = {}
    for (method, hyper), each in scores.items():
        one = {"hyper": json.loads(hyper), "macro_f1": round(statistics.fmean(each), DIGITS)}
        found.setdefault(method, []).append(one)
    return found


def differing(method: str, hyper: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from the method's defaults. A sparse one is in ``hyper`` only if it does."""
    own = schema.plain(METHODS[method].hyper())
    return {key: value for key, value in hyper.items() if key not in own or own[key] != value}


def best(several: Sequence[Candidate]) -> Candidate:
    return max(several, key=lambda one: float(one["macro_f1"]))


def settings(found: Mapping[str, Sequence[Candidate]]) -> Iterator[str]:
    """The ``[[method]]`` tables of an experiment, in the order of ``metafleet methods``."""
    for name in METHODS:
        if name in found:
            values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in best(found[name])["hyper"].items())
            yield f'\n[[method]]\nname = "{name}"\nhyper = {{ {values} }}\n'


def written(path: Path, found: Mapping[str, Sequence[Candidate]]) -> None:
    """The experiment in ``path`` with the chosen settings below its line."""
    head, line, _ = path.read_text().partition(LINE)
    write_atomic(path, (head + line + "".join(settings(found))).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", choices=sorted(path.parent.name for path in HERE.glob("*/grid")))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--methods", choices=list(METHODS), nargs="+", default=list(METHODS))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--jobs", type=int, default=0)
    options = parser.parse_args()
    ends, folder = time.monotonic() + 60 * options.minutes, HERE / options.paper
    kept = folder / CHOSEN
    try:
        for name in options.only or sorted(path.stem for path in (folder / "grid").glob("*.toml")):
            asked = experiments.load(folder / "grid" / f"{name}.toml")
            asked = replace(asked, method=tuple(one for one in asked.method if one.name in options.methods))
            out = options.out / f"{options.paper}-grid" / name
            folders = simulate(asked, out, Options(jobs=options.jobs, device="cpu"), on_round=told(name),
                               say=lambda line: print(line, file=sys.stderr),
                               stopped=lambda: time.monotonic() > ends)
            every = json.loads(kept.read_text()) if kept.exists() else {}
            found = {**every.get(name, {}).get("methods", {}), **candidates(folders)}
            write_json(kept, {**every, name: {"rounds": asked.budget.rounds, "seeds": list(asked.seeds),
                                                "methods": found}})
            written(folder / f"{name}.toml", found)
    except Stopped:
        print("the time is up; the same command resumes", file=sys.stderr)
        sys.exit(1)
    except FleetError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
