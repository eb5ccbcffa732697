"""Memory and cold start of the agent's commands compared with a bare onnxruntime script, each in separate processes.

    python -m benchmarks.on_device.memory --out benchmarks/on_device/memory.json        Linux

For every model, in turn and ``--repeats`` times: ``edge-agent predict`` of one sample and the bare script's;
``edge-agent personalize`` (10 steps on 50 samples) and the bare script's; and a long-running process (``live.py``).
Peaks are the kernel's high-water mark of a command's largest process, seconds run from its start to its end.
``together`` is at most what all processes of a command held at one time, with shared pages of files counted once
(``benchmarks/overhead/memory.py``). MB are 10^6 bytes. Limits: answering 65 MB and 0.8 s; adapting 1.10 × the bare
script's peak, and 80 MB after.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.on_device import homes
from benchmarks.on_device.cases import CASES, STEPS, SUPPORT
from benchmarks.on_device.homes import Place
from benchmarks.overhead.memory import Watch
from cloud_server.results.result import environment
from fleet_core.base.storage import write_json

AGENT = [sys.executable, "-c", "from edge_agent.commands.cli import main; main()"]  # as the command edge-agent does
BARE = [sys.executable, str(Path(__file__).with_name("bare.py"))]
BARS = {"predict_mb": 65.0, "first_answer_s": 0.8, "adapt_ratio": 1.10, "after_mb": 80.0}

LAUNCH = """
import json, os, sys, time
started = time.perf_counter()
quiet = [(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)] if sys.argv[1] == "quiet" else []
pid = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ, file_actions=quiet)
_, status, used = os.wait4(pid, 0)
seconds = time.perf_counter() - started
print(json.dumps({"status": status, "seconds": seconds, "cpu_s": used.ru_utime + used.ru_stime,
                  "peak": used.ru_maxrss * 1024}), file=sys.stderr)
"""
"""A launcher of little memory: a process inherits the high-water mark of its parent."""


def launched(command: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, float]:
    """seconds, cpu_s and peak (bytes) of a command, which must succeed. environ: in place of this process's."""
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCH, "quiet", *command]
    done = subprocess.run(launcher, capture_output=True, text=True, check=True, env=environ)
    *said, last = done.stderr.strip().splitlines()
    found: dict[str, float] = json.loads(last)
    if found.pop("status"):
        raise RuntimeError(f"{' '.join(command)} failed: {' '.join(said)}")
    return found


def together(command: Sequence[str]) -> int:
    """Bytes that all processes of a command held at one time, or a little more."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        watch = Watch([process.pid], every_s=0.005)
        while process.poll() is None:
            watch.look()
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed")
    return watch.bound


def commands(place: Place) -> dict[str, list[str]]:
    """The compared commands, by name."""
    agents = {f"predict {name}": [*AGENT, "predict", str(place.x), "--home", str(home)]
              for name, home in place.homes.items()}
    agents |= {f"adapt {name}": [*AGENT, "personalize", "--home", str(home)] for name, home in place.homes.items()}
    bare = {f"bare {name}": [*BARE, name.partition(" ")[0], *arguments] for name, arguments in place.bare.items()}
    return {**bare, **agents}


def living(home: Path, x: Path) -> dict[str, Any]:
    """Bytes of a long-running process."""
    command = [sys.executable, "-m", "benchmarks.on_device.live", str(home), str(x)]
    found: dict[str, Any] = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    assert not found.pop("torch")
    return found


def measured(place: Place, repeats: int) -> dict[str, Any]:
    """The figures of one model: median and each value."""
    runs: dict[str, list[dict[str, float]]] = {}
    alive: list[dict[str, Any]] = []
    whole: list[dict[str, Any]] = []
    for repeat in range(repeats + 1):
        for name, command in commands(place).items():
            cost = launched(command)
            if repeat:  # the first run fills the disk cache
                runs.setdefault(name, []).append(cost)
        if repeat:
            alive.append(living(place.homes["maml"], place.x))
            whole.append({"bytes": together(commands(place)["adapt maml"])})
    found = {name: _medians(each, list(each[0])) for name, each in runs.items()}
    living_on = _medians(alive, ["before", "peak", "after"])
    all_processes = _medians(whole, ["bytes"])["bytes"]
    return {**found, "living maml": living_on, "adapt maml together": all_processes,
            "personalization": alive[0]["personalization"]}


def _medians(runs: list[dict[str, Any]], keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    each = {key: [run[key] for run in runs] for key in keys}
    return {key: {"median": statistics.median(values), "each": values} for key, values in each.items()}


def against_limits(found: dict[str, Any]) -> dict[str, float]:
    """The figures that have a limit, named as in ``BARS``; the worse of the two ways to answer."""
    def median(name: str, key: str) -> float:
        return float(found[name][key]["median"])

    answering = [f"predict {name}" for name in homes.METHODS_OF]
    return {
        "predict_mb": max(median(name, "peak") for name in answering) / 1e6,
        "first_answer_s": max(median(name, "seconds") for name in answering),
        "first_answer_ratio": max(median(n, "seconds") / median(f"bare {n}", "seconds") for n in answering),
        "adapt_mb": median("adapt maml", "peak") / 1e6,
        "adapt_ratio": median("adapt maml", "peak") / median("bare adapt", "peak"),
        "adapt_together_mb": float(found["adapt maml together"]["median"]) / 1e6,
        "after_mb": median("living maml", "after") / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as room:
            found[name] = measured(homes.made(CASES[name], Path(room) / "made"), options.repeats)
        found[name]["judged"] = against_limits(found[name])
        print(name, json.dumps({key: round(value, 3) for key, value in found[name]["judged"].items()}), flush=True)
    write_json(options.out, {"support": SUPPORT, "steps": STEPS, "repeats": options.repeats, "bars": BARS,
                             "environment": environment(), "models": found})


if __name__ == "__main__":
    main()
