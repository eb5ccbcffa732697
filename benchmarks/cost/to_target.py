"""Bytes until a target for methods with codecs, on several sets.

    METAFLEET_DATA=CACHE python -m benchmarks.cost.to_target [--only TASK …] [--minutes M] [--out FOLDER] [--jobs N]

``tasks/TASK.toml`` is an experiment with its methods. The target is the score of Per-FedAvg's last evaluated round in
fp32. First the choice, on one seed and ``evaluation.within_training``: of the codecs for PFLDyn-Proto, up and down, the
one with the fewest bytes to that target whose last score is within ``WITHIN`` of fp32's. Then all arms on the test
samples with all seeds, with the same target measured there. The same command resumes. ``to_target.json`` has every
figure, ``to_target.md`` the tables, ``front.png`` the accuracy against bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks import markdown
from cloud_server.laboratory.compare import finished_runs
from cloud_server.laboratory.compare.finished_runs import DEVICES, FinishedRun, Point
from cloud_server.laboratory.run import experiment as experiments
from cloud_server.laboratory.run.engine import Stopped
from cloud_server.laboratory.run.experiment import Experiment
from cloud_server.laboratory.run.run_folder import Store
from cloud_server.laboratory.run.simulate import Options, simulate
from cloud_server.reports.formatting import bytes_text
from fleet_core.base import storage
from fleet_core.base.errors import FleetError, RoundError

HERE = Path(__file__).parent
TASKS = tuple(sorted(path.stem for path in (HERE / "tasks").glob("*.toml")))
OUT = Path("build/cost")
BASE, EXACT, BEST = "per-fedavg-fo", "fp32", "pfldyn-proto"
FIXED = ((BASE, EXACT, EXACT), ("fedavg", EXACT, EXACT), (BEST, EXACT, EXACT), (BEST, "int8", "int8"))
CANDIDATES = (
    ("int4", "int4"), ("topk-10", "int4"), ("topk-10", "topk-10"), ("topk-1", "topk-10"), ("topk-1", "topk-1"),
    ("auto", "auto"),
)
"""(up, down) codecs that are tried for PFLDyn-Proto."""
WITHIN = 0.005
NEW = {"heartbeat"}
"""Tasks whose score is the macro-F1 of new devices; that of the others is the accuracy of those that train."""

Arm = tuple[str, str, str]
"""(method, codec up, codec down)."""


def name_of(arm: Arm) -> str:
    method, up, down = arm
    return f"{method} {up}" if up == down else f"{method} {up}/{down}"


def experiment(task: str, arm: Arm, *, choosing: bool) -> Experiment:
    """One arm's runs: on the test samples, or, choosing, one seed within what the devices train on."""
    asked = experiments.load(HERE / "tasks" / f"{task}.toml")
    method, up, down = arm
    found = replace(asked, codec_up=up, codec_down=down, method=tuple(m for m in asked.method if m.name == method))
    if choosing:
        found = replace(found, seeds=(0,), evaluation=replace(asked.evaluation, within_training=True))
    return found


def score(task: str, point: Point) -> float:
    if task not in NEW:
        return point.scores[DEVICES]["mean"]
    return next(one["macro_f1"] for kind, one in point.scores.items() if kind != DEVICES)


def cost(task: str, run: FinishedRun, target: float) -> float | None:
    """Payload bytes until the first evaluated round that reaches the target; None if none does."""
    return next((p.spent["payload_bytes"] for p in run.points if score(task, p) >= target), None)


class Runs:
    """Computes arms within the time; a run that diverges counts as one that ends with 0."""

    def __init__(self, out: Path, jobs: int, until: float):
        self._out, self._options, self._until = out, Options("local", jobs, "cpu"), until

    def of(self, task: str, arm: Arm, *, choosing: bool = False) -> list[FinishedRun]:
        """The runs that ended, by seed. Raises Stopped when the time is up."""
        asked = experiment(task, arm, choosing=choosing)
        folder = self._out / ("chosen" if choosing else "runs") / task / "-".join(arm)
        begun = [folder / run.name for run in experiments.runs(asked)]
        if not all(Store(each).done for each in begun):
            try:
                simulate(asked, folder, self._options, say=say, stopped=lambda: time.monotonic() > self._until)
            except RoundError as error:
                say(f"{task} {name_of(arm)}: {error}")
        return [finished_runs.read(each / "result.json") for each in begun if Store(each).done]


def chosen(task: str, runs: Runs) -> dict[str, Any]:
    """The codecs for PFLDyn-Proto by what the training samples say, and all that was tried."""
    (base,), (exact,) = (runs.of(task, (m, EXACT, EXACT), choosing=True) for m in (BASE, BEST))
    target, wanted = score(task, base.points[-1]), score(task, exact.points[-1]) - WITHIN
    tried: list[dict[str, Any]] = []
    for up, down in CANDIDATES:
        for run in runs.of(task, (BEST, up, down), choosing=True):
            last, spent = score(task, run.points[-1]), cost(task, run, target)
            tried.append({"up": up, "down": down, "score": last, "bytes": spent})
    good = [one for one in tried if one["bytes"] is not None and one["score"] >= wanted]
    best = min(good, key=lambda one: one["bytes"]) if good else {"up": "int8", "down": "int8"}
    return {"target": target, "exact": wanted + WITHIN, "tried": tried, "up": best["up"], "down": best["down"]}


def measured(task: str, choice: Mapping[str, Any], runs: Runs) -> dict[str, Any]:
    """The arms' bytes to the target and last scores on the test samples."""
    base = runs.of(task, FIXED[0])
    target = fmean(score(task, run.points[-1]) for run in base)
    arms: dict[str, Any] = {}
    for arm in dict.fromkeys((*FIXED, (BEST, choice["up"], choice["down"]))):
        found = runs.of(task, arm)
        arms[name_of(arm)] = {
            "scores": [score(task, run.points[-1]) for run in found],
            "bytes": [cost(task, run, target) for run in found],
            "spent": [run.spent["payload_bytes"] for run in found], "curve": curve(task, found),
        }
    return {"target": target, "choice": dict(choice), "arms": arms}


def curve(task: str, runs: Sequence[FinishedRun]) -> list[tuple[int, float, float]]:
    """(round, bytes, score), means over seeds, of the rounds that all seeds evaluated."""
    return [
        (points[0].round, fmean(p.spent["payload_bytes"] for p in points), fmean(score(task, p) for p in points))
        for points in zip(*(run.points for run in runs), strict=False)
    ]


# What people look at --------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    base = _mean(found["arms"][name_of(FIXED[0])]["bytes"])
    rows = [
        (f"`{name}`", _amount(arm["bytes"]), _ratio(base, _mean(arm["bytes"])), _spread(arm["scores"]),
         bytes_text(fmean(arm["spent"])), str(len(arm["scores"])))
        for name, arm in found["arms"].items() if arm["scores"]
    ]
    heads = ("method and codecs", "to the target", "times fewer", "last score", "whole run", "seeds")
    return markdown.table(heads, rows)


def _mean(amounts: Sequence[float | None]) -> float | None:
    """None unless every seed got there."""
    known = [one for one in amounts if one is not None]
    return fmean(known) if known and len(known) == len(amounts) else None


def _amount(amounts: Sequence[float | None]) -> str:
    mean = _mean(amounts)
    return bytes_text(mean) if mean is not None else f"{sum(a is not None for a in amounts)} of {len(amounts)} seeds"


def _ratio(base: float | None, mean: float | None) -> str:
    return "-" if base is None or mean is None else f"{base / mean:.1f}"


def _spread(scores: Sequence[float]) -> str:
    return f"{fmean(scores):.3f}" + (f" ± {stdev(scores):.3f}" if len(scores) > 1 else "")


def choices(found: Mapping[str, Any]) -> str:
    rows = [
        (task, f"`{one['up']}` / `{one['down']}`", "-" if one["bytes"] is None else bytes_text(one["bytes"]),
         f"{one['score']:.3f}", f"{each['choice']['exact']:.3f}")
        for task, each in found.items() for one in each["choice"]["tried"]
    ]
    return markdown.table(("set", "up / down", "to the target", "last score", "with fp32"), rows)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Score against bytes, a panel for each task."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(5 * len(found), 4.2), squeeze=False, layout="constrained")
    for axis, (task, each) in zip(axes[0], found.items(), strict=True):
        for name, arm in each["arms"].items():
            if arm["curve"]:
                _, spent, scores = zip(*arm["curve"], strict=True)
                axis.plot(spent, scores, marker=".", label=name)
        axis.axhline(each["target"], color="gray", linewidth=0.8, linestyle="--")
        axis.set(title=task, xscale="log", xlabel="payload bytes of all devices",
                 ylabel="macro-F1 of new devices" if task in NEW else "accuracy")
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def write(found: Mapping[str, Any], folder: Path = HERE) -> None:
    storage.write_json(folder / "to_target.json", found)
    page = folder / "to_target.md"
    filled = {f"target-{task}": table(found[task]) if task in found else "" for task in TASKS}
    filled["choices"] = choices(found)
    page.write_text(markdown.filled(page.read_text(encoding="utf-8"), filled), encoding="utf-8")
    draw(found, folder / "front.png")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def compute(tasks: Iterable[str], runs: Runs, done: Callable[[str, dict[str, Any]], None]) -> None:
    for task in tasks:
        done(task, measured(task, chosen(task, runs), runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--jobs", type=int, default=0)
    asked = parser.parse_args()
    path = HERE / "to_target.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def done(task: str, figures: dict[str, Any]) -> None:
        found[task] = figures
        write(found)
        say(table(figures))

    try:
        compute(asked.only, Runs(asked.out, asked.jobs, time.monotonic() + 60 * asked.minutes), done)
    except Stopped:
        say("the time is up; the same command resumes")
        sys.exit(1)
    except FleetError as error:
        say(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
