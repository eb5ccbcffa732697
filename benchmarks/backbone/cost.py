"""Memory and seconds of one device that trains a round: engine onnx, one thread, in a process without torch."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.compute.onnx_session import open_function
from fleet_core.algorithms.interface import Payload, read_hyper
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.backbone.features import of_file
from fleet_core.backbone.onnx_runtime import runtime
from fleet_core.base import processes, trees
from fleet_core.board import allocator
from fleet_core.model import train_graph
from fleet_core.model.layout import Layout
from fleet_core.training.graph_engine import GraphEngine, Opened, check_golden
from fleet_core.training.local_round import train_one
from fleet_core.training.round_plans import Participant

ROUNDS = 5


def peak_mib() -> float:
    """The peak memory of this program; getrusage may report that of the process that started it."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM:"))


def measured(folder: Path, method_name: str, backbone: str) -> dict[str, float]:
    """Runs in a process of its own. folder: layout.json, train.safetensors, hyper.json, and a device's raw samples x, y
    in samples.npz."""
    allocator.keep_freed()
    runtime()
    layout, method = Layout.from_json((folder / "layout.json").read_bytes()), METHODS[method_name]
    hyper, _ = read_hyper(method, json.loads((folder / "hyper.json").read_text()))
    with np.load(folder / "samples.npz") as stored:
        x, y = stored["x"], stored["y"]
    found = {"start_mib": peak_mib()}
    if backbone:
        began = time.perf_counter()
        features = of_file(Path(backbone))
        x = features.cached(x)
        found["features_s"] = time.perf_counter() - began
        began = time.perf_counter()
        features.cached(features_raw(folder))
        found["features_again_s"] = time.perf_counter() - began
        found["features_mib"] = peak_mib()
    graph = train_graph.unpack((folder / "train.safetensors").read_bytes(), layout)
    opened = Opened(graph, {kind: open_function(data, flushed=True) for kind, data in graph.graphs.items()})
    check_golden(opened)
    broadcast = Payload(trees.only(layout.seeded(0), method.down), {"round": 1.0, "seed": 0.0})
    times = []
    for number in range(ROUNDS):
        began = time.perf_counter()
        train_one(GraphEngine(opened), method, layout, broadcast, Participant({}, x, y, np.random.default_rng(number)),
                  hyper, lambda done, steps: None)
        times.append(time.perf_counter() - began)
    return {**found, "round_s": min(times), "peak_mib": peak_mib(), "parameters": layout.parameters(method.shared)}


def features_raw(folder: Path) -> Any:
    with np.load(folder / "samples.npz") as stored:
        return stored["x"]


def launched(folder: Path, method: str, backbone: str) -> dict[str, float]:
    command = processes.command("benchmarks.backbone.cost", str(folder), method, backbone)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    read: dict[str, float] = json.loads(done.stdout)
    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("method")
    parser.add_argument("backbone", nargs="?", default="")
    options = parser.parse_args()
    print(json.dumps(measured(options.folder, options.method, options.backbone)))


if __name__ == "__main__":
    main()
