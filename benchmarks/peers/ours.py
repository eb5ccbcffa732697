"""Our side of a run: an experiment of the laboratory in this process, evaluated after its last round.

    python -m benchmarks.peers.ours FOLDER

FOLDER has ``samples.npz`` of each set, in a folder of its name. Answers ``turns``: the accuracy is the share of all
test samples that the personalized models answer rightly.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.methods import METHODS, SETTING, Setting
from benchmarks.peers.network import NETWORKS, SETS
from benchmarks.peers.turns import serve
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload as workloads
from cloud_server.laboratory.plan.experiment import Experiment
from cloud_server.laboratory.run.simulate import Options, simulate
from fleet_core.learning import models


def experiment(
    folder: Path, method: str, network: str, seed: int, rounds: int, setting: Setting = SETTING
) -> Experiment:
    ours = METHODS[method].ours(setting)
    return experiments.read({
        "seeds": [seed],
        "data": {"path": str(folder / SETS[network] / "samples.npz")},
        "partition": {"options": {"split": "time", "train_fraction": 0.5}},
        "model": NETWORKS[network],
        "budget": {"rounds": rounds},
        "evaluation": {"every": 0},
        "method": [{"name": METHODS[method].name, "hyper": {"clip_norm": 0, **ours}}],
    })


def run(
    folder: Path, method: str, network: str, seed: int, rounds: int, setting: Setting = SETTING
) -> dict[str, float]:
    rows: list[dict[str, Any]] = []
    asked = experiment(folder, method, network, seed, rounds, setting)
    with tempfile.TemporaryDirectory() as out:
        simulate(asked, Path(out), Options(jobs=1, device="cpu"), on_round=lambda name, row: rows.append(dict(row)))
    return {"accuracy": rows[-1]["accuracy"]["pooled"]}


def first_weights(folder: Path, network: str, seed: int) -> list[np.ndarray[Any, Any]]:
    """The first weights of a run with this seed, in the order of the layers."""
    asked = experiment(folder, "FedAvg", network, seed, 1)
    layout = workloads.layout_of(asked, workloads.build(asked))
    first = models.initial(layout, seed)
    return [array for group in ("body", "head") for array in first[group].values()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(partial(run, Path(sys.argv[1])))
