"""The laboratory's commands of ``metafleet``: simulate, compare, advise. What a command needs is imported
when it is called."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import ConfigError, DataError, RoundError
from fleet_core.base.processes import typed

if TYPE_CHECKING:
    from cloud_server.laboratory.compare.comparison import Comparison
    from cloud_server.laboratory.run.experiment import Experiment, Run
    from cloud_server.laboratory.run.recordings import Model
    from cloud_server.laboratory.run.run_folder import Store
    from fleet_core.data.samples import Samples
    from fleet_core.model.layout import InputSpec

ENGINES, DEVICES = ("local", "ray"), ("auto", "cpu", "cuda")
GOES_ON = "stopped; nothing is lost: the same command goes on"

JSON = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]

WINDOW = Annotated[int | None, typer.Option("--window", min=1, max=1_000_000, help="Readings in a window, for a .csv "
                                            "or .ndjson of which each row is a reading.")]
STRIDE = Annotated[int | None, typer.Option("--stride", min=1, max=1_000_000, help="Readings from one window to the "
                                            "next; default: as many as a window has.")]


def simulate(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="See docs/laboratory.md.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the runs; those that lie there go on.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Over the file; may be given again.")
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or ray: a cluster's processes.")] = "local",
    jobs: Annotated[int, typer.Option(min=0, help="Processes in all; 0: one for each core.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and list the runs.")] = False,
    as_json: JSON = False,
) -> None:
    """Run an experiment on this machine, without a broker: methods, grids and seeds side by side."""
    from cloud_server.laboratory.compare import comparison as comparing
    from cloud_server.laboratory.compare import finished_runs, tables
    from cloud_server.laboratory.run import experiment as experiments
    from cloud_server.laboratory.run.run_folder import Store

    _among("--engine", engine, ENGINES)
    _among("--device", device, DEVICES)
    asked = experiments.load(experiment, settings or ())
    runs = experiments.runs(asked)
    if dry_run:
        return _plan(asked, runs, out, (engine, jobs, device), as_json)
    folders, failed = _simulated(asked, runs, out, (engine, jobs, device))
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


def _simulated(
    asked: Experiment, runs: Sequence[Run], out: Path, choices: tuple[str, int, str]
) -> tuple[list[Path], RoundError | None]:
    """(the folders of all runs, which of them failed and why)."""
    from cloud_server.laboratory.run.run_folder import Store

    folders = [out / run.name for run in runs]
    left = [run.name for run in runs if not Store(out / run.name).done]
    if not left and _as_before(asked, runs, out, choices[2]):
        return folders, None
    from cloud_server.laboratory.run import simulate as simulation
    from cloud_server.laboratory.run.engine import Stopped
    from cloud_server.laboratory.run.run_progress import Progress

    with processes.until_signal() as stopped, Progress(left, asked.budget.rounds) as progress:
        try:
            simulation.simulate(asked, out, simulation.Options(*choices), told=progress.told, say=progress.say,
                                stopped=stopped)
        except Stopped:
            progress.say(GOES_ON)
            raise KeyboardInterrupt from None
        except RoundError as error:
            return folders, error
    return folders, None


def _as_before(asked: Experiment, runs: Sequence[Run], out: Path, device: str) -> bool:
    """Whether the runs in ``out`` are these, so that nothing has to be checked with the data and with torch."""
    from cloud_server.laboratory.run.run_folder import Store, read_table

    path = out / "experiment.json"
    same = path.exists() and read_table(path) == json.loads(json.dumps(schema.plain(asked)))
    for run in runs:
        was = Store(out / run.name).asked()
        same = same and (was.get("version"), was.get("hyper")) == (run.method.version, schema.plain(run.hyper))
        same = same and device in ("auto", was.get("device"))
    return same


def _plan(asked: Experiment, runs: Sequence[Run], out: Path, choices: tuple[str, int, str], as_json: bool) -> None:
    """Checks the experiment as a start would, and lists its runs."""
    from cloud_server.laboratory.run import simulate as simulation
    from cloud_server.laboratory.run import workload as workloads
    from cloud_server.laboratory.run.device_work import device_of
    from cloud_server.laboratory.run.run_folder import Store

    engine, _, device = choices
    where = device_of(device, gpu=engine != "ray")
    warnings = simulation.checked(asked, runs)
    for run in runs:
        Store(out / run.name).check(simulation.Order(asked, run, out / run.name, engine, where, 1).asked)
    workload = workloads.build(asked)
    layout = workloads.layout_of(asked, workload)
    facts: dict[str, Any] = {
        "devices": len(workload.train), "new_devices": len(workload.new), "novel_devices": len(workload.novel),
        "samples": len(workload.samples), "classes": len(workload.classes), "cohort": asked.cohort or
        len(workload.train), "rounds": asked.budget.rounds, "model": asked.model.name,
        "parameters": sum(tensor.size for tensor in layout.tensors), "warnings": warnings,
        "runs": [_planned(run, Store(out / run.name), layout) for run in runs],
    }
    if as_json:
        return terminal.show(facts)
    for warning in warnings:
        processes.say(f"warning: {warning}")
    print(f"{facts['devices']} devices that train, {facts['cohort']} asked a round; {facts['new_devices']} new ones, "
          f"{facts['novel_devices']} with novel classes; {facts['samples']} samples of {facts['classes']} classes; "
          f"model {facts['model']}, {facts['parameters']:,} parameters; {facts['rounds']} rounds at most")
    terminal.table([(one["run"], one["method"], one["hyper"], str(one["seed"]), one["state"]) for one in facts["runs"]],
                   ("run", "method", "other than by default", "seed", "state"))


def _planned(run: Run, store: Store, layout: Any) -> dict[str, Any]:
    default = schema.plain(run.method.hyper())
    changed = {key: value for key, value in schema.plain(run.hyper).items() if value != default[key]}
    rounds = len(store.rounds())
    state = "ended" if store.done else f"{rounds} rounds done" if rounds else "to do"
    return {"run": run.name, "label": run.label, "method": run.method.name, "seed": run.seed, "state": state,
            "hyper": " ".join(f"{key}={json.dumps(value)}" for key, value in changed.items())}


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders of runs, runs, fleets or demos.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the page, pictures and tables go.")],
    target: Annotated[
        list[float] | None,
        typer.Option("--target", min=0.001, max=1, help="An accuracy whose cost is told; may be given again."),
    ] = None,
    target_of: Annotated[
        str, typer.Option(metavar="FIGURE", help="What targets are of, over the devices that train: accuracy (their "
                                                 "mean) or macro-f1 (pooled).")
    ] = "accuracy",
    baseline: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Gains are over this one; default: Per-FedAvg.")
    ] = None,
    mixed: Annotated[bool, typer.Option("--mixed", help="Different data or models side by side, marked.")] = False,
    as_json: JSON = False,
) -> None:
    """Curves and tables over several runs: mean and spread over seeds, costs of an accuracy."""
    from cloud_server.laboratory.compare import comparison as comparing
    from cloud_server.laboratory.compare import finished_runs, tables

    if target_of not in comparing.TARGETS_OF:
        raise ConfigError(f"'{target_of}' can be no target", where="--target-of",
                          expected=f"one of {', '.join(comparing.TARGETS_OF)}")
    found, remarks = finished_runs.gather(folders)
    for remark in remarks:
        processes.say(f"note: {remark}")
    compared = comparing.compare(found, targets=target or (), baseline=baseline, mixed=mixed, remarks=remarks,
                                 target_of=target_of)
    written = write(compared, out)
    if as_json:
        return terminal.show({**comparing.to_json(compared), "files": [str(path) for path in written]})
    print(tables.closing(compared))
    print(tables.targets_text(compared))
    for path in written:
        print(path)


def write(compared: Comparison, out: Path) -> list[Path]:
    """compare.html, curves.png, tables.csv and compare.json in ``out``. Raises ConfigError without matplotlib, before
    anything is written."""
    from cloud_server.laboratory.compare import comparison as comparing
    from cloud_server.laboratory.compare import html_page, plots, tables
    from fleet_core.base import storage

    contents = {
        "compare.html": html_page.render(compared, title="Comparison").encode(),
        "curves.png": plots.png(compared, html_page.brief(compared)),
        "tables.csv": tables.csv_text(compared).encode(),
        "compare.json": json.dumps(comparing.to_json(compared), indent=2, allow_nan=False).encode(),
    }
    for name, content in contents.items():
        storage.write_atomic(out / name, content)
    return [out / name for name in contents]


def _among(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        near = schema.suggest(value, known)
        raise ConfigError(f"unknown value '{value}'" + (f" (did you mean '{near}'?)" if near else ""), where=option,
                          expected=f"one of {', '.join(known)}")


def advise(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A named set, or samples with a 'client'.")],
    window: WINDOW = None,
    stride: STRIDE = None,
    budget_minutes: Annotated[float, typer.Option("--budget-minutes", min=0.01, help="For all runs together.")] = 5.0,
    board: Annotated[str | None, typer.Option(help="A profile, or a file, for joules.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the runs; default: advice-DATA.")] = None,
    as_json: JSON = False,
) -> None:
    """Which method, model and codec to take for these recordings, and why: a short comparison on them."""
    from cloud_server.laboratory.compare import advice
    from cloud_server.laboratory.compare import advise as advising
    from cloud_server.laboratory.run import experiment as experiments
    from cloud_server.laboratory.run import simulate as simulation
    from cloud_server.laboratory.run.engine import Stopped
    from cloud_server.laboratory.run.run_folder import Store
    from cloud_server.laboratory.run.run_progress import Progress
    from fleet_core.base import storage

    folder = out or Path(f"advice-{Path(data).stem}")
    warned = set[str]()

    def warn(line: str) -> None:
        if line not in warned:
            processes.say(line)
        warned.add(line)

    with processes.until_signal() as stopped:

        def run(asked: Experiment, place: Path, title: str) -> tuple[list[Path], list[str]]:
            runs, failed = experiments.runs(asked), list[str]()
            processes.say(title)
            with Progress([one.name for one in runs], asked.budget.rounds) as progress:
                try:
                    simulation.simulate(asked, place, simulation.Options(), told=progress.told, say=warn,
                                        stopped=stopped)
                except RoundError as error:
                    failed = error.what.splitlines()
            return [place / one.name for one in runs if Store(place / one.name).done], failed

        try:
            options = advising.Options(data, budget_minutes, board, window, stride)
            told = advising.advise(options, folder, run, cores=simulation.cores_here(), say=processes.say)
        except Stopped:
            processes.say(f"stopped; nothing is lost: the same command with --out {folder} goes on")
            raise KeyboardInterrupt from None
    facts = {**advice.to_json(told.advice), "facts": told.facts, "sentences": advice.sentences(told.advice, told.facts)}
    storage.write_json(folder / "advice.json", facts)
    if as_json:
        terminal.show(facts)
    else:
        print(advice.table(told.advice, told.facts))
        print("\n".join(facts["sentences"]))
    for line in _settings(told, folder):
        processes.say(line) if as_json else print(line)


def tried(samples: Samples, spec: InputSpec, method: str, seed: int) -> Model | None:
    """The model that a short trial on these samples chooses, with its table and its warnings; None where nothing was
    tried, which is said."""
    try:
        from cloud_server.laboratory.compare import model_trial
    except ModuleNotFoundError:
        return None  # making the fleet says what to install

    why = model_trial.why_not(samples)
    if why:
        processes.say(f"no model was tried: {why}")
        return None
    try:
        found = model_trial.tryout(samples, spec, method, seed=seed, say=processes.say)
    except DataError as error:
        processes.say(f"no model was tried: {error.what}")
        return None
    for remark in found.remarks:
        processes.say(f"note: {remark}")
    if found.chosen is None:
        processes.say("no model could be tried: the shape of the samples decides")
        return None
    terminal.table(found.rows(), model_trial.HEADS)
    print(f"* is taken; accuracy and macro-F1 on {found.on}; bytes of one device, up and down")
    for text in found.warnings:
        print(f"warning: {text}")
    return found.chosen.model


def _settings(told: Any, folder: Path) -> Iterator[str]:
    """Writes the fleet.toml, and says how to make the fleet."""
    from fleet_core.base import storage

    fleet = folder / "fleet"
    if told.fleet_toml is not None and not (fleet / "fleet.key").exists():
        storage.write_atomic(fleet / "fleet.toml", told.fleet_toml.encode())
    if told.fleet_toml is not None:
        yield f"{fleet}/fleet.toml has these settings: metafleet init {typed(fleet)}"
    if told.command is not None:
        yield f"or, with the defaults of a fleet for the rest: {told.command}"
