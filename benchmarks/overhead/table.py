"""The tables of benchmarks/README.md, from the output of the overhead benchmarks.

    python -m benchmarks.overhead.table benchmarks/overhead/result.json [benchmarks/overhead/peers.json]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROWS = {
    "seconds_per_round": "seconds per round",
    "round_ratio": "ratio to the bare script",
    "first_round_s": "start to the end of the first round, s",
    "device_work": "a device at work, MB seen (at most)",
    "device_adapting": "a device that adapts the served model, MB",
    "agent_session": "an agent with a session, MB",
    "agent_idle": "an idle agent, MB",
    "server": "server, MB",
    "server_rest": "server after the last round, MB",
    "wire_ratio_to_raw": "wire bytes up + down, ratio to raw float32 one way",
    "wire_idle_kb_per_hour": "idle traffic of an agent, kB per hour",
}


def cell(medians: Mapping[str, Any], row: str) -> str:
    """A figure as text; a dash if it was not measured."""
    found = medians.get(row)
    if found is None:
        return "-"
    if not isinstance(found, dict):
        return f"{found:.0f}" if found >= 100 else f"{found:.2f}"
    bound = medians.get(f"{row}_bound")
    return f"{found['mb']:.0f}" + (f" ({bound['mb']:.0f})" if bound else "")


def table(outcome: Mapping[str, Any]) -> str:
    """One column per kind of run, in Markdown."""
    medians = dict(outcome["medians"])
    idle = medians.pop("idle", {})  # an agent without a graph, the same for every codec
    kinds = {
        kind: {**({} if kind == "floor" else idle), **found, "round_ratio": outcome["round_ratio"][kind]}
        for kind, found in medians.items()
    }
    order = sorted(kinds, key=lambda kind: (kind != "floor", kind))
    lines = [f"| figure, median of {outcome['repeat']} | " + " | ".join(order) + " |", "|---" * (len(order) + 1) + "|"]
    for row, name in ROWS.items():
        cells = [cell(kinds[kind], row) for kind in order]
        if any(c != "-" for c in cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    print("\n\n".join(table(json.loads(Path(name).read_text())) for name in sys.argv[1:]))


if __name__ == "__main__":
    main()
