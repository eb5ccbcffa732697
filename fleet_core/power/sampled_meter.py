"""Joules from a sensor that tells watts: the trapezoid between readings, shared among the processes of the machine.

Readings further apart than GAP_S are not joined: what was spent between them is unknown, and booked as such. Reading
may not cost more than BUDGET of a core: after a reading that took c CPU seconds its watts hold for c ÷ BUDGET.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fleet_core.power.meter import Interval
from fleet_core.power.sensors.interface import Reading, Sensor
from fleet_core.power.shared_counter import Share

GAP_S = 5.0
BUDGET = 0.004
"""Share of a core for reading; what shares the joules out comes on top, and all stays below 0.005."""
LONGEST_HOLD_S = 2.0


class Samples:
    """Counter made of readings. ``cpu``: CPU seconds of this thread and of children that have ended."""

    def __init__(self, sensor: Sensor, clock: Callable[[], float], cpu: Callable[[], float] | None = None):
        self._sensor, self._clock, self._cpu = sensor, clock, cpu or cpu_s
        self._held: Reading | None = None
        self._until_s = 0.0
        self.readings = 0

    def read_uj(self) -> dict[str, int]:
        """{"at_us": when, "uw": microwatts}. Raises PowerError."""
        now_s = self._clock()
        if self._held is None or now_s >= self._until_s:
            before_s = self._cpu()
            self._held, self.readings = self._sensor.read(), self.readings + 1
            self._until_s = now_s + min(LONGEST_HOLD_S, (self._cpu() - before_s) / BUDGET)
        return {"at_us": round(1e6 * now_s), "uw": round(1e6 * self._held.watts)}

    def advance_j(self, before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float:
        seconds = _apart_s(before_uj, now_uj)
        if not 0 < seconds <= GAP_S or "uw" not in before_uj:
            return 0.0
        return max(0.0, (before_uj["uw"] + now_uj["uw"]) / 2e6 * seconds)

    def unknown_s(self, before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float:
        seconds = _apart_s(before_uj, now_uj)
        return seconds if seconds > GAP_S else 0.0


class Sampled:
    """Meter of one process's share of a power sensor; to be settled at least every second.

    Args:
        idle_w: watts of the idle board at the sensor; None where unknown: idle draw then cannot be told from work and
            is shared with it, which ``source`` says.
        root, pid, clock: as in ``Share``.

    Raises PowerError where the sensor does not read.
    """

    measured = True

    def __init__(
        self,
        sensor: Sensor,
        idle_w: float | None = None,
        *,
        root: Path = Path("/"),
        pid: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.sensor = sensor
        self._share = Share(Samples(sensor, clock), sensor.name, idle_w, root=root, pid=pid, clock=clock)
        self.source = sensor.source + ("" if idle_w is not None else " (idle draw not told apart)")
        absent = {"radio": "not told apart: it is within the other phases"}
        if idle_w is None:
            absent["idle"] = "no idle watts known; it is within the other phases"
        if sensor.misses:
            absent["board"] = f"not seen: {sensor.misses}"
        self.absent_terms: Mapping[str, str] = absent

    def interval(self) -> Interval:
        return self._share.interval()

    def compute_j(self, flops: float) -> None:
        """None: the sensor sees it."""

    def radio_j(self, payload_bytes: int) -> None:
        """None: the sensor sees it."""


def cpu_s() -> float:
    """CPU seconds of this thread and of all children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.thread_time() + children.ru_utime + children.ru_stime


def _apart_s(before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float:
    return (now_uj["at_us"] - before_uj.get("at_us", now_uj["at_us"])) / 1e6
