"""The memory of the engine onnx in a thread of the agent and in a child process, while it trains and afterwards.

    python -m benchmarks.engines.memory --out benchmarks/engines/memory.json

A process with the agent's modules, and one without them as a child would be, open a graph and take three rounds of ten
steps. Figures are proportional set sizes in MB of 10^6 bytes, by Linux's ``smaps_rollup``, highest of the rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fleet_core.algorithms.interface import Payload
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import processes, trees
from fleet_core.base.storage import write_json
from fleet_core.board import allocator
from fleet_core.model import train_graph
from fleet_core.model.layout import InputSpec, Layout
from fleet_core.training.graph_engine import GraphEngine, Opened, check_golden
from fleet_core.training.local_round import train_one
from fleet_core.training.round_plans import Participant

CASES = {
    "1-D CNN, pfldyn-proto": ("cnn1d", InputSpec((3, 128)), "pfldyn-proto"),
    "LeNet, fedavg": ("lenet", InputSpec((3, 32, 32)), "fedavg"),
}
ROUNDS, STEPS, BATCH = 3, 10, 32


def pss() -> float:
    """MB of this process."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 / 1e6 for line in file if line.startswith("Pss:"))


def measured(folder: Path, method_name: str, *, agent: bool) -> dict[str, float]:
    """Runs in a process of its own. agent: with the modules of the agent."""
    if agent:
        import edge_agent.commands.run  # noqa: F401  what the agent has loaded
    from edge_agent.compute.onnx_session import open_function
    from fleet_core.backbone.onnx_runtime import runtime

    allocator.keep_freed()
    runtime()
    found = {"before": pss()}
    layout, method = Layout.from_json((folder / "layout.json").read_bytes()), METHODS[method_name]
    graph = train_graph.unpack((folder / "train.safetensors").read_bytes(), layout)
    opened = Opened(graph, {kind: open_function(data, flushed=True) for kind, data in graph.graphs.items()})
    check_golden(opened)
    rng, known = np.random.default_rng(0), method.hyper.__dataclass_fields__
    x, y = rng.normal(size=(200, *layout.input.shape)).astype(np.float32), rng.integers(0, len(layout.classes), 200)
    sizes = {"batch": BATCH, "support_batch": BATCH // 2, "query_batch": BATCH // 2}
    hyper = method.hyper(local_steps=STEPS, **{name: size for name, size in sizes.items() if name in known})
    broadcast = Payload(trees.only(layout.seeded(0), method.down), {"round": 1.0, "seed": 0.0})
    found["training"] = 0.0

    def note(done: int, steps: int) -> None:
        found["training"] = max(found["training"], pss())

    for number in range(ROUNDS):
        train_one(GraphEngine(opened), method, layout, broadcast, Participant({}, x, y, np.random.default_rng(number)),
                  hyper, note)
    allocator.trim()
    found["kept open"] = pss()
    del opened
    allocator.trim()
    found["afterwards"] = pss()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs=3, metavar=("FOLDER", "METHOD", "WHERE"), help="what each process runs")
    options = parser.parse_args()
    if options.measure:
        folder, method, where = options.measure
        return print(json.dumps(measured(Path(folder), method, agent=where == "thread")))
    found: dict[str, Any] = {}
    for case, (model, spec, method) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            _make(Path(folder), model, spec, method)
            found[case] = {where: _launched(folder, method, where) for where in ("thread", "child")}
    write_json(options.out, found)
    return None


def _make(folder: Path, model: str, spec: InputSpec, method: str) -> None:
    from export.train_graph import export_train  # in this process alone: torch is not to be measured
    from fleet_core.learning import models

    layout = models.describe(model, spec, tuple("abcdefghij"), {})
    graph = export_train(layout, METHODS[method], METHODS[method].hyper(), models.initial(layout, 0))
    (folder / "layout.json").write_text(layout.to_json())
    (folder / "train.safetensors").write_bytes(train_graph.pack(graph))


def _launched(folder: str, method: str, where: str) -> dict[str, float]:
    command = processes.command("benchmarks.engines.memory", "--measure", folder, method, where)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    read: dict[str, float] = json.loads(done.stdout)
    return read


if __name__ == "__main__":
    main()
