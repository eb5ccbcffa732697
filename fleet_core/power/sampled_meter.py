"""Joules from a sensor of watts: the trapezoid between readings, divided among the processes of the machine.

Readings more than GAP_S apart are not joined; the time between them is counted as unknown. Reading may cost at most
BUDGET of a core: a reading that took c CPU seconds is reused for c ÷ BUDGET seconds.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from fleet_core.base.error_bounds import Spread
from fleet_core.power.meter import Interval
from fleet_core.power.sensors.interface import Reading, Sensor
from fleet_core.power.shared_counter import Share

GAP_S = 5.0
BUDGET = 0.004
"""Share of a core for readings. Together with dividing the joules it stays below 0.005."""
LONGEST_REUSE_S = 2.0


class SampledCounter:
    """A counter made of readings. cpu: CPU seconds of this thread and of children that have ended."""

    def __init__(self, sensor: Sensor, clock: Callable[[], float], cpu: Callable[[], float] | None = None):
        self._sensor, self._clock, self._cpu = sensor, clock, cpu or cpu_s
        self._last: Reading | None = None
        self._reuse_until_s = 0.0
        self.readings = 0

    def read_uj(self) -> dict[str, int]:
        """{"at_us": time, "uw": microwatts}. Raises PowerError."""
        now_s = self._clock()
        if self._last is None or now_s >= self._reuse_until_s:
            before_s = self._cpu()
            self._last, self.readings = self._sensor.read(), self.readings + 1
            self._reuse_until_s = now_s + min(LONGEST_REUSE_S, (self._cpu() - before_s) / BUDGET)
        return {"at_us": round(1e6 * now_s), "uw": round(1e6 * self._last.watts)}

    def advance_j(self, before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float:
        seconds = _seconds_between(before_uj, now_uj)
        if not 0 < seconds <= GAP_S or "uw" not in before_uj:
            return 0.0
        return max(0.0, (before_uj["uw"] + now_uj["uw"]) / 2e6 * seconds)

    def unknown_s(self, before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float:
        seconds = _seconds_between(before_uj, now_uj)
        return seconds if seconds > GAP_S else 0.0


class Sampled:
    """Meter of one process's share of a power sensor. Call ``interval`` at least every second.

    Args:
        idle_w: watts of the idle board at the sensor, or None. Without it idle draw is divided like work, which
            ``source`` says.
        root, pid, clock: as in ``Share``.

    Raises PowerError when the sensor cannot be read.
    """

    measured = True
    includes_radio = True
    spreads: Mapping[str, Spread] = MappingProxyType({})

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
        self._share = Share(SampledCounter(sensor, clock), sensor.name, idle_w, root=root, pid=pid, clock=clock)
        self.source = self._share.source_of(sensor.source)
        absent = {"radio": "not separated; the other phases include it", **self._share.absent_terms}
        if sensor.misses:
            absent["board"] = f"not measured: {sensor.misses}"
        self.absent_terms: Mapping[str, str] = absent

    def interval(self) -> Interval:
        return self._share.interval()

    def compute_j(self, flops: float) -> None:
        """None: the sensor includes it."""


def cpu_s() -> float:
    """CPU seconds of this thread and of all children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.thread_time() + children.ru_utime + children.ru_stime


def _seconds_between(before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float:
    return (now_uj["at_us"] - before_uj.get("at_us", now_uj["at_us"])) / 1e6
