"""Models of energy for machines without a sensor: from a board's cited constants, or from the user's watts.

joules = FLOPs ÷ effective FLOP/s × (busy − idle) W + idle W × time + bytes × J/byte. Computing time on another machine
says nothing about the board, so only work (FLOPs, bytes) and the wall clock of the running machine are used. A constant
without a cited source makes its term absent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fleet_core.board.profile import Profile
from fleet_core.power.meter import Interval
from fleet_core.power.sensors.cpu import machine_cpu_s, own_cpu_s
from fleet_core.power.shared_counter import Share


class BoardModel:
    """Meter of a board by its profile. Time is the wall clock of this process."""

    measured = False

    def __init__(self, profile: Profile, *, clock: Callable[[], float] = time.monotonic):
        power, compute, radio = profile.power, profile.compute, profile.radio
        cited = {
            "power": power.source and power.idle_w is not None,
            "compute": compute.source and compute.effective_flop_per_s,
            "radio": radio.source and radio.j_per_byte is not None,
        }
        self._idle_w = power.idle_w if cited["power"] else None
        self._j_per_byte = radio.j_per_byte if cited["radio"] else None
        self._j_per_flop: float | None = None
        if self._idle_w is not None and power.busy_w is not None and cited["compute"]:
            assert compute.effective_flop_per_s is not None
            self._j_per_flop = (power.busy_w - self._idle_w) / compute.effective_flop_per_s
        used = {
            power.source: self._idle_w,
            compute.source: self._j_per_flop,
            radio.source: self._j_per_byte,
        }
        sources = "; ".join(source for source, value in used.items() if source and value is not None)
        self.source = f"model of {profile.name} ({sources or 'no cited constant'})"
        self.absent_terms: Mapping[str, str] = _absent(profile, self._j_per_flop, self._idle_w, self._j_per_byte)
        self._clock, self._last_s = clock, clock()

    def interval(self) -> Interval:
        """idle_j = idle W × seconds since the last interval."""
        before_s, self._last_s = self._last_s, self._clock()
        return Interval(None, None if self._idle_w is None else self._idle_w * (self._last_s - before_s))

    def compute_j(self, flops: float) -> float | None:
        return None if self._j_per_flop is None else self._j_per_flop * flops

    def radio_j(self, payload_bytes: int) -> float | None:
        return None if self._j_per_byte is None else self._j_per_byte * payload_bytes


class WattsModel:
    """Meter from the watts of this machine, idle and with all processors busy, given by the user (--meter-watts).

    joules above idle = CPU seconds of this process and its children ÷ processors × (busy − idle) W. The processes of
    a machine share its idle draw; without /proc each counts all of it.
    """

    measured = False
    absent_terms: Mapping[str, str] = MappingProxyType({"radio": "no cited J/byte for this machine"})

    def __init__(
        self,
        idle_w: float,
        busy_w: float,
        *,
        processors: int | None = None,
        root: Path = Path("/"),
        pid: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        watts = Watts(idle_w, (busy_w - idle_w) / (processors or os.cpu_count() or 1), root, clock)
        self.source = f"model of CPU seconds at {idle_w:g} W idle, {busy_w:g} W busy (--meter-watts)"
        self._watts, self._last = watts, watts.alone()
        self._share: Share | None = None
        if (root / "proc/stat").exists():
            name = f"watts-{idle_w:g}-{busy_w:g}"
            self._share = Share(watts, name, idle_w, root=root, pid=pid, clock=clock)

    def interval(self) -> Interval:
        if self._share is not None:
            return self._share.interval()
        before, self._last = self._last, self._watts.alone()
        return Interval(self._last[0] - before[0], self._last[1] - before[1])

    def compute_j(self, flops: float) -> None:
        """None: the CPU seconds include it."""

    def radio_j(self, payload_bytes: int) -> None:
        """None: unknown."""


@dataclass(frozen=True)
class Watts:
    """A counter of modelled joules: idle watts times the clock, plus joules per busy CPU second."""

    idle_w: float
    j_per_cpu_s: float
    root: Path
    clock: Callable[[], float]

    def read_uj(self) -> dict[str, int]:
        return {"machine": int(1e6 * (self.idle_w * self.clock() + self.j_per_cpu_s * machine_cpu_s(self.root)))}

    def advance_j(self, before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float:
        return max(0, now_uj["machine"] - before_uj.get("machine", now_uj["machine"])) / 1e6

    def unknown_s(self, before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float:
        return 0.0

    def alone(self) -> tuple[float, float]:
        """(joules above idle, idle joules) of this process only, since a fixed moment."""
        return self.j_per_cpu_s * own_cpu_s(), self.idle_w * self.clock()


def _absent(
    profile: Profile, j_per_flop: float | None, idle_w: float | None, j_per_byte: float | None
) -> dict[str, str]:
    absent = {}
    if j_per_flop is None:
        watts = idle_w is None or profile.power.busy_w is None
        absent["compute"] = "no cited idle and busy watts" if watts else "no cited effective FLOP/s"
    if idle_w is None:
        absent["idle"] = "no cited idle watts"
    if j_per_byte is None:
        absent["radio"] = "no cited J/byte"
    return absent
