"""Bytes until an accuracy: methods and codecs on five tasks, three seeds each.

    METAFLEET_DATA=CACHE python -m benchmarks.cost.to_target choose|run|front|page --runs FOLDER [--only TASK ...]
        [--seeds N] [--minutes M] [--jobs N]

choose: hyper-parameters of each method, then the codec of PFLDyn-Proto, inside the training samples of each task, as
``CHOOSING`` says; the result is chosen.json. run: the rows of the table. front: every method with every codec of
``FRONT``. page: to_target.md and the pictures from the runs that have ended. Every command resumes and ends after the
rounds in progress when the time is up; tasks/TASK.toml are the experiments.

The figure of a task is that of the devices that ``FIGURES`` names. Its targets follow from rules that were fixed before
the runs: the highest whole points that Per-FedAvg, and PFLDyn-Proto, in fp32 reach with every seed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan.experiment import Experiment, MethodSection
from cloud_server.laboratory.run.engine import Stopped
from cloud_server.laboratory.run.run_folder import Store
from cloud_server.laboratory.run.simulate import Options, simulate
from fleet_core.base import processes, schema
from fleet_core.base.errors import FleetError, RoundError
from fleet_core.base.storage import write_json

HERE = Path(__file__).parent
CHOSEN = HERE / "chosen.json"
PFLDYN, PER_FEDAVG, FEDAVG, BEST = "pfldyn-proto", "per-fedavg", "fedavg", "best"
FIGURES = {
    "heartbeat-22": ("new", "macro_f1"), "har": ("new", "macro_f1"), "omniglot": ("trained", "accuracy"),
    "mnist": ("new", "accuracy"), "cifar-10": ("trained", "accuracy"),
}
"""Task -> the devices that are evaluated, new ones or those that train, and by what."""
ROWS = ((PER_FEDAVG, "fp32"), (FEDAVG, "fp32"), (PFLDYN, "fp32"), (PFLDYN, "int8"), (PFLDYN, BEST))
CODECS = ("int8", "int4", "ternary", "topk-10/int4", "topk-10", "topk-1/topk-10", "topk-1", "auto")
"""The codecs tried for ``best``: UP/DOWN, or one for both."""
FRONT = ("fp32", "int8", "int4", "ternary", "topk-10", "topk-1")
SEEDS = (0, 1, 2)
PENALTIES = (1.0, 4.0)
"""Multiples of the penalty that was chosen with fp32: lossy codecs may need a larger one (docs/codecs.md)."""
LAST = 5
WITHIN = 0.005
"""Half a point: how much lower than fp32's the figure at the end may be."""


@dataclass(frozen=True)
class Choosing:
    """How a task's settings are chosen. rounds: 0 for those of the task."""

    seeds: tuple[int, ...] = (100, 101)
    rounds: int = 0
    codecs: tuple[str, ...] = CODECS


CHOOSING = {
    "omniglot": Choosing((100,), 20, ("ternary", "topk-10", "topk-1/topk-10")),
    "mnist": Choosing((100,), 40, ("ternary", "topk-10", "topk-1/topk-10")),
    "cifar-10": Choosing((100,), 10, ("int8", "int4", "ternary", "topk-10", "topk-10-4bit", "topk-1/topk-10")),
}
"""Task -> a shorter choice than the default's: models for images take longer."""


@dataclass(frozen=True)
class Curve:
    """A run by evaluated rounds: the figure, and what was spent up to there by all devices together. Payload bytes of
    training alone; flops are None where they are not counted."""

    seed: int
    figure: tuple[float, ...]
    rounds: tuple[int, ...]
    up: tuple[int, ...]
    down: tuple[int, ...]
    flops: tuple[float | None, ...]

    def first(self, target: float) -> int | None:
        """Index of the first evaluated round at ``target``."""
        return next((k for k, value in enumerate(self.figure) if value >= target), None)

    def total(self, k: int) -> int:
        return self.up[k] + self.down[k]


def task(name: str) -> Experiment:
    return experiments.load(HERE / "tasks" / f"{name}.toml")


def of_figure(name: str, row: Mapping[str, Any]) -> float:
    devices, figure = FIGURES[name]
    found = next(iter(row["new_devices"].values())) if devices == "new" else row
    return float(found["macro_f1"] if figure == "macro_f1" else found["accuracy"]["mean"])


def curve(name: str, folder: Path) -> Curve:
    result = Store(folder).result()
    points, up, down, flops = [], 0, 0, 0.0
    for row in result["rounds"]:
        up, down = up + row["payload_bytes"]["up"], down + row["payload_bytes"]["down"]
        flops += row.get("flops", float("nan"))
        if "accuracy" in row:
            points.append((of_figure(name, row), row["round"], up, down, flops if flops == flops else None))
    return Curve(result["seed"], *(tuple(column) for column in zip(*points, strict=True)))


# Choosing -------------------------------------------------------------------------------------------------------------


def choose(name: str, runs: Path, how: Options, stopped: Callable[[], bool]) -> None:
    """Hyper-parameters by label: those with the best mean figure over the evaluated rounds. Then PFLDyn-Proto's codec
    with its penalty: that with the fewest bytes in the whole run among those that end within half a point of fp32."""
    asked, by = task(name), CHOOSING.get(name, Choosing())
    inside = replace(asked, seeds=by.seeds, evaluation=replace(asked.evaluation, within_training=True),
                     budget=replace(asked.budget, rounds=by.rounds or asked.budget.rounds))
    hyper = tried(name, with_codec(inside, "fp32"), runs / name / "hyper", how, stopped)
    labels = dict.fromkeys(one["label"].partition(",")[0] for one in hyper)
    methods = {label: max((one for one in hyper if one["label"].partition(",")[0] == label),
                          key=lambda one: float(one["mean"])) for label in labels}
    best = of_label(PFLDYN, methods)
    several = replace(inside, method=tuple(
        replace(best, label=f"{PFLDYN}-{factor:g}", hyper={**best.hyper, "penalty": factor * best.hyper["penalty"]})
        for factor in PENALTIES))
    codecs = []
    for codec in ("fp32", *by.codecs):
        out = runs / name / "codecs" / codec.replace("/", "-")
        codecs += [{"codec": codec, **one} for one in tried(name, with_codec(several, codec), out, how, stopped)]
    plain = max(float(one["end"]) for one in codecs if one["codec"] == "fp32")
    fit = [one for one in codecs if one["end"] >= plain - WITHIN]
    chosen = json.loads(CHOSEN.read_text()) if CHOSEN.exists() else {}
    methods[BEST] = min(fit, key=lambda one: int(one["bytes"]))
    write_json(CHOSEN, {**chosen, name: {
        "rounds": inside.budget.rounds, "seeds": by.seeds, "methods": methods, "hyper": hyper, "codecs": codecs}})


def tried(
    name: str, asked: Experiment, out: Path, how: Options, stopped: Callable[[], bool]
) -> list[dict[str, Any]]:
    """A row per label, of the runs that did not diverge: figures over seeds, and bytes of all devices in the whole
    run."""
    try:
        simulate(asked, out, how, stopped=stopped)
    except RoundError as error:
        processes.say(f"{name}: {error}")
    found: dict[str, list[tuple[Any, Curve]]] = {}
    for run in experiments.runs(asked):
        if Store(out / run.name).done:
            found.setdefault(run.label, []).append((run, curve(name, out / run.name)))
    return [{
        "label": label, "method": several[0][0].method.name, "hyper": schema.plain(several[0][0].hyper),
        "mean": round(mean(mean(one.figure) for _, one in several), 4),
        "end": round(mean(end(one) for _, one in several), 4),
        "bytes": round(mean(one.total(-1) for _, one in several)),
    } for label, several in found.items() if len(several) == len(asked.seeds)]


def end(one: Curve) -> float:
    """The figure at the end: the mean of the last evaluations, which varies less than one alone."""
    return mean(one.figure[-LAST:])


def of_label(label: str, best: Mapping[str, Mapping[str, Any]]) -> MethodSection:
    return MethodSection(best[label]["method"], label=label, hyper=best[label]["hyper"])


def with_codec(asked: Experiment, codec: str) -> Experiment:
    up, _, down = codec.partition("/")
    return replace(asked, codec_up=up, codec_down=down or up)


# Running --------------------------------------------------------------------------------------------------------------


def run(
    name: str, rows: Sequence[tuple[str, str]], runs: Path, how: Options, stopped: Callable[[], bool],
    seeds: Sequence[int] = SEEDS,
) -> None:
    """``rows`` of (label, codec) with every seed."""
    for label, codec in rows:
        folder, asked = row_of(name, label, codec, runs, seeds)
        try:
            simulate(asked, folder, how, stopped=stopped)
        except RoundError as error:
            processes.say(f"{name}: {label} with {codec}: {error}")
        processes.say(f"{name}: {label} with {codec} has ended")


def row_of(name: str, label: str, codec: str, runs: Path, seeds: Sequence[int]) -> tuple[Path, Experiment]:
    """(the folder of its runs, the experiment). ``best``: the codec and the penalty that were chosen."""
    methods = json.loads(CHOSEN.read_text())[name]["methods"]
    method = of_label(label, methods | ({label: methods[BEST]} if codec == BEST else {}))
    asked = with_codec(task(name), methods[BEST]["codec"] if codec == BEST else codec)
    folder = runs / name / "rows" / f"{label} {codec.replace('/', '-')}"
    return folder, replace(asked, seeds=tuple(seeds), method=(method,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("choose", "run", "front", "page"))
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), metavar="TASK")
    parser.add_argument("--seeds", type=int, choices=range(1, len(SEEDS) + 1), default=len(SEEDS), metavar="N",
                        help="the first N of run and front")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    ends, how = time.monotonic() + 60 * options.minutes, Options(jobs=options.jobs, device="cpu")

    def stopped() -> bool:
        return time.monotonic() > ends

    try:
        for name in options.only:
            if options.what == "choose":
                choose(name, options.runs, how, stopped)
            elif options.what == "run":
                run(name, ROWS, options.runs, how, stopped, SEEDS[:options.seeds])
            elif options.what == "front":
                labels = (PER_FEDAVG, FEDAVG, PFLDYN)
                run(name, [(label, codec) for codec in FRONT for label in labels], options.runs, how, stopped,
                    SEEDS[:options.seeds])
        if options.what == "page":
            from benchmarks.cost import to_target_page

            to_target_page.write(options.runs)
    except Stopped:
        processes.say("the time is up; the same command goes on")
    except FleetError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
