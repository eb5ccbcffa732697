"""Chooses the model that ``metafleet init`` takes by the shape of the samples; test samples are not used.

    METAFLEET_DATA=CACHE nice python -m benchmarks.own_data.choose [--part series images rows] [--minutes M]
        [--out build/own-data] [--jobs 2]

Validation: every candidate on every set with the default method, on the training samples alone, whose time is split
once more and of whose devices a quarter takes the place of new devices (``evaluation.within_training``). Test: the
chosen model and the former default on held-out samples, by class means, by fine-tuning and by Per-FedAvg. The figure is
that of ``metafleet advise``: macro-F1 of the devices that train and of the new ones, each device weighing the same.

Every run is a folder of ``metafleet simulate`` below OUT; the same command resumes, and writes ``result.json`` and the
tables of README.md. CACHE has the sets har, spoken-digits and mnist; missing sets are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.own_data import sets, table
from benchmarks.own_data.baseline import nearest_mean
from cloud_server.laboratory.advise.candidates import score
from cloud_server.laboratory.compare import finished_runs
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload
from cloud_server.laboratory.plan.experiment import Experiment
from cloud_server.laboratory.run.engine import Stopped
from cloud_server.laboratory.run.simulate import Options, simulate
from fleet_core.base.storage import write_json

HERE = Path(__file__).parent
OUT, RESULT = Path("build/own-data"), HERE / "result.json"
DIGITS = 4
DEFAULT = "pfldyn-proto"
METHODS = {
    DEFAULT: {"support_batch": 16, "query_batch": 16, "local_steps": 10},
    "fedavg-meta": {"batch": 32, "finetune_steps": 20, "local_steps": 10},
    "per-fedavg-fo": {"support_batch": 16, "query_batch": 16, "local_steps": 10},
}
ROUNDS, SEEDS = 15, (0, 1)
NARROW, WIDE = [32] * 4, [64] * 4
OWN = "benchmarks.own_data.candidates:"


@dataclass(frozen=True)
class Candidate:
    """method: of the validation. least: pixels that the model needs on each side."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    method: str = DEFAULT
    least: int = 1


@dataclass(frozen=True)
class Part:
    """Candidates for samples of one form. candidates: by label, the former default first. chosen: the label of the
    product's default."""

    sets: tuple[str, ...]
    candidates: Mapping[str, Candidate]
    chosen: str


PARTS = {
    "series": Part(
        sets.SERIES,
        {
            "cnn1d": Candidate("cnn1d"),
            "mean": Candidate(OWN + "Mean", {"channels": NARROW}),
            "mean, deviation": Candidate(OWN + "MeanStd", {"channels": NARROW}),
            "pyramid": Candidate(OWN + "Pyramid", {"channels": NARROW}),
            "every layer": Candidate(OWN + "Depths", {"channels": NARROW}),
            "every layer, wide": Candidate(OWN + "Depths", {"channels": WIDE}),
            "mean, max": Candidate(OWN + "MeanMax", {"channels": NARROW}),
            "mean, max, wide": Candidate(OWN + "MeanMax", {"channels": WIDE}),
            "mean, max, deep": Candidate(OWN + "MeanMax", {"channels": [*NARROW, 32]}),
            "place": Candidate(OWN + "Place", {"channels": NARROW}),
            "two layers": Candidate("ds-cnn"),
            "two layers, wide": Candidate("ds-cnn", {"channels": WIDE}),
        },
        "two layers",
    ),
    "images": Part(
        sets.IMAGES,
        {
            "lenet": Candidate("lenet", least=16),
            "lenet-lim": Candidate("lenet-lim"),
            "mean, max": Candidate(OWN + "MeanMax", {"channels": NARROW}),
            "two layers": Candidate("ds-cnn"),
            "two layers, wide": Candidate("ds-cnn", {"channels": WIDE}),
        },
        "two layers",
    ),
    "rows": Part(
        sets.ROWS,
        {
            "mlp": Candidate("mlp"),
            "mlp, 64-64": Candidate("mlp", {"hidden": [64, 64]}),
            "mlp, fine-tuned": Candidate("mlp", {}, "fedavg-meta"),
            "logistic, fine-tuned": Candidate("logistic", {}, "fedavg-meta"),
        },
        "mlp",
    ),
}


class Job(NamedTuple):
    """One run. label: of the candidate."""

    part: str
    stage: str
    set: str
    label: str
    method: str
    seed: int

    def takes(self, out: Path) -> Experiment:
        candidate, there = PARTS[self.part].candidates[self.label], sets.sections(self.set, out / "data")
        natural = {"split": "time", "train_fraction": 0.6, **there.get("partition", {}).get("options", {})}
        evaluation = {"every": 0, "within_training": self.stage == "validation", "new_devices": 0.25, "support": [0.33],
                      "support_split": "time", **there.get("evaluation", {})}
        return experiments.read({
            "seeds": [self.seed], "data": there["data"], "partition": {"options": natural}, "evaluation": evaluation,
            "model": {"name": candidate.model, "options": dict(candidate.options)}, "budget": {"rounds": ROUNDS},
            "method": [{"name": self.method, "hyper": METHODS[self.method]}],
        })

    def folder(self, out: Path) -> Path:
        label = self.label.replace(", ", "+").replace(" ", "-")
        return out / self.stage / self.set / label / f"{self.method}-{self.seed}"


def jobs(name: str) -> Iterator[Job]:
    """The jobs of a part, the validation first."""
    part = PARTS[name]
    here = [one for one in part.sets if sets.is_here(one)]
    for seed in SEEDS:
        for one in here:
            for label, candidate in part.candidates.items():
                if candidate.least == 1 or one != "mnist-14":
                    yield Job(name, "validation", one, label, candidate.method, seed)
    for one in here:
        for label in dict.fromkeys((next(iter(part.candidates)), part.chosen)):
            if part.candidates[label].least == 1 or one != "mnist-14":
                yield from (Job(name, "test", one, label, DEFAULT, seed) for seed in SEEDS)
                yield from (Job(name, "test", one, label, method, SEEDS[0]) for method in METHODS if method != DEFAULT)


def run(job: Job, out: Path, ends: float) -> dict[str, Any] | None:
    """The figures of a run; None if the time is up. ends: in seconds since the epoch."""
    import torch

    torch.set_num_threads(1)
    experiment = job.takes(out)
    try:
        (made,) = simulate(experiment, job.folder(out), Options(jobs=1, device="cpu"),
                           stopped=lambda: time.time() > ends)
    except Stopped:
        return None
    trial = finished_runs.read(made / "result.json")
    layout = workload.layout_of(experiment, workload.build(experiment))
    return {"score": round(score(trial), DIGITS), "parameters": layout.parameters(("body", "head")),
            "payload_bytes": trial.spent["payload_bytes"], "seconds": round(trial.seconds, 1)}


def baseline(job: Job, out: Path) -> float:
    """The nearest class mean on the devices of a run."""
    experiment = job.takes(out)
    return round(nearest_mean(workload.build(experiment), experiment.evaluation.support[0]), DIGITS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    ends, found = time.time() + 60 * options.minutes, json.loads(RESULT.read_text()) if RESULT.exists() else {}
    asked = [job for name in options.part for job in jobs(name)]
    for job in {job.set: job for job in asked}.values():
        job.takes(options.out)  # makes the files once, not in every process below
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(run, job, options.out, ends) for job in asked]
        for job, made in zip(asked, waiting, strict=True):
            figures = made.result()
            if figures is None:
                print("the time is up; the same command resumes", file=sys.stderr)
                pool.shutdown(cancel_futures=True)
                sys.exit(1)
            print(*job, figures["score"], file=sys.stderr, flush=True)
            stage = found.setdefault(job.part, {}).setdefault(job.stage, {})
            of_set = stage.setdefault(job.set, {"nearest mean": baseline(job, options.out), "runs": {}})
            of_set["runs"].setdefault(job.label, {}).setdefault(job.method, {})[str(job.seed)] = figures
            write_json(RESULT, found)
    table.write(HERE / "README.md", found)


if __name__ == "__main__":
    main()
