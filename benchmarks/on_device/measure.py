"""Time and memory of one personalization in a separate process, without torch.

    python -m benchmarks.on_device.measure WAY GRAPH WEIGHTS SUPPORT.npz SETTING        prints JSON

SETTING is JSON. The time runs from the support set in memory to a ready predictor: opening sessions, taking steps, and
putting the adapted weights into the graph that answers. The peak is the kernel's high-water mark of the whole process,
including interpreter and onnxruntime.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.on_device.ways import WAYS, load, predictor
from fleet_core.backbone.onnx_runtime import runtime


def measure(way_name: str, graph_path: str, weights_path: str, support: str, setting: str) -> dict[str, Any]:
    """seconds, samples, and bytes before the personalization, at the peak and after it."""
    way = next(way for way in WAYS if way.name == way_name)
    graph, weights = load(Path(graph_path), Path(weights_path))
    with np.load(support, allow_pickle=False) as file:
        x, y = file["x"], file["y"]
    runtime()
    before = status_bytes("VmRSS")
    started = time.perf_counter()
    ready = predictor(way, graph, weights, x, y, json.loads(setting))
    ready.probabilities(x[:1])
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "samples": len(y), "before_bytes": before, "peak_bytes": status_bytes("VmHWM"),
            "after_bytes": status_bytes("VmRSS"), "torch": "torch" in sys.modules}


def status_bytes(key: str) -> int:
    """Memory of this process, from the kernel. Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
