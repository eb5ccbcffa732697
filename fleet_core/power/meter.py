"""The interface of energy meters: joules with their source, whether they are measured, their spread if they are not,
and which terms are absent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fleet_core.base.error_bounds import Spread

WORKING = ("train", "adapt", "serve", "radio", "other")
PHASES = (*WORKING, "idle")


@dataclass(frozen=True)
class Interval:
    """Joules since the meter's last interval; None when the meter does not know.

    active_j: above idle, of this process and its children. idle_j: of the device. unknown_s: seconds without readings,
    whose joules are in neither.
    """

    active_j: float | None
    idle_j: float | None
    unknown_s: float = 0.0


class Meter(Protocol):
    """Joules of one process on one device.

    absent_terms: {term: reason} of the terms (compute, idle, radio) that have neither a sensor nor a cited constant.
    includes_radio: whether ``interval`` includes the joules of the radio. spreads: {term: Spread} of modelled terms.
    """

    @property
    def source(self) -> str:
        """The sensor, or the model and the sources of its constants."""

    @property
    def measured(self) -> bool: ...

    @property
    def absent_terms(self) -> Mapping[str, str]: ...

    @property
    def includes_radio(self) -> bool: ...

    @property
    def spreads(self) -> Mapping[str, Spread]: ...

    def interval(self) -> Interval:
        """Joules since the last call. Raises PowerError."""

    def compute_j(self, flops: float) -> float | None:
        """Joules above idle of ``flops`` operations; None when ``interval`` includes them or they are unknown."""


@dataclass(frozen=True)
class Figure:
    """joules: ≥ 0. absent_terms: "term: reason" for each term that the joules do not include. spread: None if
    measured."""

    joules: float
    source: str
    measured: bool
    absent_terms: tuple[str, ...] = ()
    spread: Spread | None = None

    def plain(self) -> dict[str, Any]:
        """As in result files; low and high (joules) only if there is a spread."""
        spread = self.spread
        return {
            "value": self.joules,
            "source": self.source,
            "measured": self.measured,
            "absent_terms": list(self.absent_terms),
            **({} if spread is None else {"low": self.joules * spread.low, "high": self.joules * spread.high}),
        }
