"""Memory of a program on a device that uses ``edge_agent.Device``, from ``/proc/PID/smaps_rollup``. Linux only.

    python -m benchmarks.on_device.in_python --out benchmarks/on_device/in_python.json

For every model and each of its homes, ``--repeats`` times in a process of its own: ``Device(home)`` answers a sample,
stores a labelled one and personalizes. USS are the pages that the process has alone, RSS all of its pages; PSS counts a
page of several processes by its share, so it depends on what else runs. MB are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.on_device import homes
from benchmarks.on_device.cases import CASES
from cloud_server.results.result import environment
from fleet_core.base.storage import write_json

PROGRAM = """
import json, re, sys
import numpy as np
from edge_agent import Device

def pages():
    text = open("/proc/self/smaps_rollup").read()
    size = {name: int(kib) << 10 for name, kib in re.findall(r"(\\w+): +(\\d+) kB", text)}
    return {"rss": size["Rss"], "pss": size["Pss"], "uss": size["Private_Clean"] + size["Private_Dirty"]}

device, x = Device(sys.argv[1]), np.load(sys.argv[2])
device.predict(x)
found = {"answered": pages()}
device.label(device.add(x), device.classes[0])
device.personalize()
device.predict(x)
found["personalized"] = pages()
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())
print(json.dumps({**found, "peak": {"rss": int(peak[1]) << 10}, "torch": "torch" in sys.modules}))
"""
"""A user's program."""


def run(home: Path, x: Path) -> dict[str, Any]:
    """Bytes by moment and kind; ``torch``: whether the process has loaded it."""
    command = [sys.executable, "-c", PROGRAM, str(home), str(x)]
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return found


def measured(case: str, repeats: int) -> dict[str, Any]:
    """{home: {moment: {kind: median and each}}} of a model."""
    with tempfile.TemporaryDirectory() as room:
        place = homes.made(CASES[case], Path(room) / "made")
        every = {name: [run(home, place.x) for _ in range(repeats)] for name, home in place.homes.items()}
    return {name: {**_medians(runs), "torch": any(one["torch"] for one in runs)} for name, runs in every.items()}


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        moment: {kind: {"median": statistics.median(values), "each": values}
                 for kind in runs[0][moment] for values in [[one[moment][kind] for one in runs]]}
        for moment in ("answered", "personalized", "peak")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = {name: measured(name, options.repeats) for name in options.models}
    write_json(options.out, {"repeats": options.repeats, "environment": environment(), "models": found})


if __name__ == "__main__":
    main()
