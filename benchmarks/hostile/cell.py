"""One cell of the grid: a simulation with hostile devices, and how well the honest ones answer."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.hostile import attacks
from benchmarks.hostile.grid import BACKDOOR, DATA, MEAN, NOBODY, Cell, experiment
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload
from cloud_server.laboratory.plan.workload import Workload
from cloud_server.laboratory.run import simulate
from cloud_server.laboratory.run.device_work import EvaluationTask, Setting
from cloud_server.laboratory.run.engine import Engine, Laboratory
from cloud_server.laboratory.run.executors import Inline
from cloud_server.laboratory.run.round_figures import Costs
from cloud_server.laboratory.run.run_folder import Store
from cloud_server.records import checkpoint
from fleet_core.base import trees
from fleet_core.base.errors import RoundError
from fleet_core.learning import models


def measured(cell: Cell, clean: Workload, *, as_fleet: bool = False) -> dict[str, Any]:
    """The row of a cell. clean: the workload without false samples. as_fleet: every rounding is that of a fleet: values
    cross a wire in float32, and devices are computed one after another."""
    asked = experiment(cell, **({"codec_up": "fp32", "codec_down": "fp32"} if as_fleet else {}))
    run, = experiments.runs(asked)
    hostile = attacks.chosen(clean.names, cell.share, cell.seed)
    target = int(DATA[cell.data]["target"])
    work = attacks.poisoned(clean, hostile, cell.attack, target)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        side = simulate.SIDE_BY_SIDE if asked.model.name in simulate.BATCHED and not as_fleet else 1
        setting = Setting(asked, run, Path(folder), side)
        executor = attacks.Hostile(Inline(setting, work), hostile, cell.attack, cell.seed)
        layout, store = workload.layout_of(asked, work), Store(Path(folder))
        lab = Laboratory(asked, work, layout, models.initial(layout, run.seed), executor, Costs())
        row: dict[str, Any] = asdict(cell)
        try:
            with store.begun({}):
                Engine(lab, run, store).run()
        except RoundError as error:  # every device's model exceeds float32
            return {**row, "ruined": str(error).splitlines()[0][:200]}
        rounds = store.rounds()
        own = {name: value for name, value in rounds[-1]["devices"].items() if name not in hostile}
        refused = Counter(name for one in rounds for name in one.get("errors", {}))
        row |= {
            "accuracy": mean(own.values()), "worst": min(own.values()),
            "refused": {"hostile": _share(refused, hostile, len(rounds)),
                        "honest": _share(refused, [n for n in clean.names if n not in hostile], len(rounds)),
                        "most_of_one_honest": max((refused[n] / len(rounds) for n in own), default=0.0)},
            "largest_honest_norm": max(executor.ratios), "median_largest_honest_norm": median(executor.ratios),
        }
        if cell.attack == BACKDOOR or (cell.attack, cell.setting) == (NOBODY, MEAN):
            row["backdoor"] = _answered(cell, clean, setting, store, tuple(own), target)
        row["seconds"] = time.monotonic() - started
        return row


def _share(refused: Counter[str], names: Any, rounds: int) -> float:
    return sum(refused[name] for name in names) / (rounds * len(names)) if names else 0.0


def _answered(
    cell: Cell, clean: Workload, setting: Setting, store: Store, devices: tuple[str, ...], target: int
) -> float:
    """Share of the honest devices' marked test samples of other classes that are answered with the target class."""
    number = int(DATA[cell.data]["rounds"])
    _, served = checkpoint.served(store.folder / "state" / checkpoint.file_name(number))
    weights = trees.apply(lambda a: np.asarray(a, np.float32), trees.only(served, setting.run.method.shared))
    found = Inline(setting, attacks.triggered(clean)).evaluate(EvaluationTask(number, devices, weights))
    confusion = np.sum([one.confusion for one in found if not one.error], axis=0)
    others = np.delete(confusion, target, axis=0)
    return float(others[:, target].sum() / others.sum())
