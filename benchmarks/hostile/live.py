"""Hostile devices in fleets of real processes, beside the same cells in a simulation.

    METAFLEET_DATA=CACHE python -m benchmarks.hostile.live --out FOLDER [--data mnist] [--minutes 60]

The twenty devices of the grid are agents with their trainers, on the aggregator's embedded broker. Each has the samples
that it has in the simulation, divided at the same sample. A fifth of them sends ten times the opposite of what it
trained, or learns reversed labels: what a device can do that sees no other's update. Computes the cells that live.json
lacks, and writes it after each, then the table of README.md. FOLDER holds one fleet, which is made anew for each cell.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks.hostile import attacks, tables
from benchmarks.hostile.cell import measured
from benchmarks.hostile.grid import ADAPTIVE, DATA, DEVICES, LABELS, MEAN, NOBODY, SIGN, Cell, experiment
from benchmarks.hostile.hostile_agent import THIS
from cloud_server.choices.first_settings import fleet_toml
from cloud_server.identity.create_fleet import create_fleet
from cloud_server.identity.device_folder import write_device_folder
from cloud_server.laboratory.plan import workload
from cloud_server.laboratory.plan.workload import Workload
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Evaluation, Update
from cloud_server.records.fleet_folder import Fleet
from cloud_server.results.evaluations import evaluated
from export.first_model import first
from fleet_core.base import config, processes
from fleet_core.base.storage import write_json
from fleet_core.data.partitions import Share
from fleet_core.data.samples import Samples, save
from fleet_core.robust.settings import CEILING, NONE
from tests.support.brokers import accepts_connections, free_port
from tests.support.paths import ROOT
from tests.support.programs import edge_agent, metafleet, programs_in

HERE = Path(__file__).parent
RESULT = HERE / "live.json"
METHODS, RULES, SHARE = ("fedavg-meta", "pfldyn-proto"), (MEAN, ADAPTIVE, "krum", "history"), 0.2
DEADLINE_S, STALL_S = 120.0, 360.0


def cells(data: str) -> list[Cell]:
    """Without attackers, then both attacks under each rule."""
    clean = [Cell(data, method, ADAPTIVE, NOBODY, 0.0) for method in METHODS]
    return clean + [Cell(data, method, rule, attack, SHARE) for attack in (SIGN, LABELS) for method in METHODS
                    for rule in RULES]


def lived(cell: Cell, clean: Workload, folder: Path) -> dict[str, Any]:
    """The figures of the fleet: honest devices' accuracies, and the shares of updates that were refused. In their place
    the rounds closed, ``stopped``, where too few updates are accepted for another round."""
    hostile = attacks.chosen(clean.names, cell.share, cell.seed)
    work = attacks.poisoned(clean, hostile, cell.attack, int(DATA[cell.data]["target"]))
    shutil.rmtree(folder, ignore_errors=True)
    fleet, rounds, port = founded(cell, work, folder / "fleet"), DATA[cell.data]["rounds"], free_port()
    with programs_in(folder) as programs:
        server = programs.start(*metafleet("server", "start", fleet.folder, "--quiet", "--broker", "embedded", "--port",
                                           port))
        server.until(lambda: accepts_connections(port))
        for share in work.train:
            home = home_of(fleet, work, share, folder / share.name)
            url = f"mqtt://127.0.0.1:{port}"
            lies = share.name in hostile and cell.attack == SIGN
            command = processes.command(THIS, str(attacks.FLIPPED), str(home), url)
            programs.start(*(command if lies else edge_agent("run", "--home", home, "--broker", url)), cwd=ROOT)
        with Ledger(fleet.ledger_path, create=False) as ledger:
            if not ends(ledger, rounds, {share.name for share in work.train}):
                return {"stopped": ledger.closed_count()}
            return figures(ledger, rounds, hostile)


def founded(cell: Cell, work: Workload, folder: Path) -> Fleet:
    """The fleet whose rounds are those of ``cell``."""
    chosen, kind, rounds = DATA[cell.data], experiment(cell).model, DATA[cell.data]["rounds"]
    samples = replace(work.samples.take(work.train[0].train), classes=work.classes)
    settings = tomllib.loads(fleet_toml(
        samples, "t", cell.method, kind.name, rounds=rounds, seed=cell.seed, spec=work.spec, model_options=kind.options,
        codec="up:fp32,down:fp32", min_devices=DEVICES, serve_every=rounds, quorum=0.5, deadline_s=DEADLINE_S,
    ))
    settings |= {"hyper": chosen["methods"][cell.method],
                 "robust": {"rule": NONE if cell.setting in (MEAN, ADAPTIVE) else cell.setting}}
    if cell.setting == MEAN:
        settings["link"]["max_update_norm"] = CEILING
    return create_fleet(folder, config.toml(settings), lambda made, head: first(
        made.model.name, made.model.input, made.model.classes, made.model.options, head=head, seed=cell.seed))


def home_of(fleet: Fleet, work: Workload, share: Share, home: Path) -> Path:
    """A device's folder. The order of its samples is the time at which they came: what it holds back is what the
    simulation holds back."""
    rows = np.concatenate([share.train, share.test])
    part = work.samples.take(rows)
    fraction = (len(share.train) - 0.5) / (len(rows) - 1)
    write_device_folder(fleet, share.name, home, "mqtt://127.0.0.1:1883", data={"train_fraction": fraction})
    save(home / "samples.npz", Samples(part.x, part.y, classes=work.classes, time=np.arange(float(len(rows)))))
    return home


def figures(ledger: Ledger, rounds: int, hostile: Sequence[str]) -> dict[str, Any]:
    last = {row.device: row.accuracy for row in ledger.rows(Evaluation, round=rounds, stage="after")}
    own = [accuracy for name, accuracy in last.items() if name not in hostile]
    refused = [row.device for row in ledger.rows(Update, status="refused")]
    lies = sum(name in hostile for name in refused)
    return {"accuracy": mean(own), "worst": min(own), "refused": {
        "hostile": lies / (rounds * len(hostile)) if hostile else 0.0,
        "honest": (len(refused) - lies) / (rounds * (DEVICES - len(hostile))),
    }}


def ends(ledger: Ledger, rounds: int, devices: set[str]) -> bool:
    """Waits until all devices have evaluated the last model; False if no round has closed for ``STALL_S``."""
    closed, since_s = 0, time.monotonic()
    while not evaluated(ledger, rounds) >= devices:
        if (now := ledger.closed_count()) > closed:
            closed, since_s = now, time.monotonic()
        if time.monotonic() - since_s > STALL_S:
            return False
        time.sleep(0.2)
    return True


def compute(data: str, minutes: float, folder: Path) -> None:
    """Computes as many cells as the time allows."""
    until, known = time.monotonic() + 60 * minutes, tables.rows(RESULT)
    done, work = {tables.key_of(row) for row in known}, workload.build(experiment(cells(data)[0]))
    for cell in (one for one in cells(data) if one.key not in done):
        if time.monotonic() > until:
            return
        row = {**asdict(cell), "live": lived(cell, work, folder),
               "simulated": measured(cell, work, as_fleet=True).get("accuracy")}
        known.append(row)
        write_json(RESULT, {"rows": known})
        processes.say(f"{cell.key}: {json.dumps(row['live'])}, simulated {row['simulated']}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile.live", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the fleet")
    parser.add_argument("--data", choices=tuple(DATA), action="append", help="default: all, one after the other")
    parser.add_argument("--minutes", type=float, default=60.0, help="of each set; no new cell is begun after that")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for data in options.data or DATA:
        compute(data, options.minutes, options.out / "fleet")
    tables.fill(tables.rows(HERE / "result.json"), tables.rows(RESULT), HERE / "README.md")


if __name__ == "__main__":
    main()
