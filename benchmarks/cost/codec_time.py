"""What codecs cost in computing: CPU milliseconds to encode and to decode the model of the overhead workload.

    OMP_NUM_THREADS=1 python -m benchmarks.cost.codec_time [--times 25] [CODEC ...]

LeNet with 794,762 values, normal noise, one thread. Codecs take turns, and a figure is the median over the turns of the
thread's CPU time, which other work on the machine hardly changes. It prints JSON: codec -> encode_ms, decode_ms, bytes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TypeVar

import numpy as np

from benchmarks.overhead.workload import CLASSES
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.codecs.vector import shapes_of
from fleet_core.learning import models
from fleet_core.model.layout import MODEL_GROUPS, InputSpec

NAMES = ("fp32", "int8", "int4", "ternary", "topk-10", "topk-1")
SEED = (0, 1, 2)
Made = TypeVar("Made")


def measured(names: Sequence[str], times: int) -> dict[str, dict[str, float]]:
    layout = models.describe("lenet", InputSpec((1, 32, 32)), CLASSES, {})
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=shape).astype(np.float32)
              for name, shape in layout.shapes(MODEL_GROUPS).items()}
    taken: dict[str, list[tuple[float, float, int]]] = {name: [] for name in names}
    for _ in range(times):
        for name in names:
            encode_s, data = timed(partial(CODECS[name].encode, arrays, SEED))
            decode_s, _ = timed(partial(CODECS[name].decode, data, shapes_of(arrays)))
            taken[name].append((encode_s, decode_s, len(data)))
    return {name: {"encode_ms": round(1e3 * median(one[0] for one in several), 2),
                   "decode_ms": round(1e3 * median(one[1] for one in several), 2), "bytes": several[0][2]}
            for name, several in taken.items()}


def timed(work: Callable[[], Made]) -> tuple[float, Made]:
    """(CPU seconds of this thread, what ``work`` made)."""
    begun = time.thread_time()
    made = work()
    return time.thread_time() - begun, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=25)
    parser.add_argument("codecs", nargs="*", metavar="CODEC", default=NAMES)
    given = parser.parse_args()
    print(json.dumps(measured(given.codecs, given.times), indent=1))


if __name__ == "__main__":
    main()
