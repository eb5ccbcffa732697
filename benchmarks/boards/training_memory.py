"""Peak memory of one round of training, by method, parameters and batch, each in its own process on this machine.

    python benchmarks/boards/training_memory.py > benchmarks/boards/training_memory.json

``fleet_core.board.limits`` takes its bytes per parameter from here. Measured on x86-64 with the installed torch; a
board has another build of torch, whose memory before there is a model has to be measured on the board.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys

CASES = [
    (method, model, width, batch)
    for method in ("fedavg", "pfldyn-proto", "scaffold")
    for model, width, batch in (("lenet", 0, 32), ("mlp", 256, 32), ("mlp", 1024, 32), ("mlp", 2048, 32))
] + [("fedavg", "lenet", 0, batch) for batch in (1, 128, 512)]


def one(name: str, model: str, width: int, batch: int) -> dict[str, float | int | str]:
    """A round of three steps. peak_mib: of this process; base_mib: before there was a model."""
    from dataclasses import fields, replace

    import numpy as np
    import torch

    from fleet_core.algorithms.interface import Payload
    from fleet_core.algorithms.methods.registry import METHODS
    from fleet_core.learning import models
    from fleet_core.learning.local_training import train_round
    from fleet_core.model.layout import InputSpec

    torch.set_num_threads(1)
    torch.ones(8, 8) @ torch.ones(8, 8)
    base_mib = peak_mib()
    shape = (3, 32, 32) if model == "lenet" else (512,)
    options = {} if model == "lenet" else {"hidden": [width, width, width]}
    layout = models.describe(model, InputSpec(shape), [str(k) for k in range(10)], options)
    method, rng = METHODS[name], np.random.default_rng(0)
    hyper = method.hyper()
    sizes = {"batch": batch, "support_batch": batch, "query_batch": batch, "local_steps": 3}
    known = {field.name for field in fields(hyper)}
    hyper = replace(hyper, **{key: value for key, value in sizes.items() if key in known})
    weights = models.initial(layout, 0)
    wire = layout.extended(method.down, method.shared)
    broadcast = Payload({**wire.zeros(method.down), **weights}, {"round": 1.0, "seed": 0.0})
    x = rng.random((4 * batch, *shape), dtype=np.float32)
    train_round(method, models.build(layout), layout, broadcast, {}, x, np.arange(4 * batch) % 10, hyper, rng)
    return {"method": name, "model": model, "parameters": layout.parameters(("body", "head")), "batch": batch,
            "base_mib": round(base_mib, 1), "peak_mib": round(peak_mib(), 1)}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    if len(sys.argv) > 1:
        name, model, width, batch = sys.argv[1:]
        return print(json.dumps(one(name, model, int(width), int(batch))))
    rows = [
        json.loads(subprocess.run([sys.executable, __file__, *map(str, case)], check=True, capture_output=True).stdout)
        for case in CASES
    ]
    import torch

    machine = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    print(json.dumps({**machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
