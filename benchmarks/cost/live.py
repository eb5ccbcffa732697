"""The saving on the wire: live fleets over MQTT with TLS, one for each codec, and bytes of a device and round.

    METAFLEET_DATA=CACHE python -m benchmarks.cost.live --out FOLDER [--task TASK] [--devices 8] [--rounds 20]
        [--only CODEC ...]
    METAFLEET_DATA=CACHE python -m benchmarks.cost.live --plan

Aggregator, mosquitto with certificates, and agents are processes on this machine. The first devices of the task train,
all in every round, with the settings and the codec of chosen.json. Bytes are those of rounds 3 to the last but one, so
that neither the graph, nor the first model, nor the served model after the last round counts: payload, what went
through the MQTT socket, and on the wire: TLS, TCP and IP. ``planned_`` and ``run_`` are the bytes of all devices in the
whole run, by a plan and by the ledger, ``planned_own_`` those of a plan with ``--data``: the samples of four of the
devices. It writes the rows of the task in live.json. --plan:
plans the fleets of live.json again, in this process, and runs none.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tomllib
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.cost.to_target import BEST, CHOSEN, PER_FEDAVG, PFLDYN, task
from benchmarks.own_data.commands import Commands
from cloud_server.choices.first_settings import fleet_toml
from cloud_server.laboratory.plan import planned_costs
from cloud_server.laboratory.plan import workload as workloads
from cloud_server.laboratory.plan.planned_bytes import Asked
from cloud_server.laboratory.plan.workload import Workload
from cloud_server.laboratory.run.rehearsal import DEVICES as REHEARSED
from cloud_server.laboratory.run.rehearsal import rehearsed
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_sums import Bytes, Volume
from cloud_server.records.fleet_settings import LinkSection
from export.first_model import first
from fleet_core.algorithms.interface import read_hyper
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import config
from fleet_core.base.processes import say
from fleet_core.base.storage import write_atomic, write_json
from fleet_core.data.samples import Samples, save
from fleet_core.learning import models

HERE = Path(__file__).parent
RESULT = HERE / "live.json"
TASKS, FLEET = ("heartbeat-22", "har", "mnist"), "fleet"
ROWS = ((PER_FEDAVG, "fp32"), (PFLDYN, "fp32"), (PFLDYN, "int8"), (PFLDYN, BEST))
FIRST_ROUND = 3
ROUNDS_S = 1800.0
COUNTERS = ("payload", "mqtt", "wire")


def measured(folder: Path, name: str, label: str, codec: str, devices: int, rounds: int) -> dict[str, Any]:
    """Runs one fleet in ``folder``, which is made anew: counter -> bytes of one device in one round, up and down."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    method, up, down = chosen(name, label, codec)
    commands, work = Commands(folder), workloads.build(task(name))
    with ExitStack() as stack:
        stack.callback(commands.end)
        model = task(name).model
        made = tomllib.loads(fleet_toml(
            replace(work.samples.take(work.train[0].train), classes=work.classes), FLEET, method["method"], model.name,
            rounds=rounds, seed=0, spec=work.spec, model_options=model.options, codec=f"up:{up},down:{down}",
            min_devices=devices, serve_every=rounds,
        ))
        settings = folder / FLEET / "fleet.toml"
        settings.parent.mkdir()
        write_atomic(settings, config.toml({**made, "hyper": method["hyper"]}).encode())
        commands.done("metafleet", "init", FLEET)
        server, log = commands.start("metafleet", "server", "start", FLEET, "--host", "0.0.0.0", "--quiet")
        commands.says(log, "broker: ")
        names = enrolled(commands, work, devices)
        agents = [commands.start("edge-agent", "run", "--home", name)[0] for name in names]
        with Ledger(folder / FLEET / "ledger.sqlite") as ledger:
            commands.until(lambda: len(ledger.rounds("closed")) >= rounds, f"round {rounds}", ROUNDS_S)
            by_round = ledger.volume("round")
            found, run = [by_round[number] for number in range(FIRST_ROUND, rounds)], ledger.volume()[None]
        commands.stop(*agents)
        commands.stop(server)
    return {"method": label, "codec": up if up == down else f"{up}/{down}",
            **{name: each(found, name, devices) for name in COUNTERS},
            **{f"run_{name}": up_and_down(getattr(run, name)) for name in ("payload", "wire")}}


def chosen(name: str, label: str, codec: str) -> tuple[dict[str, Any], str, str]:
    """(method and hyper-parameters, codec up, codec down) of a row."""
    method = json.loads(CHOSEN.read_text())[name]["methods"][BEST if codec == BEST else label]
    up, _, down = (method["codec"] if codec == BEST else codec).partition("/")
    return method, up, down or up


def planned(name: str, label: str, codec: str, devices: int, rounds: int) -> dict[str, dict[str, int]]:
    """What ``metafleet plan`` says of that fleet, without samples and with, computed here."""
    (method, up, down), work, model = chosen(name, label, codec), workloads.build(task(name)), task(name).model
    kind = METHODS[method["method"]]
    layout = models.describe(model.name, work.spec, work.classes, model.options)
    graph, _ = first(model.name, work.spec, work.classes, model.options, head="head" in kind.shared, seed=0)
    asked = Asked(
        label=label, method=kind, hyper=read_hyper(kind, method["hyper"])[0], layout=layout, rounds=rounds,
        devices=devices, codec_up=up, codec_down=down, serve_every=rounds, graph_bytes=len(graph),
        first=models.initial(layout, 0), chunk_bytes=LinkSection().chunk_bytes,
    )
    found = dict[str, dict[str, int]]()
    for kind_of_plan, own in (("planned", None), ("planned_own", replace(work, train=work.train[:REHEARSED]))):
        plan = planned_costs.planned(asked, None, partial(rehearsed, own=own))
        say(f"{name}: {label} with {codec}: sizes {plan.sizes}")
        found |= {f"{kind_of_plan}_{counter}": up_and_down(getattr(plan, f"{counter}_bytes"))
                  for counter in ("payload", "wire")}
    return found


def enrolled(commands: Commands, work: Workload, devices: int) -> list[str]:
    """Enrols the first devices with a token each; their homes hold their training samples."""
    names = []
    for share in work.train[:devices]:
        name = f"p{share.name}"
        home = commands.folder / name
        home.mkdir()
        kept = work.samples.take(share.train)
        save(home / "samples.npz", Samples(kept.x, kept.y, classes=kept.classes, time=kept.time))
        commands.done("metafleet", "devices", "enroll", FLEET, name)
        commands.done("edge-agent", "enroll", f"{name}.token", "--home", name)
        names.append(name)
    return names


def each(found: list[Volume], counter: str, devices: int) -> dict[str, float]:
    """Bytes of one device in one round."""
    counted: list[Bytes] = [getattr(volume, counter) for volume in found]
    return {"up": mean(one.up for one in counted) / devices, "down": mean(one.down for one in counted) / devices}


def up_and_down(counted: Bytes) -> dict[str, int]:
    return {"up": counted.up, "down": counted.down}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the fleets")
    parser.add_argument("--task", choices=TASKS, default=TASKS[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=dict.fromkeys(codec for _, codec in ROWS), metavar="CODEC",
                        help="fp32, int8 or best; the task's other rows in live.json stay")
    parser.add_argument("--plan", action="store_true")
    given = parser.parse_args()
    kept = json.loads(RESULT.read_text())
    if given.plan:
        for name, fleets in kept.items():
            for (label, codec), row in zip(ROWS, fleets["rows"], strict=True):
                row |= planned(name, label, codec, fleets["devices"], fleets["rounds"])
                write_json(RESULT, kept)
        return
    asked, before = {"devices": given.devices, "rounds": given.rounds}, kept.get(given.task, {})
    if given.only and {key: before.get(key) for key in asked} != asked:
        raise SystemExit(f"{RESULT} is of other devices or rounds: run all rows")
    rows = {(row["method"], row["codec"]): row for row in before.get("rows", ())} if given.only else {}
    for label, codec in ROWS:
        if given.only and codec not in given.only:
            continue
        folder = given.out / f"{given.task}-{label}-{codec}"
        row = (measured(folder, given.task, label, codec, given.devices, given.rounds)
               | planned(given.task, label, codec, given.devices, given.rounds))
        say(json.dumps(row))
        rows[label, row["codec"]] = row
    write_json(RESULT, {**kept, given.task: {**asked, "rows": list(rows.values())}})


if __name__ == "__main__":
    main()
