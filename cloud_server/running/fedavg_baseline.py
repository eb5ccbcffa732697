"""The demo's baseline: FedAvg's head model on the same devices, rounds and seed, in one process.

``python -m cloud_server.running.fedavg_baseline RUN`` reads the run's folder and writes RUN/baseline.json: per device
the confusion counts of the model as it is (``before``) and fine-tuned on the device's own samples (``fine_tuned``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cloud_server.identity.create_fleet import create_fleet
from cloud_server.identity.device_folder import write_device_folder
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Evaluation
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.fleet_settings import FleetConfig
from cloud_server.running import in_one_process
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import config, processes, schema, storage, terminal
from fleet_core.board.device_settings import Settings

METHOD = "fedavg-meta"


def baseline_toml(live: FleetConfig) -> str:
    """fleet.toml of the same fleet with FedAvg: the same model, rounds, cohort, seed and local SGD; fp32 updates.

    A method with a server optimizer has no comparable local SGD; FedAvg then keeps its defaults.
    """
    hyper = METHODS[METHOD].hyper
    theirs, _ = schema.read(METHODS[live.fleet.method].hyper, live.hyper)
    local = getattr(theirs, "server_optimizer", "sgd") == "sgd"
    names = [name for name in hyper.__dataclass_fields__ if local and not name.startswith("server_")]
    known = {name: live.hyper[name] for name in names if name in live.hyper}
    batch = int(live.hyper.get("support_batch", 0)) + int(live.hyper.get("query_batch", 0))
    if batch:
        known["batch"] = batch
    plain = schema.plain(live)
    fleet = {**plain["fleet"], "method": METHOD, "serve_every": live.fleet.rounds, "enrolment": "open"}
    return config.toml({
        "fleet": fleet, "model": plain["model"], "link": {"up": "fp32", "down": "fp32"},
        "hyper": {**schema.plain(hyper(**known))},
    })


def run(folder: Path) -> None:
    """Computes the baseline of the run in ``folder``; continues an interrupted one."""
    live = Fleet.load(folder / "fleet")
    place = folder / "baseline"
    fleet = create_fleet(place / "fleet", baseline_toml(live.config), _export)
    devices: dict[str, tuple[Path, Settings]] = {}
    for home in sorted((folder / "devices").iterdir()):
        own = config.load(Settings, home / "device.toml")
        samples = str((home / own.data.samples).resolve())
        own_data = {**schema.plain(own.data), "samples": samples}
        path = write_device_folder(
            fleet, own.device.name, place / "devices" / home.name, "mqtt://127.0.0.1:1883",
            data=own_data, train={**schema.plain(own.train), "engine": "torch"},
        )
        devices[own.device.name] = (path.parent, config.load(Settings, path))
    total = fleet.config.fleet.rounds
    with processes.until_signal() as stopped:
        in_one_process.run(fleet, devices, stopped=stopped, progress=lambda number: _progress(number, total))
        if stopped():
            raise KeyboardInterrupt
    with Ledger(fleet.ledger_path, create=False) as ledger:
        storage.write_json(folder / "baseline.json", confusions(ledger, total))


def _progress(number: int, total: int) -> None:
    if number == total or number % max(1, total // 5) == 0:
        processes.say(f"{METHOD} round {number}/{total}")


def confusions(ledger: Ledger, round_number: int) -> dict[str, dict[str, Any]]:
    """device -> ``before`` or ``fine_tuned`` -> confusion counts."""
    counts: dict[str, dict[str, Any]] = {}
    for row in ledger.rows(Evaluation, round=round_number):
        stage = "fine_tuned" if row.stage == "after" else row.stage
        counts.setdefault(row.device, {})[stage] = [list(line) for line in row.confusion]
    return counts


def _export(settings: FleetConfig, head: bool) -> tuple[bytes, bytes]:
    from export.first_model import first

    model = settings.model
    return first(model.name, model.input, model.classes, model.options, head=head, seed=settings.fleet.seed)


if __name__ == "__main__":
    terminal.main(lambda args: run(Path(args[0])))
