"""Tiny laboratory experiments: three devices, three classes, eight dimensions."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload
from cloud_server.laboratory.plan.experiment import Experiment, Run
from cloud_server.laboratory.run.device_work import Setting
from cloud_server.laboratory.run.engine import Engine, Laboratory
from cloud_server.laboratory.run.executors import Executor, Inline
from cloud_server.laboratory.run.round_figures import Costs
from cloud_server.laboratory.run.run_folder import Store
from cloud_server.records.checkpoint import Checkpoint
from fleet_core.base import storage
from fleet_core.base.trees import Params
from fleet_core.data.samples import Samples, save
from fleet_core.learning import models
from tests.support.inprocess import toy, without_fsync

EPISODES = {"local_steps": 3, "support_batch": 12, "query_batch": 12}


def recordings(path: Path, devices: int = 3, count: int = 90) -> Path:
    """One file with the samples that ``toy`` makes for d0, d1, …"""
    parts = [toy(n, count, shift=0.3 * n) for n in range(devices)]
    names = np.repeat([f"d{n}" for n in range(devices)], [len(part) for part in parts])
    x, y = np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts])
    time = np.concatenate([part.time for part in parts if part.time is not None])
    save(path, Samples(x, y, names, time, parts[0].classes))
    return path


def settings(path: Path, name: str = "pfldyn-proto", hyper: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """The settings of an experiment with the method ``name``; ``more`` replaces tables or settings."""
    return {
        "data": {"path": str(path)},
        "partition": {"kind": "natural", "options": {"split": "time", "train_fraction": 0.6}},
        "model": {"name": "mlp", "options": {"hidden": [6]}},
        "budget": {"rounds": 4},
        "evaluation": {"every": 2},
        "cohort": 2,
        "method": [{"name": name, "hyper": dict(EPISODES if hyper is None else hyper)}],
        **more,
    }


def experiment(*arguments: Any, **more: Any) -> Experiment:
    return experiments.read(settings(*arguments, **more))


def laboratory(asked: Experiment, run: Run, folder: Path, executor: Executor | None = None, **more: Any) -> Laboratory:
    """side_by_side: clients that the inline executor trains together. more: replaces fields of ``Laboratory``."""
    work = workload.build(asked)
    layout = workload.layout_of(asked, work)
    side = more.pop("side_by_side", 1)
    executor = executor or Inline(Setting(asked, run, folder, side), work)
    lab = Laboratory(asked, work, layout, models.initial(layout, run.seed), executor, Costs())
    return replace(lab, **more)


def run_first(asked: Experiment, folder: Path, **more: Any) -> Store:
    """Run the experiment's first run to its end in this process."""
    run = experiments.runs(asked)[0]
    store = Store(folder)
    with store.begun({"run": run.name}):
        Engine(laboratory(asked, run, folder, **more), run, store).run()
    return store


def run_first_and_die(write: int, asked: Experiment, folder: Path) -> None:
    """As ``run_first``, but kill this process before the ``write``-th change of a file or folder. Call it in a child
    process."""
    without_fsync(pytest.MonkeyPatch())
    sys.dont_write_bytecode = True
    left = itertools.count(write - 1, -1)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")
        if (changes or (event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))) and not next(left):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    run_first(asked, folder, clock=ticking(0.5))


def server_state(store: Store) -> dict[str, bytes]:
    """Everything in the last checkpoint but the time: arrays by name, and the metadata."""
    path = sorted((store.folder / "state").glob("round-*"))[-1]
    arrays, metadata = storage.unpack(path.read_bytes())
    return {**{name: bits(array) for name, array in arrays.items()}, "metadata": json.dumps(metadata).encode()}


def checkpoint(store: Store) -> Checkpoint:
    """The last one."""
    kept = store.resume({})
    assert kept is not None
    return kept


def device_state(store: Store, name: str) -> dict[str, bytes]:
    """A device's state on disk by role, group and name."""
    return flat(store.clients.load(name, 1 << 30))


def flat(state: Mapping[str, Params]) -> dict[str, bytes]:
    return {name: bits(array) for name, array in storage.flatten_roles(state).items()}


def bits(array: np.ndarray[Any, Any]) -> bytes:
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()


def rounds_without_times(store: Store) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in store.rounds()]


def comparable(store: Store, devices: Iterable[str] = ("d0", "d1", "d2")) -> dict[str, Any]:
    """What two equal runs have in common: server state, rounds and device states."""
    states = {name: device_state(store, name) for name in devices}
    return {"server": server_state(store), "rounds": rounds_without_times(store), **states}


def ticking(step_s: float) -> Callable[[], float]:
    """A clock that advances by ``step_s`` at every reading."""
    now = iter(range(1 << 60))
    return lambda: next(now) * step_s


class Headless(nn.Module):
    """A user's model without a head."""

    def __init__(self, shape: tuple[int, ...], classes: int):
        super().__init__()
        self.only = nn.Linear(shape[0], 4)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.only(x))
