"""Does the memory of the aggregator and of the broker grow in one long life, when nothing disturbs the fleet?

    python -m benchmarks.soak.one_life [--rounds 1200] [--minutes 20] --out benchmarks/soak/one_life.json

An aggregator, two devices and mosquitto as processes, over TCP on loopback. No client connects to measure. The slope of
resident memory is fitted to each quarter of the rounds: what warms up ends, what leaks goes on.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.soak import sampling
from benchmarks.soak.growth import Sample, growth
from cloud_server.ledger.ledger import Ledger
from fleet_core.base import processes, storage
from tests.support.faults import mosquitto
from tests.support.programs import Programs, device, edge_agent, metafleet, small_fleet

QUARTERS, KEPT_ROUNDS, LOOK_S = 4, 50, 0.2


def measured(folder: Path, rounds: int, minutes: float) -> dict[str, list[tuple[int, int]]]:
    """Process -> (round, resident bytes) after each round."""
    fleet = small_fleet(folder / "fleet", rounds=rounds)
    toml = fleet.folder / "fleet.toml"
    above, keep, below = toml.read_text().partition("\n[keep]\n")
    toml.write_text(above + keep + below.replace("rounds = 1000\n", f"rounds = {KEPT_ROUNDS}\n", 1))
    found: dict[str, list[tuple[int, int]]] = {"aggregator": [], "broker": []}
    programs, until_s = Programs(folder), time.monotonic() + 60 * minutes
    with mosquitto(folder / "broker") as broker:
        try:
            server = programs.start(*metafleet("server", "start", fleet.folder, "--quiet", "--broker", broker.url))
            for home in (device(fleet, name, folder / name) for name in ("d0", "d1")):
                programs.start(*edge_agent("run", "--home", home, "--broker", broker.url))
            assert broker.process is not None
            pids, number = {"aggregator": server.process.pid, "broker": broker.process.pid}, 0
            with Ledger(fleet.ledger_path, create=False) as ledger:
                while number < rounds and time.monotonic() < until_s:
                    if (closed := ledger.closed_count()) > number:
                        number = closed
                        for name, pid in pids.items():
                            found[name].append((number, sampling.memory(pid)))
                    time.sleep(LOOK_S)
        finally:
            programs.stop()
    return found


def slopes(points: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """For each quarter: its rounds, the mean, and what a round adds, with its standard error; in bytes."""
    found = []
    for quarter in range(QUARTERS):  # growth leaves out the first rounds of each
        part = points[quarter * len(points) // QUARTERS : (quarter + 1) * len(points) // QUARTERS]
        one = growth([Sample(number, 0, value) for number, value in part], 0)
        found.append({"from": part[0][0], "to": part[-1][0], "mean": round(one.level),
                      "a_round": None if one.per_100 is None else round(one.per_100 / 100, 1),
                      "error": None if one.error is None else round(one.error / 100, 1)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1200)
    parser.add_argument("--minutes", type=float, default=20.0, help="at most")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ[processes.WITH_PARENT] = str(os.getpid())
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        found = measured(Path(folder), options.rounds, options.minutes)
    result = {name: slopes(points) for name, points in found.items()}
    storage.write_json(options.out, result)
    for name, quarters in result.items():
        for one in quarters:
            processes.say(f"{name}, rounds {one['from']} to {one['to']}: {one['mean'] / 1e6:.2f} MB, "
                          f"{one['a_round']} ± {one['error']} bytes a round")


if __name__ == "__main__":
    main()
