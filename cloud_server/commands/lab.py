"""The laboratory's commands: ``metafleet simulate``, ``compare`` and ``advise``, and the model trial of ``init``.

Heavy modules are imported inside the commands.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloud_server.devices.devices import JSON
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import ConfigError, DataError, RoundError
from fleet_core.base.processes import typed

if TYPE_CHECKING:
    from cloud_server.laboratory.advise.recordings import Model
    from cloud_server.laboratory.advise.short_comparison import Options, Outcome, Simulate
    from cloud_server.laboratory.plan.experiment import Experiment, Run
    from cloud_server.laboratory.run.run_folder import Store
    from fleet_core.data.samples import Samples
    from fleet_core.model.layout import InputSpec

ENGINES, DEVICES = ("local", "ray"), ("auto", "cpu", "cuda")
GOES_ON = "stopped; nothing is lost: the same command continues"


TENSORBOARD = Annotated[str | None, typer.Option(metavar="DIR", help="Also write each round's figures to this folder, "
                                                 "for TensorBoard.")]
MLFLOW = Annotated[str | None, typer.Option(metavar="URI", help="Also send each round's figures to this MLflow "
                                            "tracking server.")]

WINDOW = Annotated[int | None, typer.Option("--window", min=1, max=1_000_000, help="Readings per window, for a .csv or "
                                            ".ndjson whose rows are single readings.")]
STRIDE = Annotated[int | None, typer.Option("--stride", min=1, max=1_000_000, help="Readings from the start of one "
                                            "window to the next; default: the window's length.")]

TASK = Annotated[str, typer.Option(metavar="classes|regression|multi-label|anomaly", help="What the model answers: a "
                                   "class, one or several numbers, any number of labels, or how unlike quiet samples a "
                                   "sample is.")]
OUTPUTS = Annotated[str | None, typer.Option(metavar="NAME,NAME", help="With --task regression: names of the numbers, "
                                             "which are columns of a table; default: the file's, or target.")]
LOSS = Annotated[str | None, typer.Option(metavar="huber|squared", help="With --task regression; default huber.")]
LABELS = Annotated[str | None, typer.Option(metavar="NAME,NAME", help="With --task multi-label: names of the labels, "
                                            "which are columns of 0 and 1 of a table; default: the file's.")]
NORMAL = Annotated[str | None, typer.Option(metavar="NAME,NAME", help="With --task anomaly: labels of quiet samples; "
                                            "samples without labels are quiet.")]
PER_DAY = Annotated[float | None, typer.Option("--false-alarms", min=1e-6, metavar="A DAY", help="With --task anomaly: "
                                               "wanted false alarms a day of a device; default: 1 % of quiet samples.")]
SIZE = Annotated[str | None, typer.Option("--size", metavar="PIXELS", help="Resize all images to this many pixels: 64, "
                                          "or width by height: 96x64.")]
FIT = Annotated[str | None, typer.Option("--fit", metavar="letterbox|stretch|refuse", help="How every device fits "
                                         "images of another size; default: letterbox with --size, else refuse.")]

RATE = Annotated[int | None, typer.Option("--rate", min=1, max=192_000, help="The fleet's samples of sound per second; "
                                          "default: the recordings' rate, at most 16000. With --window: readings per "
                                          "second, to which devices resample their sensors.")]
SECONDS = Annotated[float | None, typer.Option("--seconds", min=0.05, max=60, help="Length of a window of sound; "
                                               "default 1.")]


def simulate(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="The experiment's file: "
                                               "docs/laboratory.md.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the runs; unfinished ones there are continued.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of the file; may be "
                                       "repeated.")
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or ray for a Ray cluster.")] = "local",
    jobs: Annotated[int, typer.Option(min=0, help="Total number of processes; 0: one for each core.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and list the runs.")] = False,
    tensorboard: TENSORBOARD = None,
    mlflow: MLFLOW = None,
    as_json: JSON = False,
) -> None:
    """Run an experiment without a broker: methods, grids and seeds in parallel."""
    from cloud_server.integrations import tracking
    from cloud_server.laboratory.compare import comparison as comparing
    from cloud_server.laboratory.compare import finished_runs, tables
    from cloud_server.laboratory.plan import experiment as experiments
    from cloud_server.laboratory.run.run_folder import Store
    from cloud_server.running.child_processes import tracking_beside

    _check_choice("--engine", engine, ENGINES)
    _check_choice("--device", device, DEVICES)
    loaded = experiments.load(experiment, settings or ())
    runs = experiments.runs(loaded)
    if dry_run:
        return _plan(loaded, runs, out, (engine, jobs, device), as_json)
    trackers = tracking.Options(tensorboard, mlflow)
    with tracking_beside(trackers, out, processes.say, runs=[out / run.name for run in runs]):
        folders, failed = _simulate(loaded, runs, out, (engine, jobs, device))
    ended = [folder for folder in folders if Store(folder).done]
    if ended:
        found, _ = finished_runs.gather(ended)
        compared = comparing.compare(found)
        if as_json:
            terminal.show({**comparing.to_json(compared), "runs": [str(folder / "result.json") for folder in ended]})
        else:
            print(tables.closing(compared))
            processes.say(f"result.json of each run below {out}; next: metafleet compare {typed(out)} --out FOLDER")
    if failed:
        raise failed


def _simulate(
    experiment: Experiment, runs: Sequence[Run], out: Path, choices: tuple[str, int, str]
) -> tuple[list[Path], RoundError | None]:
    """(the folders of all runs, the error that names the failed ones)."""
    from cloud_server.laboratory.run.run_folder import Store

    folders = [out / run.name for run in runs]
    left = [run.name for run in runs if not Store(out / run.name).done]
    if not left and _is_same_experiment(experiment, runs, out, choices[2]):
        return folders, None
    _needs_torch()
    from cloud_server.laboratory.run import simulate as simulation
    from cloud_server.laboratory.run.engine import Stopped
    from cloud_server.laboratory.run.run_progress import Progress
    from fleet_core.privacy import accountant

    if experiment.privacy.on:
        accountant.check_installed()

    with processes.until_signal() as stopped, Progress(left, experiment.budget.rounds) as progress:
        try:
            simulation.simulate(experiment, out, simulation.Options(*choices), on_round=progress.round_ended,
                                say=progress.say, stopped=stopped)
        except Stopped:
            progress.say(GOES_ON)
            raise KeyboardInterrupt from None
        except RoundError as error:
            return folders, error
    return folders, None


def _needs_torch() -> None:
    """Raises ConfigError if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("'torch' is not installed", hint='pip install "metafleet[train]"')


def _is_same_experiment(experiment: Experiment, runs: Sequence[Run], out: Path, device: str) -> bool:
    """Whether the ended runs in ``out`` are of this experiment; then neither the data nor torch need be loaded."""
    from cloud_server.laboratory.run.run_folder import Store, read_table

    path = out / "experiment.json"
    same = path.exists() and read_table(path) == json.loads(json.dumps(schema.plain(experiment)))
    for run in runs:
        earlier = Store(out / run.name).asked()
        same = same and (earlier.get("version"), earlier.get("hyper")) == (run.method.version, schema.plain(run.hyper))
        same = same and device in ("auto", earlier.get("device"))
    return same


def _plan(
    experiment: Experiment, runs: Sequence[Run], out: Path, choices: tuple[str, int, str], as_json: bool
) -> None:
    """Shows what ``simulate`` would do, after all its checks."""
    facts = _checked_plan(experiment, runs, out, choices)
    if as_json:
        return terminal.show(facts)
    for warning in facts["warnings"]:
        processes.say(f"warning: {warning}")
    answers = f"{facts['classes']} classes" if experiment.model.classes else f"the task {facts['task']}"
    print(f"{facts['devices']} devices that train, {facts['cohort']} asked a round; {facts['new_devices']} new ones, "
          f"{facts['novel_devices']} with novel classes; {facts['samples']} samples of {answers}; "
          f"model {facts['model']}, {facts['parameters']:,} parameters; {facts['rounds']} rounds at most")
    terminal.table([(one["run"], one["method"], one["hyper"], str(one["seed"]), one["state"]) for one in facts["runs"]],
                   ("run", "method", "settings", "seed", "state"))


def _checked_plan(
    experiment: Experiment, runs: Sequence[Run], out: Path, choices: tuple[str, int, str]
) -> dict[str, Any]:
    """The experiment and the state of its runs as plain JSON. Raises FleetError if it cannot be run."""
    _needs_torch()
    from cloud_server.laboratory.plan import workload as workloads
    from cloud_server.laboratory.run import simulate as simulation
    from cloud_server.laboratory.run.device_work import device_of
    from cloud_server.laboratory.run.run_folder import Store

    engine, _, device = choices
    where = device_of(device, gpu=engine != "ray")
    warnings = simulation.checked(experiment, runs)
    for run in runs:
        Store(out / run.name).check(simulation.RunTask(experiment, run, out / run.name, engine, where, 1).settings)
    workload = workloads.build(experiment)
    layout = workloads.layout_of(experiment, workload)
    return {
        "devices": len(workload.train), "new_devices": len(workload.new), "novel_devices": len(workload.novel),
        "samples": len(workload.samples), "classes": len(workload.classes), "task": experiment.model.task,
        "cohort": experiment.cohort or len(workload.train), "rounds": experiment.budget.rounds,
        "model": experiment.model.name, "parameters": sum(tensor.size for tensor in layout.tensors),
        "warnings": warnings, "runs": [_planned_run(run, Store(out / run.name)) for run in runs],
    }


def _planned_run(run: Run, store: Store) -> dict[str, Any]:
    default = schema.plain(run.method.hyper())
    changed = {key: value for key, value in schema.plain(run.hyper).items() if value != default[key]}
    rounds = len(store.rounds())
    state = "ended" if store.done else f"{rounds} rounds done" if rounds else "to do"
    return {"run": run.name, "label": run.label, "method": run.method.name, "seed": run.seed, "state": state,
            "hyper": " ".join(f"{key}={json.dumps(value)}" for key, value in changed.items())}


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Runs, folders of runs, fleets or demos.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder for the page, pictures and tables.")],
    target: Annotated[
        list[float] | None,
        typer.Option("--target", min=0.001, max=1, help="Show what it costs to reach this accuracy, or the figure of "
                     "a task in its place; may be repeated."),
    ] = None,
    target_of: Annotated[
        str, typer.Option(metavar="FIGURE", help="The figure that must reach --target, over the devices that train: "
                                                 "accuracy (mean) or macro-f1 (pooled); of a task without classes "
                                                 "error, micro-f1, auroc or difference.")
    ] = "accuracy",
    baseline: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Compute gains over this run; default: Per-FedAvg.")
    ] = None,
    mixed: Annotated[bool, typer.Option("--mixed", help="Allow runs with different data or models, and mark "
                                                        "them.")] = False,
    as_json: JSON = False,
) -> None:
    """Compare runs with curves and tables: mean and spread over seeds, and the cost to reach an accuracy."""
    from cloud_server.laboratory.compare import comparison as comparing
    from cloud_server.laboratory.compare import comparison_files, finished_runs, tables

    _check_choice("--target-of", target_of, tuple(comparing.TARGETS_OF))
    found, remarks = finished_runs.gather(folders)
    for remark in remarks:
        processes.say(f"note: {remark}")
    compared = comparing.compare(found, targets=target or (), baseline=baseline, mixed=mixed, remarks=remarks,
                                 target_of=target_of)
    written = comparison_files.write(compared, out)
    if as_json:
        return terminal.show({**comparing.to_json(compared), "files": [str(path) for path in written]})
    print(tables.closing(compared))
    print(tables.targets_text(compared))
    for path in written:
        print(path)


def _check_choice(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        near = schema.suggest(value, known)
        raise ConfigError(f"unknown value '{value}'" + (f" (did you mean '{near}'?)" if near else ""), where=option,
                          expected=f"one of {', '.join(known)}")


def advise(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A named set, or samples with a column 'client'.")],
    window: WINDOW = None,
    stride: STRIDE = None,
    size: SIZE = None,
    fit: FIT = None,
    rate: RATE = None,
    seconds: SECONDS = None,
    budget_minutes: Annotated[float, typer.Option("--budget-minutes", min=0.01, help="Total time for all runs.")] = 5.0,
    board: Annotated[str | None, typer.Option(help="A board profile or its file, to estimate joules.")] = None,
    codecs: Annotated[str | None, typer.Option(metavar="NAME,UP/DOWN,…", help="Codecs to try with the best method, or "
                                               "none; default: int8,int4,ternary,topk-10.")] = None,
    task: TASK = "classes",
    outputs: OUTPUTS = None,
    loss: LOSS = None,
    labels: LABELS = None,
    normal: NORMAL = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the runs; default: advice-DATA.")] = None,
    as_json: JSON = False,
) -> None:
    """Recommend a method, model and codec for these recordings, from a short comparison on them."""
    _needs_torch()
    from cloud_server.choices import codec_catalogue, first_settings
    from cloud_server.laboratory.advise import recommendation
    from cloud_server.laboratory.advise import short_comparison as advising
    from cloud_server.laboratory.plan import experiment as experiments
    from fleet_core.base import storage

    _check_choice("--task", task, experiments.TASKS)
    folder = out or Path(f"advice-{Path(data).stem}")
    tried = advising.CODECS_TRIED if codecs is None else codec_catalogue.several(codecs)
    names = first_settings.wanted_outputs(task, outputs, loss, labels, normal)
    options = advising.Options(data, budget_minutes, board, window, stride, tried, task,
                               names or first_settings.wanted_normal(task, normal) or (), loss or experiments.LOSSES[0],
                               size, fit, rate, seconds)
    outcome = _advice_on(options, folder)
    facts = {**recommendation.to_json(outcome.advice), "facts": outcome.facts,
             "sentences": recommendation.sentences(outcome.advice, outcome.facts)}
    storage.write_json(folder / "advice.json", facts)
    _write_fleet_toml(outcome, folder)
    if as_json:
        terminal.show(facts)
    else:
        print(recommendation.table(outcome.advice, outcome.facts))
        print("\n".join(facts["sentences"]))
    for line in _next_steps(outcome, folder):
        processes.say(line) if as_json else print(line)


def _advice_on(options: Options, folder: Path) -> Outcome:
    """Runs the comparison, in ``folder``. Raises FleetError, and KeyboardInterrupt if it is stopped."""
    from cloud_server.laboratory.advise import short_comparison as advising
    from cloud_server.laboratory.run.engine import Stopped
    from fleet_core.board import probe

    with processes.until_signal() as stopped:
        try:
            return advising.advise(options, folder, _simulator(stopped), cores=probe.cores(),
                                   say=processes.say)
        except Stopped:
            processes.say(f"stopped; nothing is lost: the same command with --out {folder} continues")
            raise KeyboardInterrupt from None


def _simulator(stopped: Callable[[], bool]) -> Simulate:
    """How ``advise`` runs an experiment: with progress on the terminal, and every warning only once."""
    from cloud_server.laboratory.plan import experiment as experiments
    from cloud_server.laboratory.run import simulate as simulation
    from cloud_server.laboratory.run.run_folder import Store
    from cloud_server.laboratory.run.run_progress import Progress

    warned = set[str]()

    def warn(line: str) -> None:
        if line not in warned:
            processes.say(line)
        warned.add(line)

    def simulate(experiment: Experiment, out: Path, title: str) -> tuple[list[Path], list[str]]:
        runs, failed = experiments.runs(experiment), list[str]()
        processes.say(title)
        with Progress([run.name for run in runs], experiment.budget.rounds) as progress:
            try:
                simulation.simulate(experiment, out, simulation.Options(), on_round=progress.round_ended, say=warn,
                                    stopped=stopped)
            except RoundError as error:
                failed = error.what.splitlines()
        return [out / run.name for run in runs if Store(out / run.name).done], failed

    return simulate


def _write_fleet_toml(outcome: Outcome, folder: Path) -> None:
    from fleet_core.base import storage

    fleet = folder / "fleet"
    if outcome.fleet_toml is not None and not (fleet / "fleet.key").exists():
        storage.write_atomic(fleet / "fleet.toml", outcome.fleet_toml.encode())


def _next_steps(outcome: Outcome, folder: Path) -> Iterator[str]:
    fleet = folder / "fleet"
    if outcome.fleet_toml is not None:
        yield f"{fleet}/fleet.toml has these settings: metafleet init {typed(fleet)}"
    if outcome.command is not None:
        yield f"or, with the defaults of a fleet for the rest: {outcome.command}"


def choose_model(
    samples: Samples, spec: InputSpec, method: str, seed: int, task: dict[str, Any] | None = None
) -> Model | None:
    """The model chosen by a short trial on these samples, after printing the trial's table and warnings; None, with a
    reason on stderr, if no trial is possible. task: as in ``model_trial.try_models``."""
    try:
        from cloud_server.laboratory.advise import model_trial
    except ModuleNotFoundError:
        return None  # making the fleet reports what to install

    why = model_trial.reason_to_skip(samples)
    if why:
        processes.say(f"no model was tried: {why}")
        return None
    try:
        found = model_trial.try_models(samples, spec, method, seed=seed, say=processes.say, task=task)
    except DataError as error:
        processes.say(f"no model was tried: {error.what}")
        return None
    for remark in found.remarks:
        processes.say(f"note: {remark}")
    if found.chosen is None:
        processes.say("no model could be tried: the default for samples of this shape is used")
        return None
    terminal.table(found.rows(), found.columns)
    figures = " and ".join(found.columns[1:-len(model_trial.COSTS)])
    print(f"* is taken; {figures} on {found.on}; bytes of one device, up and down")
    for text in found.warnings:
        print(f"warning: {text}")
    return found.chosen.model
