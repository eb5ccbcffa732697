"""Times answers to one sample, in a process without torch: a bare session and the agent's calls, in turn.

    python -m benchmarks.on_device.timed HOME GRAPH.onnx WEIGHTS.npz SAMPLE.npy CALLS        prints JSON
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.on_device.bare import session
from edge_agent.inference.service import service_of
from fleet_core.board import allocator
from fleet_core.board.device_settings import settings_of

WARM = 50


def main(home: str, graph: str, weights: str, sample: str, calls: str) -> None:
    allocator.keep_freed()  # as edge-agent run and edge-agent serve do
    x = np.load(sample)[None]
    bare = session(graph, weights)
    service = service_of(Path(home), settings_of(Path(home)))
    service.restore()
    times = timed({"bare": lambda: bare.run(None, {"x": x}), "predict": lambda: service.predict(x),
                   "answers": lambda: service.answers(x)}, int(calls))
    assert "torch" not in sys.modules
    medians = {f"{name}_us": 1e6 * statistics.median(each) for name, each in times.items()}
    print(json.dumps({**medians, "personalization": service.answers(x).personalization}))


def timed(called: dict[str, Callable[[], Any]], calls: int) -> dict[str, list[float]]:
    """Seconds of each, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in called}
    for number in range(-WARM, calls):
        for name, call in called.items():
            started = time.perf_counter()
            call()
            if number >= 0:
                times[name].append(time.perf_counter() - started)
    return times


if __name__ == "__main__":
    main(*sys.argv[1:])
