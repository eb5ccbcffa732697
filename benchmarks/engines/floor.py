"""The memory of a device without torch: an interpreter that loads, one after the other, what an agent needs.

    python -m benchmarks.engines.floor --out benchmarks/engines/floor.json

Resident sizes in MB of 10^6 bytes, as of a process that is alone on its board. Medians of three processes. The last
rows are a session of LeNet (794,762 parameters) that has answered, and that session after free memory was returned.
"""

from __future__ import annotations

import importlib
import json
import sys

MODULES: dict[str, tuple[str, ...]] = {
    "Python": (),
    "its argparse, tomllib, ssl": ("argparse", "tomllib", "ssl"),
    "numpy": ("numpy",),
    "paho-mqtt": ("paho.mqtt.client",),
    "cryptography": ("cryptography.hazmat.primitives.asymmetric.ed25519", "cryptography.x509"),
    "safetensors": ("safetensors.numpy",),
    "onnxruntime": ("onnxruntime",),
    "the agent's own modules": ("edge_agent.commands.run", "edge_agent.compute.onnx_trainer"),
}
OPENED, TRIMMED = "a session, after an answer", "the same, free memory returned"
TIMES = 3


def resident() -> float:
    """MB of this process."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 / 1e6 for line in file if line.startswith("Rss:"))


def measured(bundle: str) -> dict[str, float]:
    """Runs in a process of its own, which has imported nothing else. bundle: the file of a fleet's graphs."""
    found = {}
    for name, modules in MODULES.items():
        for module in modules:
            importlib.import_module(module)
        found[name] = resident()
    from pathlib import Path

    from edge_agent.compute.onnx_session import open_kind
    from fleet_core.board import allocator
    from fleet_core.model import graph_bundle

    allocator.keep_freed()
    graph = graph_bundle.read(Path(bundle))
    session = open_kind(graph, "predict", graph.layout.seeded(0))
    session.run(graph.golden["x"])
    found[OPENED] = resident()
    allocator.trim()
    found[TRIMMED] = resident()
    return found


def main() -> None:
    import statistics
    import subprocess
    import tempfile
    from pathlib import Path

    from export.first_model import first
    from fleet_core.base import processes
    from fleet_core.base.storage import write_json
    from fleet_core.model.layout import InputSpec

    if len(sys.argv) != 3 or sys.argv[1] != "--out":
        sys.exit(__doc__)
    bundle, _ = first("lenet", InputSpec((1, 32, 32)), tuple("abcdefghij"), {}, head=True, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bundle"
        path.write_bytes(bundle)
        command = processes.command("benchmarks.engines.floor", "--measure", str(path))
        runs = [json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
                for _ in range(TIMES)]
    write_json(Path(sys.argv[2]), {name: round(statistics.median(run[name] for run in runs), 1) for name in runs[0]})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measured(sys.argv[2])))
    else:
        main()
