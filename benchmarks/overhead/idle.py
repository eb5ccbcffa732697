"""What an agent sends and receives while nothing goes on: bytes of its wire, per hour, and what a keepalive costs.

A fleet of one device finishes its one round; the agent then stays connected, the judged model served, and its network
namespace's interface is read at the beginning and at the end of ``--minutes``. Needs Linux, root and iproute2.

    python -m benchmarks.overhead.idle --out benchmarks/overhead/idle.json [--minutes 10]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.overhead import rooms
from benchmarks.overhead.crew import end_in_order
from benchmarks.overhead.run import SETTLE_S, Setting, Stage, at_rest, start_agent, watched
from benchmarks.overhead.workload import Workload, make_fleet
from cloud_server.records.ledger import Ledger
from cloud_server.records.ledger_tables import Evaluation
from fleet_core.base.storage import write_json

BAR_KB_PER_HOUR = 20.0
HEADERS_BYTES = 20 + 20 + 12  # IPv4, TCP, time stamps
PING_BYTES = 2  # of a PINGREQ, and of the PINGRESP to it


def keepalive_bytes(ethernet: bool = False) -> int:
    """One exchange: PINGREQ, PINGRESP (which acknowledges it), and the acknowledgement of that."""
    return 3 * (HEADERS_BYTES + (rooms.ETHERNET_BYTES if ethernet else 0)) + 2 * PING_BYTES


def keepalive_kb_per_hour(keepalive_s: float, *, ethernet: bool = False) -> float:
    """When nothing else is said."""
    return keepalive_bytes(ethernet) * 3600 / keepalive_s / 1000


def measure(minutes: float) -> dict[str, Any]:
    """Raises SystemExit without namespaces."""
    if (reason := rooms.unavailable()) is not None:
        raise SystemExit(f"the bytes of one agent are read from its own interface: {reason}")
    with Stage(1, Setting(namespaces=True)) as (house, crew, url):
        fleet = make_fleet(crew.folder, Workload(1, 1), "fp32", url)
        crew.module(
            house.hub, "cloud_server.commands.cli", "server", "start", str(fleet.folder), "--quiet", "--broker", url
        )
        agent = start_agent(crew, house.rooms[0], crew.folder / "devices" / "d0")
        with Ledger(fleet.ledger_path) as ledger:
            watched(crew, [agent.pid], lambda: ledger.rows(Evaluation) and at_rest([agent.pid]))
        time.sleep(SETTLE_S)
        before, began = house.passed(), time.monotonic()
        crew.until(lambda: time.monotonic() - began >= minutes * 60, minutes * 60 + 60, every_s=1.0)
        after, hours = house.passed(), (time.monotonic() - began) / 3600
        assert before is not None
        assert after is not None
        passed = after - before
    return {
        "minutes": minutes, "up_bytes": passed.up, "down_bytes": passed.down,
        "kb_per_hour": round(passed.both / 1000 / hours, 2), "bar_kb_per_hour": BAR_KB_PER_HOUR,
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
