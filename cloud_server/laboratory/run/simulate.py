"""All runs of an experiment, on as many cores as there are; each ends with a ``result.json``.

Runs go side by side, one process each; where there are fewer runs than cores, the devices of a run are spread over
processes too. The numbers do not depend on either.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cloud_server.laboratory.run import experiment as experiments
from cloud_server.laboratory.run import workload as workloads
from cloud_server.laboratory.run.device_work import Setting, device_of
from cloud_server.laboratory.run.engine import Engine, Laboratory, Stopped
from cloud_server.laboratory.run.executors import Executor, Inline, Processes, RayExecutor, end_with_parent
from cloud_server.laboratory.run.experiment import SEVERAL, Experiment, Run
from cloud_server.laboratory.run.round_figures import Costs
from cloud_server.laboratory.run.run_folder import Store, read_table
from cloud_server.laboratory.run.workload import Workload
from cloud_server.reports import result as results
from fleet_core.base import schema, storage
from fleet_core.base.errors import ConfigError, FleetError, RoundError
from fleet_core.board import catalogue
from fleet_core.model.layout import Layout

ENGINES = ("local", "ray")
LOOK_S = 0.2
SIDE_BY_SIDE = 32
BATCHED = ("mlp", "logistic", "cnn1d")
"""Models whose clients are trained side by side on a processor: convolutions over images, and those of one channel,
are slower so."""


@dataclass(frozen=True)
class Options:
    """engine: local or ray. jobs: processes in all, 0 for one per core. device: cpu, cuda, or auto."""

    engine: str = "local"
    jobs: int = 0
    device: str = "auto"


@dataclass(frozen=True)
class Order:
    """One run to make in ``folder``, with plain values: another process can have it. processes: for its devices."""

    experiment: Experiment
    run: Run
    folder: Path
    engine: str
    device: str
    processes: int

    @property
    def asked(self) -> dict[str, Any]:
        """What makes a run the same one."""
        plain = schema.plain(self.experiment)
        for key in SEVERAL:
            del plain[key]
        run = self.run
        asked = {"experiment": plain, "method": run.method.name, "version": run.method.version, "label": run.label,
                 "hyper": schema.plain(run.hyper), "seed": run.seed, "device": self.device}
        return dict(json.loads(json.dumps(asked)))


Told = Callable[[str, Mapping[str, Any]], None]


def simulate(
    experiment: Experiment, out: Path, options: Options, *, told: Told = lambda run, row: None,
    say: Callable[[str], None] = lambda line: None, stopped: Callable[[], bool] = lambda: False,
) -> list[Path]:
    """Every run of the experiment that has not ended, in folders of its own below ``out``; the folders of all.

    told: takes (run, figures) of each round. Raises Stopped, ConfigError or DataError before anything is computed, and
    RoundError with the runs that failed, after the others.
    """
    runs = experiments.runs(experiment)
    device = device_of(options.device, gpu=options.engine != "ray")
    for warning in checked(experiment, runs):
        say(f"warning: {warning}")
    orders = [Order(experiment, run, out / run.name, options.engine, device, 1) for run in runs]
    _claim(experiment, orders, out)
    todo = [order for order in orders if not Store(order.folder).done]
    if len(todo) < len(runs):
        say(f"{len(runs) - len(todo)} of {len(runs)} runs have ended before")
    side, inside = _spread(options, len(todo))
    todo = [replace(order, processes=inside) for order in todo]
    failed = _several(todo, side, told, stopped) if side > 1 else _in_turn(todo, told, stopped)
    if failed:
        raise RoundError("\n".join(f"{name}: {why}" for name, why in failed.items()), hint="the other runs have ended")
    return [order.folder for order in orders]


def checked(experiment: Experiment, runs: Sequence[Run]) -> list[str]:
    """Warnings about an experiment that can be run. Raises FleetError for one that cannot."""
    workload = workloads.build(experiment)
    layout = workloads.layout_of(experiment, workload)
    costs = costs_of(experiment)
    if experiment.budget.joules:
        _check_joules(experiment, layout, costs)
    return workloads.check(experiment, runs, layout, workload)


def one(order: Order, told: Callable[[Mapping[str, Any]], None], stopped: Callable[[], bool]) -> None:
    """One run to its end. Raises Stopped and FleetError."""
    from fleet_core.learning import models

    store, experiment, run = Store(order.folder), order.experiment, order.run
    with store.begun(order.asked):
        if store.done:
            return
        workload = workloads.build(experiment)
        layout = workloads.layout_of(experiment, workload)
        executor = _executor(order, workload)
        try:
            lab = Laboratory(
                experiment, workload, layout, models.initial(layout, run.seed), executor, costs_of(experiment), stopped,
                told,
            )
            Engine(lab, run, store).run()
        finally:
            executor.close()
        store.forget_clients()
        store.end(result_of(order, store, workload))


def result_of(order: Order, store: Store, workload: Workload) -> dict[str, Any]:
    """``result.json`` of a run: its figures, its settings, and where it was computed."""
    rounds, run = store.rounds(), order.run
    last: dict[str, Any] = next((row for row in reversed(rounds) if "accuracy" in row), {})
    found: dict[str, Any] = {
        "format": results.FORMAT, "kind": "simulation", "label": run.label, "method": run.method.name,
        "seed": run.seed, "config": order.asked, "environment": results.environment(),
        "devices": len(workload.train), "seconds": sum(row["seconds"] for row in rounds), "rounds": rounds,
    }
    if last:
        found["evaluated"] = {
            "round": last["round"],
            "accuracy": last["accuracy"]["pooled"],
            "macro_f1": last["macro_f1"],
        }
    for key in ("new_devices", "novel_classes", "nvar"):
        if key in last:
            found[key] = last[key]
    return found


def costs_of(experiment: Experiment) -> Costs:
    """Joules of the experiment's board. Raises ConfigError for a profile that is not there."""
    if experiment.board is None:
        return Costs()
    from fleet_core.power.energy_model import BoardModel

    board = BoardModel(catalogue.load(experiment.board))
    return Costs(board.compute_j(1.0), board.radio_j(1), board.source)


def _check_joules(experiment: Experiment, layout: Layout, costs: Costs) -> None:
    from fleet_core.learning import models

    flops = models.flops_per_sample(models.build(layout), layout)
    if costs.joules(flops, 0) is None:
        missing = "constants" if flops is not None else "a count of the model's operations"
        raise ConfigError(f"joules cannot be modelled for want of {missing}: {costs.source}", where="budget.joules",
                          hint="give a profile of your own with board, or another budget")


def _claim(experiment: Experiment, orders: Sequence[Order], out: Path) -> None:
    """Raises ConfigError where another experiment lies, or another run, before anything is written."""
    path, plain = out / "experiment.json", schema.plain(experiment)
    if path.exists():
        known, _ = schema.read(Experiment, read_table(path))
        before = json.loads(json.dumps(schema.plain(known))) if known else read_table(path)
        differ = [key for key, value in json.loads(json.dumps(plain)).items() if before.get(key) != value]
        if wrong := [key for key in differ if key not in SEVERAL]:
            raise ConfigError(f"holds another experiment: {', '.join(wrong)} differ", where=str(out),
                              hint="give another --out")
    for order in orders:
        Store(order.folder).check(order.asked)
    storage.write_json(path, plain)


def _spread(options: Options, runs: int) -> tuple[int, int]:
    """(runs side by side, processes for the devices of each; on Ray 0 for all CPUs of its cluster)."""
    if options.engine == "ray":
        return 1, options.jobs
    cores = options.jobs or cores_here()
    side = max(1, min(cores, runs))
    return side, max(1, cores // side)


def cores_here() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _executor(order: Order, workload: Workload) -> Executor:
    batched = order.device == "cuda" or order.experiment.model.name in BATCHED
    setting = Setting(order.experiment, order.run, order.folder, SIDE_BY_SIDE if batched else 1, order.device)
    if order.engine == "ray":
        return RayExecutor(setting, order.processes)
    training_tasks = -(-(order.experiment.cohort or len(workload.train)) // setting.side_by_side)
    processes = min(order.processes, training_tasks)  # another one would have nothing to train
    if processes == 1 or order.device == "cuda":
        return Inline(setting, workload)
    return Processes(setting, processes)


# Several runs ---------------------------------------------------------------------------------------------------------


def _in_turn(orders: Sequence[Order], told: Told, stopped: Callable[[], bool]) -> dict[str, str]:
    """Runs one after the other; run -> why it failed. Raises Stopped."""
    failed = dict[str, str]()
    for order in orders:
        try:
            one(order, partial(told, order.run.name), stopped)
        except FleetError as error:
            failed[order.run.name] = str(error)
    return failed


def _several(orders: Sequence[Order], side: int, told: Told, stopped: Callable[[], bool]) -> dict[str, str]:
    """Runs in processes of their own, ``side`` at a time; run -> why it failed. Raises Stopped once all have ended."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    waiting, failed = deque(orders), dict[str, str]()
    working: dict[Any, tuple[str, Any]] = {}
    try:
        while waiting or working:
            while waiting and len(working) < side:
                ours, theirs = context.Pipe()
                order = waiting.popleft()
                child = context.Process(target=_child, args=(order, theirs, stop))
                child.start()
                theirs.close()
                working[ours] = order.run.name, child
            for pipe in multiprocessing.connection.wait(list(working), timeout=LOOK_S):
                name, child = working[pipe]
                kind, value = _received(pipe, child)
                if kind == "row":
                    told(name, value)
                    continue
                child.join()
                del working[pipe]
                if value:
                    failed[name] = value
            if stopped():
                stop.set()
                waiting.clear()
        if stop.is_set():
            raise Stopped
        return failed
    finally:
        stop.set()
        for pipe, (_, child) in working.items():
            pipe.close()
            child.join()


def _received(pipe: Any, child: Any) -> tuple[str, Any]:
    try:
        kind, value = pipe.recv()  # from a process that this one has started
    except (EOFError, OSError):
        child.join()
        return "ended", f"its process ended with exit code {child.exitcode}; the same command goes on where it was"
    return kind, value


def _child(order: Order, pipe: Any, stop: Any) -> None:
    end_with_parent()

    def tell(kind: str, value: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more
            pipe.send((kind, value))

    try:
        one(order, lambda row: tell("row", dict(row)), stop.is_set)
        tell("ended", "")
    except Stopped:
        tell("ended", "")
    except FleetError as error:
        tell("ended", str(error))
