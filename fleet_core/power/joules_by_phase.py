"""Joules per phase: what each kind of work of one process costs, and by which meter.

Joules above idle are counted in the phase that is open when they are spent: in equal parts when several are open, in
"other" when none is. Idle draw is counted separately, for the device. What no meter measures is absent, not 0.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fleet_core.base.error_bounds import Spread
from fleet_core.base.errors import PowerError
from fleet_core.power.meter import PHASES, WORKING, Figure, Meter
from fleet_core.power.radio import RadioModel

log = logging.getLogger(__name__)

TERM_OF = {"idle": "idle", "radio": "radio"}  # all other phases: compute
NO_METER = ("neither a sensor that can be read nor idle and busy watts with a source (edge-agent energy "
            "calibrate, or a profile with watts in device.toml)")


@dataclass
class Work:
    """The work of a phase, for meters that model it. Add to it while the phase is open."""

    flops: float = 0.0


class JoulesByPhase:
    """Joules of one process. Any thread may open phases. Without a meter every figure but the radio's is absent.

    radio: models the joules of bytes; not used with a meter that includes them.
    When the meter fails, this is logged, the joules counted so far stay, and every later figure mentions it.
    """

    def __init__(self, meter: Meter | None, radio: RadioModel | None = None):
        self._meter = meter
        self._radio = None if meter is not None and meter.includes_radio else radio
        self._joules: dict[str, float] = {}
        self._unknown_s: dict[str, float] = {}
        self._open: list[str] = []
        self._lock = threading.Lock()
        self._failure: str | None = None

    @property
    def metered(self) -> bool:
        """Whether there is a meter."""
        return self._meter is not None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Work]:
        """Counts the joules that are spent inside for the phase ``name``, one of WORKING."""
        if name not in WORKING:
            raise PowerError(f"there is no phase '{name}'", expected=", ".join(WORKING))
        work = Work()
        self.update()
        with self._lock:
            self._open.append(name)
        try:
            yield work
        finally:
            self.update()
            with self._lock:
                self._open.remove(name)
                if self._meter is not None and work.flops:
                    self._add(name, self._meter.compute_j(work.flops))

    def moved(self, up_bytes: int = 0, down_bytes: int = 0) -> None:
        """Counts bytes sent or received by radio. It reads no sensor, so it may be called for every chunk."""
        if self._radio is not None:
            with self._lock:
                self._add("radio", self._radio.joules(up_bytes, down_bytes))

    def update(self) -> None:
        """Counts the joules since the last call. Call it at least every half hour, before a counter can wrap twice; for
        a sensor of watts every second (``repeating``)."""
        with self._lock:
            if self._meter is None or self._failure:
                return
            try:
                spent = self._meter.interval()
            except PowerError as error:
                self._failure = str(error)
                log.warning("energy is no longer measured: %s", error)
                return
            self._add("idle", spent.idle_j)
            phases = self._open or ["other"]
            if spent.active_j is not None:
                for name in phases:
                    self._add(name, spent.active_j / len(phases))
            if spent.unknown_s:
                for name in {*phases, "idle"}:
                    self._unknown_s[name] = self._unknown_s.get(name, 0.0) + spent.unknown_s

    def figures(self) -> dict[str, Figure]:
        """{phase: Figure} of the phases that have joules."""
        with self._lock:
            return {name: self._figure(name) for name in PHASES if name in self._joules}

    def total(self) -> Figure | None:
        """The sum over all phases including idle, with every absent term; None when there is nothing to sum."""
        with self._lock:
            if not self._joules:
                return None
            parts = [self._figure(name) for name in self._joules]
            absent = (*self._absent(), *self._gap("idle"))  # every gap is also counted for idle
            joules, measured = sum(part.joules for part in parts), all(part.measured for part in parts)
            sources = "; ".join(dict.fromkeys(part.source for part in parts))
            return Figure(joules, sources, measured, absent, None if measured or not joules else _sum(joules, parts))

    def absent_terms(self) -> tuple[str, ...]:
        """"term: reason" for everything that the figures do not include."""
        with self._lock:
            return self._absent()

    def take(self) -> dict[str, Figure]:
        """The figures since the last ``take``, up to now."""
        self.update()
        with self._lock:
            taken = {name: self._figure(name) for name in PHASES if name in self._joules}
            self._joules.clear()
            self._unknown_s.clear()
            return taken

    def plain(self) -> dict[str, Any]:
        """{phase: ``Figure.plain``}, as in result files."""
        return {name: figure.plain() for name, figure in self.figures().items()}

    def _figure(self, name: str) -> Figure:
        term = TERM_OF.get(name, "compute")
        absent, joules = (*self._absent(term), *self._gap(name)), self._joules[name]
        if self._meter is not None and (name != "radio" or self._radio is None):
            return Figure(joules, self._meter.source, self._meter.measured, absent, self._meter.spreads.get(term))
        assert self._radio is not None
        return Figure(joules, self._radio.source, False, absent, self._radio.spread)

    def _gap(self, name: str) -> tuple[str, ...]:
        unknown_s = self._unknown_s.get(name)
        return () if unknown_s is None else (f"gap: {unknown_s:.1f} s without readings are not included",)

    def _absent(self, only: str | None = None) -> tuple[str, ...]:
        """The reasons for absent terms, or for the term ``only``; and why the meter failed."""
        terms = dict(self._meter.absent_terms) if self._meter is not None else {"compute": NO_METER}
        if self._radio is not None and self._radio.absent:
            terms["radio"] = self._radio.absent
        reasons = [f"{term}: {reason}" for term, reason in terms.items() if only in (None, term) or term == "board"]
        return (*reasons, f"meter: {self._failure}") if self._failure else tuple(reasons)

    def _add(self, name: str, joules: float | None) -> None:
        if joules is not None:
            self._joules[name] = self._joules.get(name, 0.0) + joules


def _sum(joules: float, parts: Sequence[Figure]) -> Spread:
    """The spread of a sum whose parts are all low or all high at once."""
    measured = Spread(1.0, 1.0)
    low = sum(part.joules * (part.spread or measured).low for part in parts)
    high = sum(part.joules * (part.spread or measured).high for part in parts)
    return Spread(low / joules, high / joules)
