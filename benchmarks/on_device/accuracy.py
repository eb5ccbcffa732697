"""Accuracy of a device that never trained, with a few labels of its own, by personalizer; and the cost of
personalization.

    METAFLEET_DATA=CACHE python -m benchmarks.on_device.accuracy --out benchmarks/on_device/accuracy.json

CACHE: as ``benchmarks/papers/prepare.py`` fills it. Trains in the laboratory (resumable, under build/on-device),
evaluates in a process without torch, and measures each personalizer in separate processes. The file also says which
devices and settings were used. ``python -m benchmarks.on_device.tables accuracy.json`` writes the tables and the
figure. Sets that ``--sets`` does not name stay in the file as they are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.on_device import fleets
from benchmarks.on_device.fleets import PLANS, Plan
from benchmarks.on_device.ways import WAYS, drawn
from cloud_server.results.result import environment
from fleet_core.base import processes
from fleet_core.base.storage import write_json
from fleet_core.data import samples as stored
from fleet_core.model.layout import Layout

Say = Callable[[str], None]
FIGURES = ("accuracy", "recall", "macro_f1")
METHODS = tuple(dict.fromkeys(way.method for way in WAYS))
KINDS = tuple(dict.fromkeys(way.graph for way in WAYS))


def evaluate(plan: Plan, seed: int, draws: int, room: Path, say: Say) -> dict[str, Any]:
    """personalizer -> labels -> the figures of ``answers.py``, for one seed; trains first if needed."""
    folder = fleets.trained(plan, seed, METHODS, room, say)
    if not (folder / "division.json").exists():
        fleets.put_devices(fleets.divided(plan, seed)[0], folder)
    paths = fleets.graphs(Layout.from_json((folder / "layout.json").read_text()), KINDS, room)
    write_json(folder / "job.json", {"seed": seed, "labels": plan.labels, "draws": draws,
                                     "graphs": {kind: str(path) for kind, path in paths.items()}})
    subprocess.run([sys.executable, "-m", "benchmarks.on_device.answers", str(folder)], check=True)
    found: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return found


def costs(plan: Plan, seed: int, found: dict[str, Any], repeats: int, room: Path) -> dict[str, Any]:
    """personalizer -> labels -> medians over ``repeats`` processes, with the settings that this seed chose; for five
    labels per class."""
    folder = room / plan.folder / f"seed-{seed}"
    job = json.loads((folder / "job.json").read_text())
    first = json.loads((folder / "division.json").read_text())["unseen"][0]
    pool = stored.load(folder / "pool.npz").of_client(first)
    labels = 5 if 5 in plan.labels else plan.labels[0]
    rows = drawn(pool.y, labels, np.random.default_rng(0))
    np.savez(folder / "support.npz", x=pool.x[rows], y=pool.y[rows])
    costs: dict[str, Any] = {}
    for way in WAYS:
        arguments = [way.name, job["graphs"][way.graph], str(folder / f"{way.method}.safetensors"),
                     str(folder / "support.npz"), json.dumps(found[way.name][str(labels)]["setting"])]
        command = [sys.executable, "-m", "benchmarks.on_device.measure", *arguments]
        runs = [json.loads(subprocess.check_output(command)) for _ in range(repeats)]
        assert not any(run["torch"] for run in runs)
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "torch"}
        costs[way.name] = {str(labels): medians}
    return costs


def table(plan: Plan, by_seed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """personalizer -> labels -> figure -> mean and sample standard deviation over seeds (None for one seed)."""
    return {
        way.name: {
            str(labels): {figure: spread([one[way.name][str(labels)][figure] for one in by_seed])
                          for figure in FIGURES}
            for labels in plan.labels
        }
        for way in WAYS
    }


def spread(values: list[float]) -> dict[str, Any]:
    """Mean, sample standard deviation (None for one seed) and the value of each seed."""
    return {"mean": statistics.mean(values), "std": statistics.stdev(values) if len(values) > 1 else None,
            "seeds": values}


def beside(path: Path, part: str, made: dict[str, Any], alike: dict[str, Any]) -> dict[str, Any]:
    """The file's content: ``alike``, and in ``part`` the new results and the other results of the file at ``path``.
    Raises SystemExit if that file has another ``alike``, because it holds for all results."""
    before = json.loads(path.read_text()) if path.exists() else {}
    stays = {name: one for name, one in before.get(part, {}).items() if name not in made}
    wrong = [key for key, value in json.loads(json.dumps(alike)).items() if before.get(key) != value]
    if stays and wrong:
        raise SystemExit(f"{path} has {', '.join(stays)} with another {', '.join(wrong)}; make all again, or write to "
                         "another file")
    return {**alike, part: {**stays, **made}}


def outcome(plan: Plan, seeds: Sequence[int], draws: int, repeats: int, room: Path, say: Say) -> dict[str, Any]:
    """The figures of one data set."""
    by_seed = [evaluate(plan, seed, draws, room, say) for seed in seeds]
    model = {"name": plan.model, "options": dict(plan.options)}
    training = {m: {"rounds": plan.training[m].rounds, "hyper": dict(plan.training[m].hyper)} for m in METHODS}
    return {
        "model": model, "validation": plan.validation, "unseen": plan.unseen, "labels": plan.labels,
        "training": training, "table": table(plan, by_seed),
        "costs": costs(plan, seeds[0], by_seed[0], repeats, room),
        "seeds": {str(seed): found for seed, found in zip(seeds, by_seed, strict=True)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--draws", type=int, default=2, help="support sets per device")
    parser.add_argument("--repeats", type=int, default=3, help="processes that time and memory are measured on")
    parser.add_argument("--room", type=Path, default=fleets.ROOM)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    started = time.monotonic()
    alike = {"draws": options.draws, "repeats": options.repeats, "environment": environment()}
    beside(options.out, "sets", dict.fromkeys(options.sets), alike)  # fails before anything is computed
    sets = {name: outcome(PLANS[name], options.seeds, options.draws, options.repeats, options.room, processes.say)
            for name in options.sets}
    write_json(options.out, beside(options.out, "sets", sets, alike))
    processes.say(f"{options.out}: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
