"""Cost of a round in the laboratory, compared with the bare loop and with Flower's Ray simulation, in one run.

    python -m benchmarks.simulation.run --out benchmarks/simulation/result.json [--repeat 3] [--without flower memory]

* Hand-written loop (``loop``): our round in this process and the loop's in another, in turn, with one thread each. The
  ratio is that of the medians over ``pairs`` rounds, of wall-clock seconds and of CPU seconds, which other load on the
  machine disturbs less. The loop runs with PyTorch's defaults, and again with the laboratory's allocator settings.
* Flower (``flower``): client updates per second in the median round and CPU seconds per update over all processes, each
  with all processors of the machine, in turn. The first run installs Flower into its own virtual environment under
  build/ (pinned in flower-simulation.txt), with torch from this Python.
* Memory (``memory``): the peak of the process of a run with 1,000 devices and their states on disk.

Writes medians of ``--repeat`` runs, and the machine's other load.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.overhead.memory import family
from benchmarks.overhead.peers.venvs import python_of
from benchmarks.overhead.processes import cpu_s
from benchmarks.simulation import loop, ours
from benchmarks.simulation.workload import WORKLOADS, Workload
from fleet_core.base.storage import write_json

HERE = Path(__file__).parent
PEER = "flower-simulation"
FORMS = ("favourable", "documented")
LIMIT_S = 900.0
LOOP_BAR, FLOWER_BARS = 1.10, {"lenet": 4.0, "mlp": 20.0}

Times = tuple[float, float]
"""(wall-clock seconds, CPU seconds)."""


def beside_loop(workload: Workload, *, kept: bool) -> dict[str, Any]:
    """Medians of our rounds and of the loop's, taken in turn, and their ratios."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=loop.serve, args=(workload, kept, theirs), daemon=True)
    process.start()
    pairs: list[tuple[Times, Times]] = []
    began: list[Times] = []

    def told() -> None:
        ended = now()
        pipe.send(True)
        beside = pipe.recv()
        if began:
            pairs.append(((ended[0] - began[-1][0], ended[1] - began[-1][1]), beside))
        began.append(now())

    ours.run(workload, workload.pairs + 2, 1, told)  # the first round warms up, the last one evaluates
    pipe.send(False)
    process.join()
    found: dict[str, Any] = {}
    for k, what in enumerate(("seconds", "cpu_seconds")):
        own, beside = (median(pair[side][k] for pair in pairs[:-1]) for side in (0, 1))
        found[what] = {"ours": round(own, 5), "loop": round(beside, 5), "ratio": round(own / beside, 3)}
    return found


def now() -> Times:
    return time.perf_counter(), time.process_time()


def own_updates(workload: Workload) -> dict[str, float]:
    """Our updates, with all processors."""
    looks: list[Times] = []
    ours.run(workload, workload.rounds + 2, 0, lambda: looks.append((time.time(), cpu_s(family(os.getpid())))))
    return pace(workload, looks[:-1])


def flower_updates(name: str, form: str) -> dict[str, float]:
    workload = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as home:
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": home,
                 "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        rounds = workload.rounds + 1
        command = [str(python_of(PEER, HERE)), "-m", "benchmarks.simulation.flower", name, str(rounds), form]
        with subprocess.Popen(
            command, env={**os.environ, **quiet}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            looks, said = followed(process)
    if process.returncode or len(looks) != rounds:
        raise SystemExit(f"Flower ended with {process.returncode} after {len(looks)} rounds\n{said[-3000:]}")
    return pace(workload, looks)


def followed(process: subprocess.Popen[str]) -> tuple[list[Times], str]:
    """((time, CPU seconds of all its processes) at each round's end, its whole output)."""
    looks, said = list[Times](), list[str]()
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if line.startswith("end "):
            looks.append((float(line.split()[1]), cpu_s(family(process.pid))))
    return looks, "".join(said)


def pace(workload: Workload, looks: Sequence[Times]) -> dict[str, float]:
    """Client updates per second in the median round and CPU seconds per update, without the first round."""
    updates = workload.clients * (len(looks) - 1)
    return {
        "updates_per_second": workload.clients / median(after[0] - before[0] for before, after in pairwise(looks)),
        "cpu_seconds_per_update": (looks[-1][1] - looks[0][1]) / updates,
    }


def memory() -> dict[str, Any]:
    """The output of ``memory``, run in its own process."""
    command = [sys.executable, "-m", "benchmarks.simulation.memory"]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S).stdout
    return dict(json.loads(said))


# Several runs, and what is written ------------------------------------------------------------------------------------


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of trees of numbers that have the same keys."""
    return {
        key: summary([run[key] for run in runs]) if isinstance(value, dict) else round(median(r[key] for r in runs), 5)
        for key, value in runs[0].items()
    }


def repeated(times: int, what: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    runs = []
    for _ in range(times):
        runs.append(measure())
        print(what, runs[-1], f"load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return {"median": summary(runs), "runs": runs}


def against_flower(name: str) -> dict[str, Any]:
    own = own_updates(WORKLOADS[name])
    found: dict[str, Any] = {"ours": own}
    for form in FORMS:
        found[form] = theirs = flower_updates(name, form)
        theirs["ratio"] = own["updates_per_second"] / theirs["updates_per_second"]
        theirs["cpu_ratio"] = theirs["cpu_seconds_per_update"] / own["cpu_seconds_per_update"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--without", nargs="*", choices=("loop", "flower", "memory"), default=[])
    parser.add_argument("--workloads", nargs="*", choices=tuple(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "environment": {"system": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count(),
                        "load_before": os.getloadavg()},
        "bars": {"loop": LOOP_BAR, "flower": FLOWER_BARS}, "loop": {}, "flower": {},
    }
    if "flower" not in options.without:
        python_of(PEER, HERE)  # installed before anything is timed
        found["versions"] = (HERE / f"{PEER}.txt").read_text().split()
    for name in options.workloads:
        workload = WORKLOADS[name]
        if "loop" not in options.without:
            found["loop"][name] = {
                what: repeated(options.repeat, f"{name}, {what}", partial(beside_loop, workload, kept=kept))
                for what, kept in (("as it comes", False), ("same allocator", True))
            }
        if "flower" not in options.without:
            found["flower"][name] = repeated(options.repeat, f"{name}, Flower", partial(against_flower, name))
    if "memory" not in options.without:
        found["memory"] = memory()
    found["environment"]["load_after"] = os.getloadavg()
    write_json(options.out, found)


if __name__ == "__main__":
    main()
