"""The overhead workload on Flower and NVFlare, with the bare floor in the same run and the same figures as our own.

    python -m benchmarks.overhead.peers.run --out benchmarks/overhead/peers.json [--repeat 3] [--peers flower nvflare]

Each is deployed as its authors do for separate devices, in the most favourable way found: one float32 array down and
up, no evaluation, 8 clients as processes with one torch thread.

* Flower 1.41: SuperLink and SuperNodes without TLS, ClientApps as processes (there is no other way outside simulation:
  each message starts a process, which loads torch), tasks polled every 0.1 s instead of 1 s.
* NVFlare 2.9: provisioned server and clients (mutual TLS over gRPC, its default), the numpy recipe, the script in the
  client's job process.

The first run installs them into their own virtual environments under build/ (pinned in flower.txt and nvflare.txt),
with torch from this Python. Idle memory and idle traffic are those of a client before its first job.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.overhead import memory
from benchmarks.overhead.networks import Network
from benchmarks.overhead.peers.venvs import HERE, python_of
from benchmarks.overhead.processes import Process, Processes, end_in_order
from benchmarks.overhead.run import (
    LOOK_S,
    Figures,
    Setting,
    Stage,
    arguments,
    outcome,
    pace,
    ratio,
    repeat,
    run_floor,
    settled,
    with_namespaces,
)
from benchmarks.overhead.workload import PARAMETERS, Workload
from fleet_core.base.storage import write_json

LIMIT_S = 1800.0
IDLE_S = 60.0
READY_S = 60.0


def run_flower(workload: Workload, setting: Setting) -> Figures:
    """Flower: SuperLink in the hub, a SuperNode on each node."""
    programs = python_of("flower").parent
    with Stage(workload.devices, setting, broker=False) as (network, processes, _):
        ends = processes.folder / "ends"
        ends.touch()
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OVERHEAD_ENDS": str(ends),
                 "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "PATH": f"{programs}:{os.environ['PATH']}"}
        address = f"{network.address}:8000"
        started = time.time()
        home = processes.folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
        )
        server = processes.start(
            network.hub, str(programs / "flower-superlink"), "--insecure", "--disable-runtime-dependency-installation",
            "--host", network.address, environ={**quiet, "FLWR_HOME": str(home)},
        )
        devices = [
            processes.start(
                node, str(programs / "flower-supernode"), "--insecure", "--superlink", address, "--port",
                str(9100 + k), "--node-config", f"device={k}",
                environ={**quiet, "FLWR_HOME": str(processes.folder / f"home{k}")},
            )
            for k, node in enumerate(network.nodes)
        ]
        processes.says(server, "running", READY_S)
        idle = idle_figures(processes, network, devices) if setting.counting else {}
        settings = f"devices={workload.devices} rounds={workload.rounds}"
        processes.start(
            network.hub, str(programs / "flwr"), "run", str(HERE / "flower_app"), "here", "--run-config", settings,
            environ={**quiet, "FLWR_HOME": str(home)},
        )
        return {**idle, **followed(workload, processes, network, server, devices, started, lambda: lines(ends))}


def lines(path: Path) -> list[float]:
    return [float(line) for line in path.read_text().split()]


def run_nvflare(workload: Workload, setting: Setting) -> Figures:
    """NVFlare: a provisioned server in the hub, a provisioned client on each node."""
    python = str(python_of("nvflare"))
    with Stage(workload.devices, setting, broker=False) as (network, processes, _):
        kits = provision(processes, network, python, workload.devices)
        weights = processes.folder / "weights.npy"
        np.save(weights, np.zeros(PARAMETERS, np.float32))
        own = {"HOME": str(processes.folder)}
        started = time.time()
        server = processes.start(network.hub, *party(python, "server", kits / network.address, "server"), environ=own)
        devices = [
            processes.start(node, *party(python, "client", kits / f"d{k}", f"d{k}"), environ=own)
            for k, node in enumerate(network.nodes)
        ]
        processes.says(server, f"Total clients: {workload.devices}", READY_S)
        idle = idle_figures(processes, network, devices) if setting.counting else {}
        counts = (str(workload.devices), str(workload.rounds))
        job = (str(HERE / "nvflare_job" / "submit.py"), str(kits / "admin@bench.org"), str(weights), *counts)
        processes.start(network.hub, python, *job, environ=own)
        found = followed(
            workload, processes, network, server, devices, started, lambda: persisted(processes.log(server))
        )
        return {**idle, **found}


def provision(processes: Processes, network: Network, python: str, devices: int) -> Path:
    """The startup kits of server, clients and admin, in one folder each."""
    clients = "".join(f"  - {{name: d{k}, type: client, org: bench}}\n" for k in range(devices))
    project = processes.folder / "project.yml"
    template = (HERE / "nvflare_job" / "project.yml").read_text()
    project.write_text(template.format(server=network.address, clients=clients))
    work = processes.folder / "kits"
    made = processes.start(
        network.hub, str(Path(python).parent / "nvflare"), "provision", "-p", str(project), "-w", str(work),
        environ={"HOME": str(processes.folder)},
    )
    processes.until(lambda: made.poll() is not None, READY_S)
    return work / "overhead" / "prod_00"


def party(python: str, role: str, kit: Path, name: str) -> tuple[str, ...]:
    """The command that a kit's start.sh runs."""
    return (python, "-u", "-m", f"nvflare.private.fed.app.{role}.{role}_train", "-m", str(kit), "-s",
            f"fed_{role}.json", "--set", "secure_train=true", f"uid={name}", "org=bench", "config_folder=config")


def persisted(log: str) -> list[float]:
    """When each round's model was aggregated and saved, Unix seconds, from the server's log."""
    found = re.findall(r"^(\S+ \S+),(\d{3}) - FedAvg - INFO - .*End persist model on server", log, re.MULTILINE)
    return [datetime.strptime(when, "%Y-%m-%d %H:%M:%S").timestamp() + int(ms) / 1000 for when, ms in found]


def idle_figures(processes: Processes, network: Network, devices: Sequence[Process]) -> Figures:
    """Clients that wait for a job."""
    time.sleep(READY_S / 6)
    before = network.traffic()
    time.sleep(IDLE_S)
    after = network.traffic()
    found: Figures = {"agent_idle_bytes": settled(processes, [device.pid for device in devices]).peak}
    if before is not None and after is not None:
        found["wire_idle_kb_per_hour"] = (after - before).both / 1000 / len(devices) * 3600 / IDLE_S
    return found


def followed(
    workload: Workload, processes: Processes, network: Network, server: Process, devices: Sequence[Process],
    started: float, ends: Callable[[], list[float]],
) -> Figures:
    """Waits until all rounds are over; the figures."""
    watch = memory.Watch([device.pid for device in devices])
    servers = memory.Watch([server.pid], every_s=1.0)
    before = network.traffic()

    def over() -> bool:
        watch.look()
        servers.look()
        return len(ends()) >= workload.rounds

    processes.until(over, LIMIT_S, LOOK_S)
    after = network.traffic()
    traffic = None if before is None or after is None else after - before
    return {
        **pace(started, ends()), "device_work_bytes": watch.peak, "device_work_bound_bytes": watch.bound,
        "server_bytes": servers.peak, "wire_ratio_to_raw": ratio(traffic, workload),
    }


PEERS = {"flower": run_flower, "nvflare": run_nvflare}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--peers", nargs="+", choices=sorted(PEERS), default=sorted(PEERS))
    options = parser.parse_args()
    end_in_order()
    namespaces = with_namespaces(options.no_namespaces)
    workload = Workload(options.devices, options.rounds)
    for peer in options.peers:
        python_of(peer)  # installed before anything is timed
    kinds: dict[str, Callable[[Setting], Figures]] = {"floor": partial(run_floor, workload)}
    kinds |= {peer: partial(PEERS[peer], workload) for peer in options.peers}
    runs, counted = repeat(kinds, options.repeat, namespaces)
    found = outcome(workload, runs, counted, namespaces)
    found["versions"] = {peer: (HERE / f"{peer}.txt").read_text().split() for peer in options.peers}
    write_json(options.out, found)
    print(found["medians"], found["round_ratio"])


if __name__ == "__main__":
    main()
