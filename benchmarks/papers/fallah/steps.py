"""How the ranking on CIFAR-10 depends on the size of the step at test, whose batch and rate the paper does not state.

    METAFLEET_DATA=CACHE python -m benchmarks.papers.fallah.steps [--out build/papers]

Takes the models at the end of the runs in OUT (``python -m benchmarks.papers.run fallah --only …``), and evaluates them
after a step on the test samples, as in the paper, of ``PARTS`` of the rate α. Writes steps.json: the mean over devices
of their accuracy. Then ``python -m benchmarks.papers.page fallah --kept`` makes the table.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.papers import run as papers
from benchmarks.papers.fallah.table import PARTS, STEPS, TRIED
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan.experiment import Experiment, Run
from cloud_server.laboratory.run.device_work import TEST_STEP, EvaluationTask, Setting, Worker
from cloud_server.records import checkpoint
from fleet_core.base.errors import FleetError
from fleet_core.base.storage import write_json

RATES = ("finetune_lr", "inner_lr")
"""The rate of the step, in fedavg-meta and in per-fedavg."""


def accuracies(asked: Experiment, run: Run, folder: Path) -> list[float]:
    """By part of the rate: the mean over devices after the step."""
    key = next(name for name in RATES if hasattr(run.hyper, name))
    first = Worker(Setting(asked, run, folder))
    number = asked.budget.rounds
    _, served = checkpoint.served(folder / "state" / checkpoint.file_name(number))
    found = []
    for part in PARTS:
        hyper = replace(run.hyper, **{key: part * getattr(run.hyper, key)} if part else {_steps(key): 0})
        worker = Worker(Setting(asked, replace(run, hyper=hyper), folder), first.workload)
        devices = worker.evaluate(EvaluationTask(number, tuple(first.workload.names), served, TEST_STEP))
        found.append(fmean(float(np.trace(one.confusion) / one.confusion.sum()) for one in devices))
    return found


def _steps(rate: str) -> str:
    return "finetune_steps" if rate == "finetune_lr" else "inner_steps"


def measured(out: Path) -> dict[str, Any]:
    """Experiment -> label -> seed -> accuracies. Raises FleetError."""
    found: dict[str, Any] = {}
    for path in papers.files("fallah", TRIED):
        asked = experiments.load(path)
        for run in experiments.runs(asked):
            folder = out / "fallah" / path.stem / run.name
            if (folder / "result.json").exists():
                print(f"{path.stem} {run.name}", file=sys.stderr, flush=True)
                seeds = found.setdefault(path.stem, {}).setdefault(run.label, {})
                seeds[str(run.seed)] = [round(value, 6) for value in accuracies(asked, run, folder)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=papers.OUT)
    options = parser.parse_args()
    try:
        write_json(Path(__file__).parent / STEPS, measured(options.out))
    except FleetError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
