"""Cost of subnormal numbers where a gradient vanishes along a sequence, with them and without, in one run.

    python -m benchmarks.simulation.subnormals --out benchmarks/simulation/subnormals.json [--pairs 5]

One client's step of MAML with the exact second-order gradient, 20 + 20 windows of 80 characters, LEAF's two LSTM layers
of 256, on one thread. The weights are the first ones with ``--forget`` added to the forget gates' biases: the less an
LSTM keeps, the faster its gradient vanishes along the 80 characters. In turn with subnormals as they come and with
``local_training.flushed``, which training and personalization use; medians of CPU seconds, which other load on the
machine disturbs less than wall-clock time.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from fleet_core.algorithms.interface import Payload
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.storage import write_json
from fleet_core.learning import local_training, models
from fleet_core.model.layout import InputSpec
from fleet_core.training.local_round import TrainResult

CHARACTERS, LENGTH, WINDOWS = 81, 80, 20
FORGET = (0.0, -0.5, -1.0, -2.0, -4.0)


def step(forget: float, length: int = LENGTH) -> Callable[[], TrainResult]:
    """One client's step from these weights, the same every time. length: characters per window."""
    method = METHODS["fedmeta-maml"]
    hyper = method.hyper(local_steps=1, support_batch=WINDOWS, query_batch=WINDOWS)
    classes = tuple(map(str, range(CHARACTERS)))
    layout = models.describe("char-lstm", InputSpec((length,), "int64"), classes, {"forget_bias": forget})
    model, broadcast = models.build(layout), Payload(models.initial(layout, 0), {"round": 1.0, "seed": 0.0})
    drawn = np.random.default_rng(0)
    x, y = drawn.integers(0, CHARACTERS, (2 * WINDOWS, length)), drawn.integers(0, CHARACTERS, 2 * WINDOWS)
    return lambda: local_training.train_round(
        method, model, layout, broadcast, {}, x, y, hyper, np.random.default_rng(0)
    )


def timed(work: Callable[[], Any], around: AbstractContextManager[Any]) -> float:
    """CPU seconds."""
    with around:
        began = time.process_time()
        work()
        return time.process_time() - began


def beside(forget: float, pairs: int, length: int = LENGTH) -> dict[str, float]:
    """Medians of a step with subnormals and without, taken in turn, and their ratio."""
    work, found = step(forget, length), []
    for _ in range(pairs + 1):  # the first pair warms up
        kept = timed(work, patch.object(local_training, "flushed", contextlib.nullcontext))
        found.append((kept, timed(work, contextlib.nullcontext())))
    kept, flushed = (median(column) for column in zip(*found[1:], strict=True))
    return {"kept": round(kept, 4), "flushed": round(flushed, 4), "ratio": round(kept / flushed, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--forget", type=float, nargs="+", default=FORGET)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for forget in asked.forget:
        found[str(forget)] = beside(forget, asked.pairs)
        print(f"forget gates {forget:+}: {found[str(forget)]}", flush=True)
    write_json(asked.out, {
        "able": torch.set_flush_denormal(False),
        "environment": {"python": platform.python_version(), "torch": torch.__version__, "system": platform.platform()},
        "cpu_seconds": found,
    })  # fmt: skip


if __name__ == "__main__":
    main()
