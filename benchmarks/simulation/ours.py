"""The benchmark's workload in the laboratory: FedAvg without clipping and without a codec, evaluated once at the
end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.simulation.workload import CLASSES, LR, Workload
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan.experiment import Experiment
from cloud_server.laboratory.run.simulate import Options, simulate
from fleet_core.data.samples import Samples, save

OPTIONS = {"lenet": {}, "mlp": {"hidden": [80, 60]}}
TEST = 4  # test samples of each client: an experiment needs some


def experiment(workload: Workload, rounds: int, folder: Path) -> Experiment:
    """``rounds`` of the workload, its samples in ``folder``."""
    parts = [workload.data(k) for k in range(workload.clients)]
    x = np.concatenate([np.concatenate([x, x[:TEST]]) for x, _ in parts])
    y = np.concatenate([np.concatenate([y, y[:TEST]]) for _, y in parts])
    names = np.repeat([f"client-{k:04}" for k in range(workload.clients)], [len(y) + TEST for _, y in parts])
    time = np.concatenate([np.r_[np.zeros(len(y)), np.ones(TEST)] for _, y in parts])
    save(folder / "samples.npz", Samples(x, y, names, time, tuple(map(str, range(CLASSES)))))
    hyper = {"local_steps": workload.local_steps, "batch": workload.batch, "client_lr": LR, "clip_norm": 0}
    return experiments.read({
        "data": {"path": str(folder / "samples.npz")},
        "partition": {"options": {"split": "time", "train_fraction": 0.5}},
        "model": {"name": workload.model, "options": OPTIONS[workload.model]},
        "budget": {"rounds": rounds},
        "evaluation": {"every": 0, "devices": 1},
        "method": [{"name": "fedavg", "hyper": hyper}],
    })


def run(workload: Workload, rounds: int, jobs: int, told: Callable[[], None]) -> None:
    """``told`` is called at the end of every round. jobs: processes, 0 for one per core."""
    with tempfile.TemporaryDirectory() as folder:
        asked = experiment(workload, rounds, Path(folder))
        options = Options(jobs=jobs, device="cpu")
        simulate(asked, Path(folder) / "out", options, on_round=lambda name, row: told())
