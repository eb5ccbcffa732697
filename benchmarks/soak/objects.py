"""Which Python objects of an aggregator grow from round to round.

    python -m benchmarks.soak.objects [--rounds 200] --out benchmarks/soak/objects.json

One aggregator and three devices in one process, over a broker in memory. What Python has allocated in calls of the
aggregator is compared after 100 rounds and after ``--rounds`` more, by the line of the product that asked for it.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from fleet_core.base import processes, storage
from tests.support.inprocess import World, config_text, toy, without_fsync, world

WARM, FRAMES = 100, 12
ROOT = Path(__file__).parents[2]
AGGREGATOR = str(ROOT / "cloud_server/rounds/coordinator.py")
PRODUCT = tuple(str(ROOT / package) for package in ("cloud_server", "fleet_core"))


class Latest(list[str]):
    """Log lines, of which the last alone is kept."""

    def append(self, line: str) -> None:
        self[:] = [line]


def allocated() -> Counter[str]:
    """Bytes by the last line of the product, of what was allocated in a call of the aggregator."""
    gc.collect()
    found: Counter[str] = Counter()
    for trace in tracemalloc.take_snapshot().traces:
        lines = [frame for frame in trace.traceback if frame.filename.startswith(PRODUCT)]
        if any(frame.filename == AGGREGATOR for frame in lines):
            found[f"{Path(lines[-1].filename).relative_to(ROOT)}:{lines[-1].lineno}"] += trace.size
    return found


def run_to(w: World, number: int) -> None:
    if not w.pump(lambda: w.closed() >= number, steps=1_000_000):
        raise RuntimeError(f"round {number} did not close")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        without_fsync(patch)
        w = world(Path(folder), config_text(rounds=WARM + options.rounds + 1))
        w.lines = Latest()
        w.start_server()
        for seed, name in enumerate(("d0", "d1", "d2")):
            w.start_agent(name, toy(seed))
        run_to(w, WARM)
        tracemalloc.start(FRAMES)
        run_to(w, WARM + 10)
        before = allocated()
        run_to(w, WARM + options.rounds)
        after = allocated()
        w.close()
    rounds = options.rounds - 10
    grown = {line: after[line] - before[line] for line in after if after[line] > before[line]}
    result = {
        "rounds": rounds, "bytes_before": before.total(), "bytes_after": after.total(),
        "bytes_a_round": (after.total() - before.total()) / rounds,
        "most": dict(sorted(grown.items(), key=lambda one: -one[1])[:10]),
    }
    storage.write_json(options.out, result)
    processes.say(f"{result['bytes_a_round']:.0f} bytes a round: {before.total():,} after {WARM + 10} rounds, "
                  f"{after.total():,} {rounds} rounds later")


if __name__ == "__main__":
    main()
