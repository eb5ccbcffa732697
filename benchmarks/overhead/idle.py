"""Traffic of an idle agent: bytes on its link per hour, and what a keepalive costs.

A fleet of one device finishes its one round; the agent then stays connected and serves the model. Its network interface
is read at the beginning and at the end of ``--minutes``. Needs Linux, root and iproute2.

    python -m benchmarks.overhead.idle --out benchmarks/overhead/idle.json [--minutes 10]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.overhead import networks
from benchmarks.overhead.processes import end_in_order
from benchmarks.overhead.run import SETTLE_S, Setting, Stage, at_rest, start_agent, watched
from benchmarks.overhead.workload import Workload, make_fleet
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Evaluation
from fleet_core.base.storage import write_json

BAR_KB_PER_HOUR = 20.0
HEADERS_BYTES = 20 + 20 + 12  # IPv4, TCP, time stamps
PING_BYTES = 2  # of a PINGREQ, and of the PINGRESP to it


def keepalive_bytes(ethernet: bool = False) -> int:
    """One exchange: PINGREQ, PINGRESP (which acknowledges it), and the acknowledgement of that."""
    return 3 * (HEADERS_BYTES + (networks.ETHERNET_BYTES if ethernet else 0)) + 2 * PING_BYTES


def keepalive_kb_per_hour(keepalive_s: float, *, ethernet: bool = False) -> float:
    """When nothing else is sent."""
    return keepalive_bytes(ethernet) * 3600 / keepalive_s / 1000


def measure(minutes: float) -> dict[str, Any]:
    """Raises SystemExit without namespaces."""
    if (reason := networks.unavailable()) is not None:
        raise SystemExit(f"the bytes of one agent are read from its own interface: {reason}")
    with Stage(1, Setting(namespaces=True)) as (network, processes, url):
        fleet = make_fleet(processes.folder, Workload(1, 1), "fp32", url)
        processes.module(
            network.hub, "cloud_server.commands.cli", "server", "start", str(fleet.folder), "--quiet", "--broker", url
        )
        agent = start_agent(processes, network.nodes[0], processes.folder / "devices" / "d0")
        with Ledger(fleet.ledger_path) as ledger:
            watched(processes, [agent.pid], lambda: ledger.rows(Evaluation) and at_rest([agent.pid]))
        time.sleep(SETTLE_S)
        before, began = network.traffic(), time.monotonic()
        processes.until(lambda: time.monotonic() - began >= minutes * 60, minutes * 60 + 60, every_s=1.0)
        after, hours = network.traffic(), (time.monotonic() - began) / 3600
        assert before is not None
        assert after is not None
        traffic = after - before
    return {
        "minutes": minutes, "up_bytes": traffic.up, "down_bytes": traffic.down,
        "kb_per_hour": round(traffic.both / 1000 / hours, 2), "bar_kb_per_hour": BAR_KB_PER_HOUR,
        "by_keepalive_alone": {
            f"{seconds} s": {"kb_per_hour": round(keepalive_kb_per_hour(seconds), 2),
                             "with_ethernet_headers": round(keepalive_kb_per_hour(seconds, ethernet=True), 2)}
            for seconds in (30, 60, 120)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    end_in_order()
    found = measure(options.minutes)
    write_json(options.out, found)
    print(found)


if __name__ == "__main__":
    main()
