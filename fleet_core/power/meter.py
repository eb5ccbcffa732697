"""What a meter is, and what it says: joules with their source, measured or modelled, and the terms that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

WORKING = ("train", "adapt", "serve", "radio", "other")
PHASES = (*WORKING, "idle")
TERMS = ("compute", "idle", "radio")


@dataclass(frozen=True)
class Interval:
    """Joules since the meter's last interval; None where it cannot tell.

    active_j: above idle, of this process and its children. idle_j: of the device. unknown_s: seconds of which the meter
    has no readings: their joules are in neither.
    """

    active_j: float | None
    idle_j: float | None
    unknown_s: float = 0.0


class Meter(Protocol):
    """Joules of one process on one device.

    A term (compute, idle, radio) that has neither a sensor nor a cited constant is in ``absent_terms`` with its reason.
    """

    @property
    def source(self) -> str:
        """The sensor, or the model and where its constants are from."""

    @property
    def measured(self) -> bool: ...

    @property
    def absent_terms(self) -> Mapping[str, str]: ...

    def interval(self) -> Interval:
        """Joules that the passing of time tells of. Raises PowerError."""

    def compute_j(self, flops: float) -> float | None:
        """Joules above idle of so many operations; None where ``interval`` holds them or no one knows."""

    def radio_j(self, payload_bytes: int) -> float | None:
        """Joules of so many bytes sent or received; None where no one knows."""


@dataclass(frozen=True)
class Figure:
    """joules ≥ 0 with their source; absent_terms: "term: reason" of what they leave out. An unknown figure is None."""

    joules: float
    source: str
    measured: bool
    absent_terms: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As result files have it."""
        return {
            "value": self.joules,
            "source": self.source,
            "measured": self.measured,
            "absent_terms": list(self.absent_terms),
        }
