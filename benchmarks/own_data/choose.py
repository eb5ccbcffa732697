"""Chooses the model that ``metafleet init`` takes by the shape of the samples; what is judged is not looked at.

    METAFLEET_DATA=CACHE nice python -m benchmarks.own_data.choose [--part series images rows] [--minutes M]
        [--out build/own-data] [--jobs 2]

Validation: every candidate on every set with the default method, inside what the devices train on, whose time is cut
once more and of which a quarter stands for new devices (``judge.within_training``). Test: the chosen model beside the
former default on what was held out, by class means and by fine-tuning. The figure is that of ``metafleet advise``:
macro-F1 of the devices that train and of the new ones, each device counting the same, the mean over seeds.

Every run is a folder of ``metafleet simulate`` below OUT; the same command goes on where it was, and writes
``result.json`` and the tables of README.md. Without CACHE the generated sets and the heart beats are run alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.own_data import series
from benchmarks.own_data.baseline import nearest_mean, rows_of
from cloud_server.laboratory import experiment as experiments
from cloud_server.laboratory import trials, workload
from cloud_server.laboratory.advice import score
from cloud_server.laboratory.engine import Stopped
from cloud_server.laboratory.recordings import recordings
from cloud_server.laboratory.simulate import Options, simulate
from fleet_core.data.samples import Samples, save
from fleet_core.data.sets import named
from fleet_core.data.sets.registry import entry
from fleet_core.storage import write_json

HERE = Path(__file__).parent
OUT, RESULT = Path("build/own-data"), HERE / "result.json"
DIGITS = 4
STEPS = {"local_steps": 10}
METHODS = {
    "pfldyn-proto": {"support_batch": 16, "query_batch": 16, **STEPS},
    "fedavg-meta": {"batch": 32, "finetune_steps": 20, **STEPS},
    "per-fedavg-fo": {"support_batch": 16, "query_batch": 16, **STEPS},
}
DEFAULT = "pfldyn-proto"
ROUNDS, SEEDS = 15, (0, 1)
NARROW, WIDE = [32] * 4, [64] * 4
OWN = "benchmarks.own_data.candidates:"


@dataclass(frozen=True)
class Candidate:
    """method: of the validation. least: pixels that the model needs on each side."""

    model: str
    options: Mapping[str, Any]
    method: str = DEFAULT
    least: int = 1


@dataclass(frozen=True)
class Part:
    """sets: names of ``_section``. candidates: by label; the first is the former default. chosen: that of the product.
    """

    sets: tuple[str, ...]
    candidates: Mapping[str, Candidate]
    chosen: str


def _of(model: str, **options: Any) -> Candidate:
    return Candidate(model, options)


PARTS = {
    "series": Part(
        (*series.names(), "heartbeat", "har", "spoken-series"),
        {
            "cnn1d": _of("cnn1d"),
            "mean": _of(OWN + "Mean", channels=NARROW),
            "mean, max": _of(OWN + "MeanMax", channels=NARROW),
            "mean, deviation": _of(OWN + "MeanStd", channels=NARROW),
            "pyramid": _of(OWN + "Pyramid", channels=NARROW),
            "place": _of(OWN + "Place", channels=NARROW),
            "depths": _of("ds-cnn", channels=NARROW),
            "depths, 64 wide": _of("ds-cnn", channels=WIDE),
        },
        "depths",
    ),
    "images": Part(
        ("mnist", "mnist-14", "spoken-image"),
        {
            "lenet": Candidate("lenet", {}, least=16),
            "lenet-lim": _of("lenet-lim"),
            "mean, max": _of(OWN + "MeanMax", channels=NARROW),
            "depths": _of("ds-cnn", channels=NARROW),
            "depths, 64 wide": _of("ds-cnn", channels=WIDE),
        },
        "depths",
    ),
    "rows": Part(
        ("har-rows", "heartbeat-rows", "vibration-free-rows", "event-free-rows"),
        {
            "mlp": _of("mlp"),
            "mlp, 64-64": _of("mlp", hidden=[64, 64]),
            "mlp, fine-tuned": Candidate("mlp", {}, "fedavg-meta"),
            "logistic, fine-tuned": Candidate("logistic", {}, "fedavg-meta"),
        },
        "mlp",
    ),
}
"""What is compared, by the shape of the samples."""


def available(part: Part) -> list[str]:
    """The part's sets that are here."""
    needs = {"har": "har", "har-rows": "har", "spoken-series": "spoken-digits", "spoken-image": "spoken-digits",
             "mnist": "mnist", "mnist-14": "mnist"}
    return [name for name in part.sets if name not in needs or named.is_here(entry(needs[name]))]


def asked(
    name: str, candidate: Candidate, method: str, seed: int, out: Path, *, within: bool
) -> dict[str, Any]:
    """The experiment of one run."""
    data, natural, judge = _section(name, out / "data")
    return {
        "seeds": [seed], "data": data, "model": {"name": candidate.model, "options": dict(candidate.options)},
        "partition": {"options": {"split": "time", "train_fraction": 0.6, **natural}},
        "budget": {"rounds": ROUNDS}, "method": [{"name": method, "hyper": METHODS[method]}],
        "judge": {"every": 0, "within_training": within, "new_devices": 0.25, "support": [0.33],
                  "support_split": "time", **judge},
    }


def _section(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(data, options of the partition, judge) of a set."""
    if name in ("heartbeat", "har"):
        return {"set": name}, {"max_clients": 10}, {}
    if name == "mnist":
        return {"set": name}, {"max_clients": 10, "min_samples": 60}, {}
    if name == "spoken-image":
        return {"set": "spoken-digits"}, {}, {"new_devices": 0.0}
    path = _file(name, folder)
    return dict(_recorded(str(path))), {"max_clients": 10}, {"new_devices": 0.0} if name == "spoken-series" else {}


@cache
def _recorded(path: str) -> Mapping[str, Any]:
    return recordings(path).section


def _file(name: str, folder: Path) -> Path:
    """The set as a file of one's own."""
    if name in series.names():
        return series.write(folder, name)
    path = folder / f"{name}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save(path, _derived(name, folder))
    return path


def _derived(name: str, folder: Path) -> Samples:
    kind, _, form = name.rpartition("-")
    if name == "spoken-series":
        samples = named.load_set("spoken-digits").train
        return _with(samples, samples.x[:, 0])
    if name == "mnist-14":
        samples = named.load_set("mnist").train.take(np.arange(6000))
        halved = samples.x.reshape(-1, 1, 14, 2, 14, 2).mean((3, 5))
        return _with(samples, halved.astype(np.uint8))
    assert form == "rows"
    if kind in ("har", "heartbeat"):
        samples = named.load_set(kind).train
    else:
        made = series.generated(kind)
        samples = Samples(made["x"], np.unique(made["y"], return_inverse=True)[1], made["client"], made["time"],
                          tuple(np.unique(made["y"])))
    return _with(samples, rows_of(samples.x))


def _with(samples: Samples, x: NDArray[Any]) -> Samples:
    return Samples(x, samples.y, samples.client, samples.time, samples.classes)


# Runs -----------------------------------------------------------------------------------------------------------------

Job = tuple[str, str, str, int, bool]
"""(set, candidate's label, method, seed, within training)."""


def validation(part: Part) -> Iterator[Job]:
    for seed in SEEDS:
        for name in available(part):
            for label, candidate in part.candidates.items():
                if candidate.least == 1 or name != "mnist-14":
                    yield name, label, candidate.method, seed, True


def test(part: Part) -> Iterator[Job]:
    former = next(iter(part.candidates))
    for name in available(part):
        for method in METHODS:
            for label in dict.fromkeys((former, part.chosen)):
                for seed in SEEDS if method == DEFAULT else SEEDS[:1]:
                    yield name, label, method, seed, False


def run(job: Job, part: str, out: Path, ends: float) -> tuple[Job, dict[str, Any] | None]:
    """(job, {score, parameters, bytes, new}); None where the time is over."""
    name, label, method, seed, within = job
    folder = out / ("validation" if within else "test") / name / label.replace(", ", "+").replace(" ", "-")
    experiment = experiments.read(asked(name, PARTS[part].candidates[label], method, seed, out, within=within))
    try:
        (made,) = simulate(experiment, folder / f"{method}-{seed}", Options(jobs=1, device="cpu"),
                           stopped=lambda: time.time() > ends)
    except Stopped:
        return job, None
    trial = trials.read(made / "result.json")
    layout = workload.layout_of(experiment, workload.build(experiment))
    return job, {"score": round(score(trial), DIGITS), "parameters": layout.parameters(("body", "head")),
                 "payload": trial.spent["payload_bytes"], "seconds": round(trial.seconds, 1)}


def baseline(name: str, part: str, out: Path, *, within: bool) -> float:
    """Nearest class mean on spectrum and statistics, of the same devices; no fleet."""
    first = next(iter(PARTS[part].candidates.values()))
    experiment = experiments.read(asked(name, first, DEFAULT, 0, out, within=within))
    return round(nearest_mean(workload.build(experiment), experiment.judge.support[0]), DIGITS)


def _job(arguments: tuple[Job, str, Path, float]) -> tuple[Job, dict[str, Any] | None]:
    import torch

    torch.set_num_threads(1)
    return run(*arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--sets", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--only", choices=("validation", "test"))
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    ends, over = time.time() + 60 * options.minutes, False
    found: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for part_name in options.part:
        part = PARTS[part_name]
        jobs = [*validation(part), *test(part)]
        jobs = [j for j in jobs if (not options.sets or j[0] in options.sets)
                and (options.only is None or j[4] == (options.only == "validation"))
                and (not options.seeds or j[3] in options.seeds)]
        for name in {j[0]: None for j in jobs}:
            _section(name, options.out / "data")
        with ProcessPoolExecutor(options.jobs) as pool:
            for job, figures in pool.map(_job, [(j, part_name, options.out, ends) for j in jobs]):
                if figures is None:
                    over = True
                    continue
                name, label, method, seed, within = job
                print(f"{name} {label} {method} {seed} {'validation' if within else 'test'} {figures}", file=sys.stderr,
                      flush=True)
                place = found.setdefault(part_name, {}).setdefault("validation" if within else "test", {})
                place.setdefault(name, {}).setdefault(label, {}).setdefault(method, {})[str(seed)] = figures
                write_json(RESULT, found)
    if over:
        print("the time is over: the same command goes on", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
