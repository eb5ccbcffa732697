"""A thread that settles a book of joules every second, so that a sensor's trapezoid has no gaps while others work.

It slows down where settling costs more than its share of a core, and never beyond half of the longest gap.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from fleet_core.power.sampled_meter import BUDGET, GAP_S, cpu_s

PERIOD_S = 1.0


@contextlib.contextmanager
def ticking(settle: Callable[[], None], period_s: float = PERIOD_S) -> Iterator[None]:
    """Calls ``settle`` again and again, from a thread of its own, until the block ends."""
    over = threading.Event()

    def loop() -> None:
        wait_s = period_s
        while not over.wait(wait_s):
            before_s = cpu_s()
            settle()
            wait_s = pause_s(cpu_s() - before_s, period_s)

    thread = threading.Thread(target=loop, name="power", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def pause_s(cost_s: float, period_s: float = PERIOD_S) -> float:
    """Seconds until the next reading, after one that cost so many CPU seconds."""
    return min(max(period_s, cost_s / BUDGET), GAP_S / 2)
