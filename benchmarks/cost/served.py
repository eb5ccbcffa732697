"""What served models cost: payload by kind of a whole fleet in one process on the heartbeats.

    python benchmarks/cost/served.py --out FOLDER [--rounds 40] [--codec int8] [--method pfldyn-proto] [--data har]
        [--devices 8]

The real aggregator and agents of the demo's eight patients, or of the clients of a set of ``metafleet datasets``, all
in every round, a served model after every ten rounds,
seed 0. FOLDER must not hold a fleet. ``whole``: what the served models would cost whole, in fp32, to every device, each
at the size of the last one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cloud_server.identity.create_fleet import create_fleet
from cloud_server.ledger.ledger import Ledger
from cloud_server.records.checkpoint import Checkpoints
from cloud_server.running import demo_setup, in_one_process
from export.first_model import first
from fleet_core.base import processes
from fleet_core.board.device_settings import settings_of
from fleet_core.data.samples import save
from fleet_core.data.sets.set_cache import load_set
from fleet_core.model import payloads


def bytes_by_kind(folder: Path, options: demo_setup.Options) -> dict[str, dict[str, int]]:
    """Kind -> bytes of all devices, up and down."""

    def export(settings: Any, head: bool) -> tuple[bytes, bytes]:
        model = settings.model
        return first(model.name, model.input, model.classes, model.options, head=head, seed=settings.fleet.seed)

    fleet = create_fleet(folder / "fleet", demo_setup.demo_fleet_toml(options), export)
    homes, _ = demo_setup.write_devices(options, folder, fleet)
    with Ledger(fleet.ledger_path) as ledger:
        for home in homes:
            ledger.request_enrolment(home.name)
    in_one_process.run(fleet, {home.name: (home, settings_of(home)) for home in homes}, log=processes.say)
    with Ledger(fleet.ledger_path, create=False) as ledger:
        kinds = ledger.totals().payload_by_kind
        found = {kind: {"up": moved.up, "down": moved.down} for kind, moved in sorted(kinds.items())}
    served = Checkpoints(fleet.folder / "state").served()
    assert served is not None
    times = -(-options.rounds // fleet.config.fleet.serve_every)
    whole = times * len(homes) * len(payloads.encode("fp32", served.weights))
    return {**found, "whole": {"up": 0, "down": whole}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the fleet and its devices")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--method", default="pfldyn-proto")
    parser.add_argument("--data", default="heartbeat", help="heartbeat, or a set whose samples have clients")
    parser.add_argument("--devices", type=int, default=8)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    data = given.data
    if data != "heartbeat":
        data = str(given.out / "samples.npz")
        save(Path(data), load_set(given.data).train)
    options = demo_setup.Options(rounds=given.rounds, codec=given.codec, method=given.method, new_devices=0,
                                 data=data, devices=given.devices)
    print(json.dumps(bytes_by_kind(given.out, options)))


if __name__ == "__main__":
    main()
