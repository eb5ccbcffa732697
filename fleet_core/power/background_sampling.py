"""A thread that reads a power sensor every second, so that the integral over time has no gaps during other work.

The interval becomes longer when reading costs more than its budget, up to half of GAP_S.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from fleet_core.power.sampled_meter import BUDGET, GAP_S, cpu_s

PERIOD_S = 1.0


@contextlib.contextmanager
def repeating(action: Callable[[], None], period_s: float = PERIOD_S) -> Iterator[None]:
    """Calls ``action`` repeatedly from another thread until the block ends."""
    ended = threading.Event()

    def loop() -> None:
        wait_s = period_s
        while not ended.wait(wait_s):
            before_s = cpu_s()
            action()
            wait_s = pause_s(cpu_s() - before_s, period_s)

    thread = threading.Thread(target=loop, name="power", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def pause_s(cost_s: float, period_s: float = PERIOD_S) -> float:
    """Seconds until the next reading, after a reading that cost ``cost_s`` CPU seconds."""
    return min(max(period_s, cost_s / BUDGET), GAP_S / 2)
