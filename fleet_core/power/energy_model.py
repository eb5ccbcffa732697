"""Models of energy for machines without a sensor, from idle and busy watts that a source or the user gives.

On the board itself: joules = CPU seconds ÷ processors × (busy − idle) W + idle W × time. For a board that is another
machine, computing time here says nothing: joules = FLOPs ÷ effective FLOP/s × (busy − idle) W + idle W × time. A
constant without a cited source makes its term absent. Watts are taken as linear in the share of busy processors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from fleet_core.base.error_bounds import Spread
from fleet_core.board.profile import Power, Profile
from fleet_core.power.meter import Interval
from fleet_core.power.sensors.cpu import machine_cpu_s, own_cpu_s
from fleet_core.power.shared_counter import Share

BOUND = 0.26
"""Relative bound of a modelled figure: the difference between two sources of the idle watts of a Raspberry Pi 4B (3.1
and 2.3 W). A wider range of a board's own sources replaces it."""
STATED = Spread(1 - BOUND, 1 + BOUND)


class BoardModel:
    """Meter of a board that is another machine, by its profile. Time is the wall clock of this process."""

    measured = False
    includes_radio = False

    def __init__(self, profile: Profile, *, clock: Callable[[], float] = time.monotonic):
        power, compute = profile.power, profile.compute
        cited = bool(power.source) and not power.per_processor
        self._idle_w = power.idle_w if cited else None
        self._j_per_flop: float | None = None
        if self._idle_w is not None and power.busy_w is not None and compute.source and compute.effective_flop_per_s:
            self._j_per_flop = (power.busy_w - self._idle_w) / compute.effective_flop_per_s
        used = {power.source: self._idle_w, compute.source: self._j_per_flop}
        sources = "; ".join(source for source, value in used.items() if source and value is not None)
        self.source = f"model of {profile.name} ({sources or 'no cited constant'})"
        self.absent_terms: Mapping[str, str] = _absent(profile, self._j_per_flop, self._idle_w)
        watts = watts_spreads(power)
        work = Spread(watts["compute"].low / (1 + BOUND), watts["compute"].high / (1 - BOUND))  # FLOP/s are cited too
        self.spreads: Mapping[str, Spread] = {"compute": work, "idle": watts["idle"]}
        self._clock, self._last_s = clock, clock()

    def interval(self) -> Interval:
        """idle_j = idle W × seconds since the last interval."""
        before_s, self._last_s = self._last_s, self._clock()
        return Interval(None, None if self._idle_w is None else self._idle_w * (self._last_s - before_s))

    def compute_j(self, flops: float) -> float | None:
        return None if self._j_per_flop is None else self._j_per_flop * flops


class WattsModel:
    """Meter of this machine from its watts, idle and with all processors busy.

    joules above idle = CPU seconds of this process and its children ÷ processors × (busy − idle) W. The processes of
    a machine share its idle draw; without /proc each counts all of it.

    Args:
        source: of the watts. spreads: as in ``Meter``.
        processors: of the machine; by default those that the system has.
        root, pid, clock: as in ``Share``.
    """

    measured = False
    includes_radio = False
    absent_terms: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        idle_w: float,
        busy_w: float,
        source: str = "--meter-watts",
        *,
        spreads: Mapping[str, Spread] = MappingProxyType({"compute": STATED, "idle": STATED}),
        processors: int | None = None,
        root: Path = Path("/"),
        pid: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        watts = Watts(idle_w, (busy_w - idle_w) / (processors or os.cpu_count() or 1), root, clock)
        self.source = f"model of CPU seconds at {idle_w:g} W idle, {busy_w:g} W busy ({source})"
        self.spreads = spreads
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


def whole_machine(power: Power, processors: int) -> Power:
    """``power`` with watts of the whole machine, from those of one processor."""
    if not power.per_processor or power.idle_w is None or power.busy_w is None:
        return power
    others = tuple((processors * idle_w, processors * busy_w) for idle_w, busy_w in power.other_watts)
    return replace(power, per_processor=False, idle_w=processors * power.idle_w, busy_w=processors * power.busy_w,
                   other_watts=others)


def watts_spreads(power: Power) -> dict[str, Spread]:
    """{"idle", "compute"}: the range over all sources of the idle watts, and of busy − idle; at least BOUND."""
    if power.idle_w is None or power.busy_w is None:
        return {"idle": STATED, "compute": STATED}
    return {
        "idle": _covering(power.idle_w, [idle_w for idle_w, _ in power.other_watts]),
        "compute": _covering(power.busy_w - power.idle_w, [busy_w - idle_w for idle_w, busy_w in power.other_watts]),
    }


def _covering(value: float, others: Sequence[float]) -> Spread:
    ratios = [other / value for other in others] if value else []
    return Spread(min([STATED.low, *ratios]), max([STATED.high, *ratios]))


def _absent(profile: Profile, j_per_flop: float | None, idle_w: float | None) -> dict[str, str]:
    if profile.power.per_processor and profile.power.source:
        why = "cited watts are of one processor, and it is not known how many such a machine has"
        return {"compute": why, "idle": why}
    absent = {}
    if j_per_flop is None:
        watts = idle_w is None or profile.power.busy_w is None
        absent["compute"] = "no cited idle and busy watts" if watts else "no cited effective FLOP/s"
    if idle_w is None:
        absent["idle"] = "no cited idle watts"
    return absent
