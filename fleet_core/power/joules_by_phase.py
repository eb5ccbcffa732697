"""The book of joules per phase: what each kind of work of one process has cost, and by which meter.

Joules above idle go to the phase that is open when they are spent, in equal parts where several are, and to "other"
where none is. Idle draw is the device's, in a column of its own. What no meter tells is absent, never 0.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fleet_core.base.errors import PowerError
from fleet_core.power.meter import PHASES, WORKING, Figure, Meter

log = logging.getLogger(__name__)

TERM_OF = {"idle": "idle", "radio": "radio"}  # every other phase is computing


@dataclass
class Work:
    """What a phase does, for models that count work: add to it while the phase is open."""

    flops: float = 0.0
    payload_bytes: int = 0


class JoulesByPhase:
    """Joules of one process. Any thread may open phases. With no meter every figure is absent.

    A meter that stops reading stops no work: it is logged, what was booked stays, and every figure then says so.
    """

    def __init__(self, meter: Meter | None):
        self._meter = meter
        self._joules: dict[str, float] = {}
        self._unknown_s: dict[str, float] = {}
        self._open: list[str] = []
        self._lock = threading.Lock()
        self._stopped: str | None = None

    @property
    def metered(self) -> bool:
        """Whether there is a meter at all."""
        return self._meter is not None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Work]:
        """Books what is spent inside to ``name``, one of WORKING."""
        if name not in WORKING:
            raise PowerError(f"there is no phase '{name}'", expected=", ".join(WORKING))
        work = Work()
        self.settle()
        with self._lock:
            self._open.append(name)
        try:
            yield work
        finally:
            self.settle()
            with self._lock:
                self._open.remove(name)
                self._count(name, work)

    def sent(self, payload_bytes: int) -> None:
        """So many bytes went over the radio, up or down. Costs no reading: it may be called for every chunk."""
        with self._lock:
            self._count("radio", Work(payload_bytes=payload_bytes))

    def settle(self) -> None:
        """Books the joules up to now. Call it at least every half hour, as a counter that wraps twice misleads; every
        second where the meter is a sensor of watts (``ticking``)."""
        with self._lock:
            if self._meter is None or self._stopped:
                return
            try:
                spent = self._meter.interval()
            except PowerError as error:
                self._stopped = str(error)
                log.warning("energy is measured no longer: %s", error)
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
        """{phase: Figure} of the phases that have one."""
        with self._lock:
            return {name: self._figure(name) for name in PHASES if name in self._joules}

    def total(self) -> Figure | None:
        """The sum over the phases, idle among them, with every absent term named; None when there is nothing to sum."""
        with self._lock:
            if self._meter is None or not self._joules:
                return None
            absent = (*self._absent(), *self._gap("idle"))  # idle time is all time
            return Figure(sum(self._joules.values()), self._meter.source, self._meter.measured, absent)

    def take(self) -> dict[str, Figure]:
        """The figures since the last ``take``, for a report that is sent once; settles first."""
        self.settle()
        with self._lock:
            taken = {name: self._figure(name) for name in PHASES if name in self._joules}
            self._joules.clear()
            self._unknown_s.clear()
            return taken

    def plain(self) -> dict[str, Any]:
        """{phase: {"value", "source", "measured", "absent_terms"}}, as result files have it."""
        return {name: figure.plain() for name, figure in self.figures().items()}

    def _figure(self, name: str) -> Figure:
        assert self._meter is not None
        absent = (*self._absent(TERM_OF.get(name, "compute")), *self._gap(name))
        return Figure(self._joules[name], self._meter.source, self._meter.measured, absent)

    def _gap(self, name: str) -> tuple[str, ...]:
        unknown_s = self._unknown_s.get(name)
        return () if unknown_s is None else (f"gap: {unknown_s:.1f} s without readings are not in it",)

    def _absent(self, only: str | None = None) -> tuple[str, ...]:
        """Reasons of the absent terms, or of one term alone; and of a meter that stopped."""
        terms = self._meter.absent_terms if self._meter is not None else {}
        reasons = [f"{term}: {reason}" for term, reason in terms.items() if only in (None, term) or term == "board"]
        return (*reasons, f"meter: {self._stopped}") if self._stopped else tuple(reasons)

    def _count(self, name: str, work: Work) -> None:
        if self._meter is not None:
            self._add(name, self._meter.compute_j(work.flops) if work.flops else None)
            self._add("radio", self._meter.radio_j(work.payload_bytes) if work.payload_bytes else None)

    def _add(self, name: str, joules: float | None) -> None:
        if joules is not None:
            self._joules[name] = self._joules.get(name, 0.0) + joules
