"""Bytes until an accuracy: methods and codecs on five tasks, three seeds each.

    METAFLEET_DATA=CACHE python -m benchmarks.cost.to_target choose|run|front|page --runs FOLDER [--only TASK ...]
        [--minutes M] [--jobs N]

choose: hyper-parameters of each method, then the codec of PFLDyn-Proto, inside the training samples of each task, with
a seed of their own; the result is chosen.json. run: the rows of the table. front: every method with every codec of
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

from cloud_server.laboratory.run import experiment as experiments
from cloud_server.laboratory.run.engine import Stopped
from cloud_server.laboratory.run.experiment import Experiment, MethodSection
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
"""UP/DOWN, or one for both; those that are tried for ``best``."""
FRONT = ("fp32", "int8", "int4", "ternary", "topk-10", "topk-1")
SEEDS, CHOOSING_SEED = (0, 1, 2), 100
WITHIN = 0.005
"""Half a point: how much lower than fp32's the figure at the end may be."""


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
    """The best hyper-parameters by label, by the mean figure over the evaluated rounds, then the codec with the fewest
    bytes to what PFLDyn-Proto reaches in fp32, among those that end within half a point of it."""
    asked = task(name)
    inside = replace(asked, seeds=(CHOOSING_SEED,), evaluation=replace(asked.evaluation, within_training=True))
    candidates = experiments.runs(inside)
    folders = simulate(with_codec(inside, "fp32"), runs / name / "hyper", how, stopped=stopped)
    tried: dict[str, list[dict[str, Any]]] = {}
    for run, folder in zip(candidates, folders, strict=True):
        found = curve(name, folder)
        tried.setdefault(run.label.partition(",")[0], []).append(
            {"method": run.method.name, "hyper": schema.plain(run.hyper), "figure": round(mean(found.figure), 4)})
    best = {label: max(several, key=lambda one: float(one["figure"])) for label, several in tried.items()}
    section = of_label(PFLDYN, best)
    curves = {}
    for codec in ("fp32", *CODECS):
        out = runs / name / "codecs" / codec.replace("/", "-")
        try:
            [folder] = simulate(with_codec(replace(inside, method=(section,)), codec), out, how, stopped=stopped)
        except RoundError as error:
            processes.say(f"{name}: {codec} ended with an error: {error}")
            continue
        curves[codec] = curve(name, folder)
    plain = curves.pop("fp32")
    target = max(plain.figure) - WITHIN
    fit = {codec: moved for codec, one in curves.items()
           if end(one) >= end(plain) - WITHIN and (moved := bytes_to(one, target)) is not None}
    chosen = json.loads(CHOSEN.read_text()) if CHOSEN.exists() else {}
    write_json(CHOSEN, {**chosen, name: {
        "rounds": inside.budget.rounds, "seed": CHOOSING_SEED, "target": round(target, 4), "fp32": round(end(plain), 4),
        "codec": min(fit, key=lambda codec: fit[codec]) if fit else "int8",
        "codecs": [{"codec": codec, "end": round(end(one), 4), "bytes": bytes_to(one, target)}
                   for codec, one in curves.items()],
        "methods": best, "tried": tried}})


def end(one: Curve) -> float:
    """The figure at the end: the mean of the last three evaluations, which differ less than one alone."""
    return mean(one.figure[-3:])


def bytes_to(one: Curve, target: float) -> int | None:
    k = one.first(target)
    return None if k is None else one.total(k)


def of_label(label: str, best: Mapping[str, Mapping[str, Any]]) -> MethodSection:
    return MethodSection(best[label]["method"], label=label, hyper=best[label]["hyper"])


def with_codec(asked: Experiment, codec: str) -> Experiment:
    up, _, down = codec.partition("/")
    return replace(asked, codec_up=up, codec_down=down or up)


# Running --------------------------------------------------------------------------------------------------------------


def run(
    name: str, rows: Sequence[tuple[str, str]], runs: Path, how: Options, stopped: Callable[[], bool]
) -> None:
    """``rows`` of (label, codec) with every seed."""
    for label, codec in rows:
        folder, asked = row_of(name, label, codec, runs)
        try:
            simulate(asked, folder, how, stopped=stopped)
        except RoundError as error:
            processes.say(f"{name}: {label} with {codec}: {error}")
        processes.say(f"{name}: {label} with {codec} has ended")


def row_of(name: str, label: str, codec: str, runs: Path) -> tuple[Path, Experiment]:
    """(the folder of its runs, the experiment). ``best`` is the codec that was chosen."""
    chosen = json.loads(CHOSEN.read_text())[name]
    codec = chosen["codec"] if codec == BEST else codec
    asked = replace(with_codec(task(name), codec), seeds=SEEDS, method=(of_label(label, chosen["methods"]),))
    return runs / name / "rows" / f"{label} {codec.replace('/', '-')}", asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("choose", "run", "front", "page"))
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), metavar="TASK")
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
                run(name, ROWS, options.runs, how, stopped)
            elif options.what == "front":
                labels = json.loads(CHOSEN.read_text())[name]["methods"]
                run(name, [(label, codec) for codec in FRONT for label in labels], options.runs, how, stopped)
        if options.what == "page":
            from benchmarks.cost import to_target_page

            to_target_page.write(options.runs)
    except Stopped:
        processes.say("the time is up; the same command goes on")
    except FleetError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
