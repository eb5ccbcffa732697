"""The interface of energy meters: joules with their source, whether they are measured, and which terms are absent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

WORKING = ("train", "adapt", "serve", "radio", "other")
PHASES = (*WORKING, "idle")
TERMS = ("compute", "idle", "radio")


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
    """

    @property
    def source(self) -> str:
        """The sensor, or the model and the sources of its constants."""

    @property
    def measured(self) -> bool: ...

    @property
    def absent_terms(self) -> Mapping[str, str]: ...

    def interval(self) -> Interval:
        """Joules since the last call. Raises PowerError."""

    def compute_j(self, flops: float) -> float | None:
        """Joules above idle of ``flops`` operations; None when ``interval`` includes them or they are unknown."""

    def radio_j(self, payload_bytes: int) -> float | None:
        """Joules of ``payload_bytes`` bytes sent or received; None when ``interval`` includes them or unknown."""


@dataclass(frozen=True)
class Figure:
    """joules: ≥ 0. absent_terms: "term: reason" for each term that the joules do not include."""

    joules: float
    source: str
    measured: bool
    absent_terms: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As in result files."""
        return {
            "value": self.joules,
            "source": self.source,
            "measured": self.measured,
            "absent_terms": list(self.absent_terms),
        }
