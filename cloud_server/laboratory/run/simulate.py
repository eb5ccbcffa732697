"""Runs all runs of an experiment on all cores; each run writes a ``result.json``.

Runs are processes that work in parallel. With fewer runs than cores, the devices of a run are spread over processes
too. The results depend on neither."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import multiprocessing.connection
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cloud_server.figures.scores import FIGURES
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload as workloads
from cloud_server.laboratory.plan.experiment import SEVERAL, Experiment, Run
from cloud_server.laboratory.plan.workload import Workload
from cloud_server.laboratory.run.device_work import Setting, device_of
from cloud_server.laboratory.run.engine import Engine, Laboratory, Stopped
from cloud_server.laboratory.run.executors import Executor, Inline, Processes, RayExecutor, end_with_parent
from cloud_server.laboratory.run.round_figures import Costs
from cloud_server.laboratory.run.run_folder import Store, read_table
from cloud_server.results import result as results
from fleet_core.base import schema, storage
from fleet_core.base.errors import ConfigError, FleetError, RoundError
from fleet_core.board import catalogue, probe
from fleet_core.model.layout import Layout

ENGINES = ("local", "ray")
POLL_S = 0.2
SIDE_BY_SIDE, IMAGES_SIDE_BY_SIDE = 32, 8
BATCHED = ("mlp", "logistic", "cnn1d")
"""Models whose clients are trained as one batch on a CPU. For convolutions over images or a single channel that is
slower, unless a client's batch is small."""
BATCHED_PIXELS = 3000
"""Of the images of a client's batch, up to which stacked clients are faster (``benchmarks/exact_maml.py``)."""


@dataclass(frozen=True)
class Options:
    """engine: local or ray. jobs: total number of processes, 0 for one per core. device: cpu, cuda or auto."""

    engine: str = "local"
    jobs: int = 0
    device: str = "auto"


@dataclass(frozen=True)
class RunTask:
    """One run, to be done in ``folder``; it can be sent to another process. processes: how many work on its devices."""

    experiment: Experiment
    run: Run
    folder: Path
    engine: str
    device: str
    processes: int

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that identify a run, as plain JSON: an unfinished run continues only if they are equal."""
        plain = schema.plain(self.experiment)
        for key in SEVERAL:
            del plain[key]
        run = self.run
        settings = {"experiment": plain, "method": run.method.name, "version": run.method.version, "label": run.label,
                    "hyper": schema.plain(run.hyper), "seed": run.seed, "device": self.device}
        return dict(json.loads(json.dumps(settings)))


OnRound = Callable[[str, Mapping[str, Any]], None]


def simulate(
    experiment: Experiment, out: Path, options: Options, *, on_round: OnRound = lambda run, row: None,
    say: Callable[[str], None] = lambda line: None, stopped: Callable[[], bool] = lambda: False,
) -> list[Path]:
    """Runs every run of the experiment that has not ended, each in a folder below ``out``; returns all folders.

    on_round: called with (run, figures) of each round. Raises ConfigError or DataError before anything is computed,
    Stopped, and RoundError that names the failed runs after the others have ended.
    """
    runs = experiments.runs(experiment)
    device = device_of(options.device, gpu=options.engine != "ray")
    for warning in checked(experiment, runs):
        say(f"warning: {warning}")
    tasks = [RunTask(experiment, run, out / run.name, options.engine, device, 1) for run in runs]
    _claim(experiment, tasks, out)
    todo = [task for task in tasks if not Store(task.folder).done]
    if len(todo) < len(runs):
        say(f"{len(runs) - len(todo)} of {len(runs)} runs have ended before")
    parallel, inside = _processes(options, len(todo))
    todo = [replace(task, processes=inside) for task in todo]
    failed = _run_parallel(todo, parallel, on_round, stopped) if parallel > 1 else _run_in_turn(todo, on_round, stopped)
    if failed:
        raise RoundError("\n".join(f"{name}: {why}" for name, why in failed.items()), hint="the other runs have ended")
    return [task.folder for task in tasks]


def checked(experiment: Experiment, runs: Sequence[Run]) -> list[str]:
    """Checks an experiment and returns warnings. Raises FleetError if it cannot be run."""
    workload = workloads.build(experiment)
    layout = workloads.layout_of(experiment, workload)
    costs = costs_of(experiment)
    if experiment.budget.joules:
        _check_joules(experiment, layout, costs)
    return workloads.check(experiment, runs, layout, workload)


def run_one(task: RunTask, on_round: Callable[[Mapping[str, Any]], None], stopped: Callable[[], bool]) -> None:
    """Does one run to its end. Raises Stopped and FleetError."""
    from fleet_core.learning import models

    store, experiment, run = Store(task.folder), task.experiment, task.run
    with store.begun(task.settings):
        if store.done:
            return
        workload = workloads.build(experiment)
        layout = workloads.layout_of(experiment, workload)
        executor = _executor(task, workload)
        try:
            lab = Laboratory(
                experiment, workload, layout, models.initial(layout, run.seed), executor, costs_of(experiment), stopped,
                on_round,
            )
            Engine(lab, run, store).run()
        finally:
            executor.close()
        store.forget_clients()
        store.end(result_of(task, store, workload))


def result_of(task: RunTask, store: Store, workload: Workload) -> dict[str, Any]:
    """The content of ``result.json``: the run's figures, settings and environment."""
    rounds, run = store.rounds(), task.run
    last: dict[str, Any] = next((row for row in reversed(rounds) if not FIGURES.keys().isdisjoint(row)), {})
    found: dict[str, Any] = {
        "format": results.FORMAT, "kind": "simulation", "label": run.label, "method": run.method.name,
        "seed": run.seed, "config": task.settings, "environment": results.environment(),
        "devices": len(workload.train), "seconds": sum(row["seconds"] for row in rounds), "rounds": rounds,
    }
    if "measures" in last:
        figures = {key: last[key]["pooled"] for key in FIGURES if key in last}
        found["evaluated"] = {"round": last["round"], **figures, "measures": last["measures"]}
    elif last:
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
    """Energy constants of the experiment's board, whose radio is Wi-Fi if the profile has no constant of its own.
    Raises ConfigError if there is no such profile."""
    if experiment.board is None:
        return Costs()
    from fleet_core.power.energy_model import BoardModel
    from fleet_core.power.radio import radio_of

    board = catalogue.load(experiment.board)
    model = BoardModel(board)
    return Costs(model.compute_j(1.0), radio_of("wifi", board), model.source, model.spreads["compute"])


def _check_joules(experiment: Experiment, layout: Layout, costs: Costs) -> None:
    from fleet_core.learning import models
    from fleet_core.learning.layer_flops import flops_per_sample

    flops = flops_per_sample(models.build(layout), layout)
    if costs.joules(flops, 0, 0) is None:
        missing = "constants" if flops is not None else "a count of the model's operations"
        raise ConfigError(f"joules cannot be modelled without {missing}: {costs.source}", where="budget.joules",
                          hint="name your own profile with board, or use another budget")


def _claim(experiment: Experiment, tasks: Sequence[RunTask], out: Path) -> None:
    """Writes the experiment to ``out``. Raises ConfigError before that if another experiment or run is there."""
    path, plain = out / "experiment.json", schema.plain(experiment)
    if path.exists():
        known, _ = schema.read(Experiment, read_table(path))
        earlier = json.loads(json.dumps(schema.plain(known))) if known else read_table(path)
        differ = [key for key, value in json.loads(json.dumps(plain)).items() if earlier.get(key) != value]
        if wrong := [key for key in differ if key not in SEVERAL]:
            raise ConfigError(f"holds another experiment: {', '.join(wrong)} differ", where=str(out),
                              hint="give another --out")
    for task in tasks:
        Store(task.folder).check(task.settings)
    storage.write_json(path, plain)


def _processes(options: Options, runs: int) -> tuple[int, int]:
    """(runs in parallel, processes for the devices of each; 0 on Ray means all CPUs of the cluster)."""
    if options.engine == "ray":
        return 1, options.jobs
    cores = options.jobs or probe.cores()
    parallel = max(1, min(cores, runs))
    return parallel, max(1, cores // parallel)


def _executor(task: RunTask, workload: Workload) -> Executor:
    batched = task.device == "cuda" or task.experiment.model.name in BATCHED
    images = IMAGES_SIDE_BY_SIDE if small_images(workload.spec.shape, task.run.hyper) else 1
    setting = Setting(task.experiment, task.run, task.folder, SIDE_BY_SIDE if batched else images, task.device)
    if task.engine == "ray":
        return RayExecutor(setting, task.processes)
    training_tasks = -(-(task.experiment.cohort or len(workload.train)) // setting.side_by_side)
    processes = min(task.processes, training_tasks)  # more processes would be idle
    if processes == 1 or task.device == "cuda":
        return Inline(setting, workload)
    return Processes(setting, processes)


def small_images(shape: Sequence[int], hyper: Any) -> bool:
    """Whether a client's batch is images of few pixels. shape: of a sample."""
    sizes = [getattr(hyper, name, 0) for name in ("batch", "support_batch", "query_batch")]
    return len(shape) == 3 and max(sizes) * math.prod(shape[1:]) <= BATCHED_PIXELS


# Several runs ---------------------------------------------------------------------------------------------------------


def _run_in_turn(tasks: Sequence[RunTask], on_round: OnRound, stopped: Callable[[], bool]) -> dict[str, str]:
    """Does the runs in turn; returns run -> reason of its failure. Raises Stopped."""
    failed = dict[str, str]()
    for task in tasks:
        try:
            run_one(task, partial(on_round, task.run.name), stopped)
        except FleetError as error:
            failed[task.run.name] = str(error)
    return failed


def _run_parallel(
    tasks: Sequence[RunTask], parallel: int, on_round: OnRound, stopped: Callable[[], bool]
) -> dict[str, str]:
    """Does the runs in child processes, ``parallel`` at a time; returns run -> reason of its failure. Raises Stopped
    after all have ended."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    waiting, failed = deque(tasks), dict[str, str]()
    working: dict[Any, tuple[str, Any]] = {}
    try:
        while waiting or working:
            while waiting and len(working) < parallel:
                ours, theirs = context.Pipe()
                task = waiting.popleft()
                child = context.Process(target=_child, args=(task, theirs, stop))
                child.start()
                theirs.close()
                working[ours] = task.run.name, child
            for pipe in multiprocessing.connection.wait(list(working), timeout=POLL_S):
                name, child = working[pipe]
                kind, value = _received(pipe, child)
                if kind == "row":
                    on_round(name, value)
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
        kind, value = pipe.recv()  # pickle is safe here: the sender is a child of this process
    except (EOFError, OSError):
        child.join()
        return "ended", f"its process ended with exit code {child.exitcode}; the same command continues the run"
    return kind, value


def _child(task: RunTask, pipe: Any, stop: Any) -> None:
    end_with_parent()

    def tell(kind: str, value: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent no longer reads
            pipe.send((kind, value))

    try:
        run_one(task, lambda row: tell("row", dict(row)), stop.is_set)
        tell("ended", "")
    except Stopped:
        tell("ended", "")
    except FleetError as error:
        tell("ended", str(error))
