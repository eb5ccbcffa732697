"""Cost of a round compared with the bare floor, in one run: seconds, start-up, memory, bytes.

Workload: 8 agents as processes, the LeNet of Acar et al. with 1×32×32 input and ten classes (794,762 float32
parameters), method fedavg, one step of batch 32 per round, 20 rounds, no evaluation, one thread each. Each device is in
its own network namespace where allowed (Linux, root, iproute2).

    python -m benchmarks.overhead.run --out benchmarks/overhead/result.json [--repeat 3] [--no-namespaces]

Floor and fleet (each of ``KINDS``: a codec both ways, and the agents' engine) run in turn, ``--repeat`` times; the
output has medians and ratios. Bytes are counted in one further run of each, in which every TCP segment is sent by
itself (``networks``). Memory is what a device would need alone on its board (``memory``). Linux only.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.overhead import memory, networks
from benchmarks.overhead.networks import Network, Traffic
from benchmarks.overhead.processes import Process, Processes, cpu_s, end_in_order, start_broker
from benchmarks.overhead.workload import PARAMETERS, RAW_BYTES, Workload, make_fleet
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Evaluation
from fleet_core.base.storage import write_json

LIMIT_S = 240.0
FEWEST_ROUNDS = 2
SETTLE_S = 2.0
LOOK_S = 0.1
KINDS = {
    "fp32": ("fp32", "torch"), "int8": ("int8", "torch"), "ternary": ("ternary", "torch"),
    "int8, onnx": ("int8", "onnx"), "ternary, onnx": ("ternary", "onnx"),
}
"""Kind of run -> (codec both ways, engine of the agents)."""

Figures = dict[str, float | None]
"""Figures of one run. Names end in their unit; ``_bytes`` is memory, written in MiB and in MB."""


@dataclass(frozen=True)
class Setting:
    """counting: count bytes, with links that cost time."""

    namespaces: bool
    counting: bool = False


class Stage:
    """The context of one run: a network with a broker in its hub (if wanted), and its processes."""

    def __init__(self, devices: int, setting: Setting, *, broker: bool = True):
        self._devices, self._setting, self._broker, self._stack = devices, setting, broker, ExitStack()

    def __enter__(self) -> tuple[Network, Processes, str]:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            setting = self._setting
            network = stack.enter_context(
                networks.create(self._devices, namespaces=setting.namespaces, one_by_one=setting.counting)
            )
            processes = stack.enter_context(Processes(folder))
            url = start_broker(processes, network) if self._broker else ""
            self._stack = stack.pop_all()
        return network, processes, url

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def run_floor(workload: Workload, setting: Setting) -> Figures:
    """The bare script."""
    with Stage(workload.devices, setting) as (network, processes, url):
        where = url.removeprefix("mqtt://").split(":")
        script = "benchmarks.overhead.floor"
        started = time.time()
        counts = (str(workload.devices), str(workload.rounds))
        server = processes.module(network.hub, script, "server", *where, *counts)
        devices = [
            processes.module(node, script, "device", *where, str(k)) for k, node in enumerate(network.nodes)
        ]
        watch = memory.Watch([device.pid for device in devices])
        used, server_bytes = 0.0, 0

        def over() -> bool:
            nonlocal used, server_bytes
            watch.look()
            server_bytes = max(server_bytes, memory.high_water(server.pid))
            used = max(used, cpu_s([device.pid for device in devices]))
            return server.poll() is not None

        processes.until(over, LIMIT_S, LOOK_S)
        ends = [float(line) for line in processes.log(server).split()]
        traffic = network.traffic()
        return {
            **pace(started, ends), "device_work_bytes": watch.peak, "device_work_bound_bytes": watch.bound,
            "server_bytes": server_bytes, "device_cpu_s": used / workload.devices,
            "wire_ratio_to_raw": ratio(traffic, workload),
        }


def run_fleet(workload: Workload, setting: Setting, codec: str, engine: str = "torch") -> Figures:
    """Our fleet with ``codec`` both ways; after the last round the model is served, as always."""
    with Stage(workload.devices, setting) as (network, processes, url):
        fleet = make_fleet(processes.folder, workload, codec, url, engine)
        started = time.time()
        server = processes.module(
            network.hub, "cloud_server.commands.cli", "server", "start", str(fleet.folder), "--quiet", "--broker", url
        )
        homes = sorted((processes.folder / "devices").iterdir())
        agents = [start_agent(processes, node, home) for node, home in zip(network.nodes, homes, strict=True)]
        pids = [agent.pid for agent in agents]
        with Ledger(fleet.ledger_path) as ledger:
            work = watched(processes, pids, lambda: len(ledger.rounds("closed")) >= workload.rounds)
            at_end: Figures = {"server_cpu_s": cpu_s([server.pid]), "device_cpu_s": used_by(pids) / len(pids)}
            adapting = watched(
                processes, pids, lambda: len(ledger.rows(Evaluation)) >= workload.devices and at_rest(pids)
            )
            session = settled(processes, pids)
            at_end["server_rest_bytes"] = memory.alone(server.pid)
            traffic, volume = network.traffic(), ledger.totals().volume
            ends = [row.closed_at for row in ledger.rounds("closed") if row.closed_at is not None]
        counted = None if volume is None or volume.wire is None else Traffic(volume.wire.up, volume.wire.down)
        return {
            **pace(started, ends), **at_end,
            "device_work_bytes": work.peak, "device_work_bound_bytes": work.bound,
            "device_adapting_bytes": adapting.peak, "agent_session_bytes": session.peak,
            "server_bytes": memory.high_water(server.pid),
            "wire_ratio_to_raw": ratio(traffic, workload),
            "wire_ratio_to_raw_by_agents": ratio(counted, workload),
        }


def run_idle(setting: Setting) -> Figures:
    """An agent that is connected and has heard of no round, because there is no aggregator."""
    with Stage(1, setting) as (network, processes, url):
        make_fleet(processes.folder, Workload(1, 1), "fp32", url)
        agent = start_agent(processes, network.nodes[0], processes.folder / "devices" / "d0")
        processes.says(agent, "is on")
        return {"agent_idle_bytes": settled(processes, [agent.pid]).peak}


def start_agent(processes: Processes, node: networks.Node, home: Path) -> Process:
    return processes.module(node, "edge_agent.commands.cli", "run", "--home", str(home))


def watched(processes: Processes, pids: Sequence[int], over: Callable[[], object]) -> memory.Watch:
    """Their memory until ``over``."""
    watch = memory.Watch(pids)

    def look() -> object:
        watch.look()
        return over()

    processes.until(look, LIMIT_S, LOOK_S)
    return watch


def settled(processes: Processes, pids: Sequence[int]) -> memory.Watch:
    """Their memory at rest: each is sampled once, after two seconds."""
    time.sleep(SETTLE_S)
    watch = memory.Watch(pids, every_s=0.0)
    for _ in pids:
        watch.look()
    return watch


def at_rest(pids: Sequence[int]) -> bool:
    """Whether no agent has a trainer."""
    return all(len(memory.family(pid)) == 1 for pid in pids)


def used_by(pids: Sequence[int]) -> float:
    """CPU seconds of devices, including their trainers."""
    return cpu_s([each for pid in pids for each in memory.family(pid)])


def pace(started: float, ends: Sequence[float]) -> Figures:
    """started, ends: Unix seconds of the first process and of every round's end."""
    return {"first_round_s": ends[0] - started, "seconds_per_round": median(b - a for a, b in pairwise(ends))}


def ratio(traffic: Traffic | None, workload: Workload) -> float | None:
    """Bytes up and down ÷ the raw float32 models, one way."""
    return None if traffic is None else traffic.both / workload.raw_bytes()


# Several runs, and the output ------------------------------------------------------------------------------------


def summary(runs: Sequence[Figures]) -> dict[str, Any]:
    """Medians over the runs that have the figure; memory in both units."""
    found = dict[str, Any]()
    for name in runs[0]:
        values = [value for run in runs if (value := run.get(name)) is not None]
        if values and name.endswith("_bytes"):
            found[name.removesuffix("_bytes")] = memory.both(int(median(values)))
        else:
            found[name] = round(median(values), 4) if values else None
    return found


def environment(namespaces: bool) -> dict[str, Any]:
    return {"system": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count(),
            "namespaces": namespaces}


def say(kind: str, figures: Figures) -> None:
    print(kind, summary([figures]), file=sys.stderr, flush=True)


def repeat(
    kinds: dict[str, Callable[[Setting], Figures]], times: int, namespaces: bool
) -> tuple[dict[str, list[Figures]], dict[str, Figures]]:
    """(figures of each kind's ``times`` runs, taken in turn; figures of its one run that counts bytes). Without
    namespaces there is no such run, and the agents' own counters are used."""
    runs: dict[str, list[Figures]] = {kind: [] for kind in kinds}
    for _ in range(times):
        for kind, measure in kinds.items():
            found = measure(Setting(namespaces))
            runs[kind].append({k: v for k, v in found.items() if not (namespaces and k.startswith("wire"))})
            say(kind, runs[kind][-1])
    counted = dict[str, Figures]()
    for kind, measure in kinds.items() if namespaces else ():
        found = measure(Setting(True, counting=True))
        counted[kind] = {k: v for k, v in found.items() if k.startswith(("wire", "agent_idle"))}
        say(f"{kind}, bytes", counted[kind])
    return runs, counted


def outcome(
    workload: Workload, runs: dict[str, list[Figures]], counted: dict[str, Figures], namespaces: bool
) -> dict[str, Any]:
    """The output: medians of times and memory, bytes of the run that counted them, ratios to the floor."""
    medians = {kind: summary(of_kind) for kind, of_kind in runs.items()}
    for kind, figures in counted.items():
        medians[kind].update(summary([figures]))
    floor_s = medians["floor"]["seconds_per_round"]
    paced = {kind: found["seconds_per_round"] for kind, found in medians.items() if "seconds_per_round" in found}
    return {
        "workload": {**asdict(workload), "parameters": PARAMETERS, "raw_bytes": RAW_BYTES},
        "repeat": len(runs["floor"]),
        "environment": environment(namespaces),
        "round_ratio": {kind: round(seconds / floor_s, 3) for kind, seconds in paced.items()},
        "medians": medians,
        "runs": runs,
    }


def rounds(text: str) -> int:
    """An argument: enough rounds for seconds per round."""
    if (count := int(text)) < FEWEST_ROUNDS:
        raise argparse.ArgumentTypeError(
            f"{count} is too few: seconds per round are measured between two rounds' ends; "
            f"expected at least {FEWEST_ROUNDS}"
        )
    return count


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that the benchmarks of this folder share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=rounds, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-namespaces", action="store_true", help="run every process on the loopback interface")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def with_namespaces(refused: bool) -> bool:
    """Whether namespaces are used; says why not."""
    reason = "--no-namespaces" if refused else networks.unavailable()
    if reason is not None:
        print(f"every process on the loopback interface: {reason}", file=sys.stderr)
    return reason is None


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND",
                        help=f"beside the floor, of: {'; '.join(KINDS)}")
    options = parser.parse_args()
    end_in_order()
    namespaces = with_namespaces(options.no_namespaces)
    workload = Workload(options.devices, options.rounds)
    kinds: dict[str, Callable[[Setting], Figures]] = {"floor": partial(run_floor, workload)}
    kinds |= {kind: partial(run_fleet, workload, codec=codec, engine=engine)
              for kind, (codec, engine) in KINDS.items() if kind in options.only}
    runs, counted = repeat(kinds, options.repeat, namespaces)
    runs["idle"] = [run_idle(Setting(namespaces)) for _ in range(options.repeat)]
    found = outcome(workload, runs, counted, namespaces)
    write_json(options.out, found)
    print(found["medians"], found["round_ratio"])


if __name__ == "__main__":
    main()
