"""How many samples a device should run through a model at a time: processor time and memory of embedding.

    python -m benchmarks.on_device.batches --out benchmarks/on_device/batches.json        Linux

Embeds ``SAMPLES`` samples in a process without torch, one for each model, batch and repeat, in turn: microseconds of
processor time per sample, and by how much the process's highest memory exceeds what it held before. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.on_device.measure import status_bytes
from cloud_server.results.result import environment
from edge_agent.compute import onnx_session
from fleet_core.base import storage
from fleet_core.base.storage import write_json
from fleet_core.model import graph_bundle

if TYPE_CHECKING:
    from benchmarks.on_device.cases import Case

SAMPLES = 500
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def embedded(folder: Path, batch: int) -> dict[str, float]:
    """The figures of one process."""
    onnx_session.BATCH = batch
    graph = graph_bundle.unpack((folder / "graph.bundle").read_bytes())
    arrays, _ = storage.unpack((folder / "body.safetensors").read_bytes(), where="weights")
    x = np.load(folder / "x.npy")
    session = onnx_session.open_kind(graph, "embed", storage.unflatten(arrays))
    before, started = status_bytes("VmRSS"), time.process_time()
    session.run(x)
    return {"us": 1e6 * (time.process_time() - started) / len(x), "bytes": status_bytes("VmHWM") - before}


def measured(folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """By batch, for the model in ``folder``."""
    runs: dict[int, list[dict[str, float]]] = {batch: [] for batch in BATCHES}
    for _ in range(repeats):
        for batch, each in runs.items():
            command = [sys.executable, "-m", "benchmarks.on_device.batches", "--one", str(folder), str(batch)]
            each.append(json.loads(subprocess.check_output(command)))
    return {str(batch): {key: statistics.median(one[key] for one in each) for key in ("us", "bytes")}
            for batch, each in runs.items()}


def make(case: Case, folder: Path) -> None:
    """The files that ``embedded`` reads."""
    from benchmarks.on_device.cases import drawn, plain  # with torch
    from fleet_core.learning import models

    layout = case.layout()
    (folder / "graph.bundle").write_bytes(graph_bundle.pack(plain(layout)))
    storage.write_arrays(folder / "body.safetensors", storage.flatten({"body": models.initial(layout, 0)["body"]}))
    np.save(folder / "x.npy", drawn(layout, SAMPLES, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(embedded(Path(options.one[0]), int(options.one[1]))))
        return
    if options.out is None:
        parser.error("--out is missing")
    from benchmarks.on_device.cases import CASES

    found: dict[str, Any] = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as room:
            make(case, Path(room))
            found[name] = measured(Path(room), options.repeats)
        print(name, json.dumps(found[name]), flush=True)
    write_json(options.out, {"samples": SAMPLES, "repeats": options.repeats, "environment": environment(),
                             "models": found})


if __name__ == "__main__":
    main()
