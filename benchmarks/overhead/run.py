"""What a round costs beside the bare floor, in one run: seconds, start-up, memory, bytes.

Workload: 8 agents as processes, the LeNet of Acar et al. with 1×32×32 input and ten classes (794,762 float32
parameters), method fedavg, one step of batch 32 a round, 20 rounds, no evaluation, one thread each.

    python benchmarks/overhead/run.py --out benchmarks/overhead/result.json [--repeat 3]

Floor and fleet (fp32, then int8 with error feedback) run in turn, ``--repeat`` times; written are medians and ratios.
Memory of a device is agent + trainer, each with all its pages, as if it were alone on its board. Linux only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from cloud_server.broker import start_broker
from cloud_server.enroll import device_folder
from cloud_server.fleet import Fleet, FleetConfig
from cloud_server.found import found
from cloud_server.ledger import Ledger
from export.first import first
from fleet_core import config
from fleet_core.data.samples import Samples, save
from fleet_core.storage import write_json
from fleet_core.terminal import WITH_PARENT

PARAMETERS = 794_762
RAW_BYTES = PARAMETERS * 4
LIMIT_S = 200
HERE = Path(__file__).parent


def memory_mib(pid: int, field: str = "VmHWM") -> float:
    """Peak (VmHWM) or present (VmRSS) memory of a process; 0 when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def floor(devices: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        broker = start_broker(Path(folder))
        port = broker.url.rpartition(":")[2]
        started = time.time()
        command = [sys.executable, str(HERE / "floor.py")]
        counts = [str(devices), str(rounds)]
        server = subprocess.Popen([*command, "server", port, *counts], stdout=subprocess.PIPE, text=True)
        agents = [subprocess.Popen([*command, "device", port, str(k)]) for k in range(devices)]
        assert server.stdout is not None
        ends, peak, server_peak = [], 0.0, 0.0
        for line in server.stdout:
            ends.append(float(line))
            peak = max(peak, *(memory_mib(a.pid) for a in agents))
            server_peak = memory_mib(server.pid)
        for process in (server, *agents):
            process.wait(60)
        broker.stop()
    return figures(started, ends, peak, server_peak)


def figures(started: float, ends: list[float], device_mib: float, server_mib: float) -> dict[str, Any]:
    steps = [b - a for a, b in pairwise(ends)]
    return {"first_round_s": ends[0] - started, "seconds_per_round": median(steps), "device_mib": device_mib,
            "server_mib": server_mib}


def fleet_text(rounds: int, devices: int, codec: str) -> str:
    return config.toml({
        "fleet": {"name": "overhead", "method": "fedavg", "rounds": rounds, "min_devices": devices,
                  "serve_every": 1_000_000},
        "model": {"name": "lenet", "classes": [str(k) for k in range(10)], "input": {"shape": [1, 32, 32]}},
        "link": {"up": codec, "down": codec},
        "hyper": {"local_steps": 1, "batch": 32, "client_lr": 0.01},
    })


def make(folder: Path, devices: int, rounds: int, codec: str) -> Fleet:
    def export(settings: FleetConfig, head: bool) -> tuple[bytes, bytes]:
        model = settings.model
        return first(model.name, model.input, model.classes, model.options, head=head, seed=0)

    fleet = found(folder / "fleet", fleet_text(rounds, devices, codec), export)
    for k in range(devices):
        rng = np.random.default_rng(k)
        x = rng.normal(size=(64, 1, 32, 32)).astype(np.float32)
        home = folder / "devices" / f"d{k}"
        device_folder(fleet, f"d{k}", home, "mqtt://127.0.0.1:1883")
        save(home / "samples.npz", Samples(x, rng.integers(0, 10, 64), classes=tuple(map(str, range(10)))))
    return fleet


def live(devices: int, rounds: int, codec: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fleet = make(folder, devices, rounds, codec)
        broker = start_broker(folder / "broker")
        environment = {**os.environ, "METAFLEET_BROKER": broker.url, WITH_PARENT: str(os.getpid())}
        started = time.time()
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
        server = subprocess.Popen(
            [sys.executable, "-m", "cloud_server.cli", "server", "start", str(fleet.folder), "--quiet"], **quiet
        )
        agents = [
            subprocess.Popen([sys.executable, "-m", "edge_agent.cli", "run", "--home", str(home)], **quiet)
            for home in sorted((folder / "devices").iterdir())
        ]
        agent_mib = trainer_mib = idle_mib = 0.0
        with Ledger(fleet.ledger_path) as ledger:
            while len(closed := ledger.rounds("closed")) < rounds:
                if server.poll() is not None or time.time() - started > LIMIT_S:
                    raise SystemExit(f"the fleet stopped after {len(closed)} rounds")
                time.sleep(0.5)
                for agent in agents:
                    below = children(agent.pid)
                    if not below and not closed:
                        idle_mib = max(idle_mib, memory_mib(agent.pid, "VmRSS"))
                    agent_mib = max(agent_mib, memory_mib(agent.pid))
                    trainer_mib = max([trainer_mib, *map(memory_mib, below)])
            server_mib = memory_mib(server.pid)
            time.sleep(2)  # the last reports
            ends = [r.closed_at for r in closed if r.closed_at is not None]
            volume = ledger.totals().volume
        for process in (*agents, server):
            process.terminate()
        for process in (*agents, server):
            process.wait(30)
        broker.stop()
    found_figures = figures(started, ends, agent_mib + trainer_mib, server_mib)
    wire = None if volume is None or volume.wire is None else (volume.wire.up + volume.wire.down)
    return {**found_figures, "agent_mib": agent_mib, "trainer_mib": trainer_mib, "idle_mib": idle_mib,
            "wire_ratio_to_raw": None if wire is None else wire / (rounds * devices * RAW_BYTES)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    kinds = {"floor": lambda: floor(options.devices, options.rounds),
             "fp32": lambda: live(options.devices, options.rounds, "fp32"),
             "int8": lambda: live(options.devices, options.rounds, "int8")}
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(options.repeat):
        for kind, measure in kinds.items():
            runs[kind].append(measure())
            print(kind, {k: v if v is None else round(v, 3) for k, v in runs[kind][-1].items()}, flush=True)
    medians = {
        kind: {key: median(run[key] for run in found_runs) for key in found_runs[0] if found_runs[0][key] is not None}
        for kind, found_runs in runs.items()
    }
    floor_s = medians["floor"]["seconds_per_round"]
    ratios = {kind: medians[kind]["seconds_per_round"] / floor_s for kind in ("fp32", "int8")}
    workload = {"devices": options.devices, "rounds": options.rounds, "repeat": options.repeat}
    write_json(options.out, {"workload": workload, "medians": medians, "round_ratio": ratios, "runs": runs})
    print(medians, ratios)


if __name__ == "__main__":
    main()
