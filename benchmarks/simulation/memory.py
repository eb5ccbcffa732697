"""The memory of a run with many devices, in this process: PFLDyn-Proto on LeNet, eight of 1,000 devices per round.

    python -m benchmarks.simulation.memory [DEVICES [ROUNDS]]       prints JSON

Every device that took part has a dual of the encoder's size on disk (3.2 MB); 500 rounds reach 98 % of them.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.run.simulate import Options, simulate
from fleet_core.data.samples import Samples, save

SAMPLES, COHORT = 12, 8


def measure(devices: int, rounds: int) -> dict[str, Any]:
    """This process's peak memory, and the bytes on disk at the end."""
    rng = np.random.default_rng(0)
    y = np.tile(np.arange(SAMPLES) % 3, devices)
    x = rng.integers(0, 256, (len(y), 1, 32, 32)).astype(np.uint8)
    names = np.repeat([f"device-{k:04}" for k in range(devices)], SAMPLES)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "samples.npz", Samples(x, y, names, None, tuple("abcdefghij")))
        asked = experiments.read({
            "cohort": COHORT,
            "data": {"path": str(Path(folder) / "samples.npz")},
            "model": {"name": "lenet"},
            "budget": {"rounds": rounds},
            "evaluation": {"every": 0, "devices": 1},
            "method": [{"name": "pfldyn-proto", "hyper": {"local_steps": 1, "support_batch": 4, "query_batch": 4}}],
        })
        disk = {"devices_with_state": 0, "states_bytes": 0}

        def told(run: str, row: Any) -> None:
            if row["round"] == rounds:
                states = list(Path(folder).glob("out/*/clients/*"))
                sizes = [path.stat().st_size for state in states for path in state.iterdir()]
                disk.update(devices_with_state=len(states), states_bytes=sum(sizes))

        simulate(asked, Path(folder) / "out", Options(jobs=1, device="cpu"), on_round=told)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024
    return {"devices": devices, "rounds": rounds, "cohort": COHORT, "peak_bytes": peak_bytes, **disk}


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, sys.argv[1:] or ("1000", "500")))))
