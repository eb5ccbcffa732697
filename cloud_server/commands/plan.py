"""``metafleet plan``: what a fleet's run or an experiment will cost, before it starts.

Heavy modules are imported inside the commands.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloud_server.devices.devices import JSON
from fleet_core.base import processes, terminal
from fleet_core.base.errors import ConfigError, installed

if TYPE_CHECKING:
    from cloud_server.laboratory.plan.planned_bytes import Asked, Rehearsed
    from cloud_server.laboratory.plan.planned_costs import Planned
    from cloud_server.laboratory.plan.workload import Workload
    from cloud_server.records.fleet_folder import Fleet
    from fleet_core.model.layout import Layout

SAMPLE_LABELS = 50  # devices of an experiment whose rounds are counted


def plan(
    path: Annotated[Path, typer.Argument(metavar="FLEET|fleet.toml|EXPERIMENT.toml", help="A fleet, or an experiment's "
                                         "file.")],
    board: Annotated[str | None, typer.Option(help="A board profile or its file, for joules and computing time.")]
    = None,
    devices: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="Devices that train; default: the enrolled "
                                                                           "ones, or an experiment's.")] = None,
    data: Annotated[str | None, typer.Option(metavar="SAMPLES", help="A file of the fleet's samples, to learn "
                                             "how large updates are; default: generated samples.")] = None,
    as_json: JSON = False,
) -> None:
    """Estimate the bytes, operations, computing time and joules of a run before it starts."""
    from cloud_server.laboratory.plan import planned_costs
    from cloud_server.results import result
    from fleet_core.base import config
    from fleet_core.board import catalogue

    file = path / "fleet.toml" if path.is_dir() else path
    if "fleet" in config.tables(config.text_of(file), str(file)):
        asked, own = _of_fleet(file, devices, data)
    else:
        if data is not None:
            raise ConfigError("--data is for a fleet", where=str(file), hint="an experiment names its samples itself")
        asked, named, own = _of_experiment(file, devices)
        board = board or named
    profile = catalogue.load(board) if board else None
    found = [planned_costs.planned(one, profile, partial(_rehearsed, own=own)) for one in asked]
    if as_json:
        return terminal.show([result.plain(one) for one in found])
    _print(found)


def _rehearsed(asked: Asked, flops: float, own: Workload | None) -> Rehearsed:
    from cloud_server.laboratory.run import rehearsal  # needs torch, as ``flops`` did

    return rehearsal.rehearsed(asked, flops, own)


def _of_fleet(file: Path, devices: int | None, data: str | None) -> tuple[list[Asked], Workload | None]:
    """(the plan, the samples for a rehearsal). Raises ConfigError if it is unknown how many devices there will be, and
    DataError."""
    from cloud_server.laboratory.plan.planned_bytes import Asked
    from cloud_server.records.fleet_folder import Fleet, method_of
    from cloud_server.records.fleet_settings import FleetConfig
    from fleet_core.base import config
    from fleet_core.model.select_arrays import AUTO

    settings = config.load(FleetConfig, file)
    fleet = Fleet(file.parent, settings, *method_of(settings, file))
    layout, graph_bytes = _graph(fleet)
    train, new = _enrolled(fleet)
    if not (devices or train):
        raise ConfigError("no device is enrolled yet", where=str(file), expected="--devices N")
    made = (file.parent / "weights.safetensors").exists()
    own = None
    if data is not None:
        with installed("train"):
            from cloud_server.laboratory.run import rehearsal
        own = rehearsal.divided(fleet.samples(layout, Path(data)), layout)
    return [Asked(
        label=settings.fleet.name, method=fleet.method, hyper=fleet.hyper, layout=layout, rounds=settings.fleet.rounds,
        devices=devices or train, newcomers=new, cohort=settings.fleet.cohort, codec_up=fleet.codec_up,
        codec_down=fleet.codec_down, serve_every=settings.fleet.serve_every, graph_bytes=graph_bytes,
        first=fleet.first(layout) if made else None, seed=settings.fleet.seed,
        chunk_bytes=settings.link.chunk_bytes, fleet=settings.fleet.name, moving=fleet.selected(layout),
        schedule=settings.train.freeze == AUTO,
    )], own


def _graph(fleet: Fleet) -> tuple[Layout, int | None]:
    """The model's layout, and the bytes of the graph bundle if it is made."""
    if (fleet.folder / "graph.safetensors").exists():
        from fleet_core.model import graph_bundle

        data = fleet.graph_bytes()
        return graph_bundle.unpack(data).layout, len(data)
    with installed("train"):
        from fleet_core.learning import models

    model = fleet.config.model
    return models.describe(model.name, model.input, model.classes, model.options, model.task), None


def _enrolled(fleet: Fleet) -> tuple[int, int]:
    """Enrolled devices that train, and that are only served."""
    from cloud_server.ledger.ledger import Ledger

    if not fleet.ledger_path.is_file():
        return 0, 0
    with Ledger(fleet.ledger_path, create=False) as ledger:
        rows = [device for device in ledger.devices() if device.status == "enrolled"]
    return sum(not row.new for row in rows), sum(row.new and bool(row.capabilities) for row in rows)


def _of_experiment(file: Path, devices: int | None) -> (
    tuple[list[Asked], str | None, Workload]
):
    """(one plan for each method and grid, the experiment's board, its samples)."""
    from cloud_server.laboratory.plan import experiment as experiments
    from cloud_server.laboratory.plan import workload as workloads
    from cloud_server.laboratory.plan.planned_bytes import Asked
    from fleet_core.model import select_arrays

    with installed("train"):
        from fleet_core.learning import models

    loaded = experiments.load(file)
    workload = workloads.build(loaded)
    layout = workloads.layout_of(loaded, workload)
    labels = [workload.strata_to_learn(share) for share in workload.train[:SAMPLE_LABELS]]
    runs = {run.label: run for run in experiments.runs(loaded)}
    every = Asked(label="", method=next(iter(runs.values())).method, hyper=None, layout=layout,
                  rounds=loaded.budget.rounds, devices=devices or len(workload.train), cohort=loaded.cohort,
                  codec_up=loaded.codec_up, codec_down=loaded.codec_down, labels=labels,
                  first=models.initial(layout, loaded.seeds[0]), seed=loaded.seeds[0],
                  schedule=loaded.train.freeze == select_arrays.AUTO)
    found = []
    for run in runs.values():
        codecs = loaded.codecs(run.method)
        moving = select_arrays.moving_of(loaded.train, layout, run.method)
        found.append(replace(every, label=run.label, method=run.method, hyper=run.hyper, codec_up=codecs["up"],
                             codec_down=codecs["down"], moving=moving))
    return found, loaded.board, workload


def _print(found: list[Planned]) -> None:
    from cloud_server.reports import cost_tables

    heads, rows = cost_tables.planned_table(found)
    terminal.table(rows, heads)
    for text in dict.fromkeys(one.sizes for one in found):
        processes.say(f"sizes: {text}")
    for text in dict.fromkeys(one.auto for one in found if one.auto):
        processes.say(f"payload: {text}")
    reasons: dict[str, Any] = {}
    for one in found:
        reasons |= one.absent
    for figure, why in reasons.items():
        processes.say(f"{figure}: absent, {why}")
