"""The interface of a source: it gives readings, whole samples, and notes of losses. ``running`` turns readings into
samples.

A feed is used by one thread. Its constructor opens the sensor. The constructor and a failing sensor raise SourceError,
ConfigError or OSError; then the feed is closed and made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fleet_core.data.live import Readings, Taken

MAX_BYTES_PER_S = 2 << 20
"""A source is read no faster than this."""
MAX_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Lost:
    """Data that could not be used, or may be missing: windows end here. why: empty if nothing is wrong."""

    why: str = ""


Item = Readings | Taken | Lost


class Feed(Protocol):
    """An open sensor."""

    def read(self, timeout_s: float) -> list[Item] | None:
        """What has arrived, after ``timeout_s`` seconds at the latest; None when nothing more will come. Items hold
        whole samples, x [*shape] in the shape of the fleet or of what ``prepared`` takes, or readings."""

    def close(self) -> None:
        """Ends the sensor's program or connection."""


class Pace:
    """Slows reading down to ``MAX_BYTES_PER_S``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep):
        self._clock, self._sleep = clock, sleep
        self._since, self._bytes = clock(), 0

    def came(self, size: int) -> None:
        """Waits if too many bytes arrived in this second."""
        now = self._clock()
        if now - self._since > 1.0:
            self._since, self._bytes = now, 0
        self._bytes += size
        if self._bytes > MAX_BYTES_PER_S:
            self._sleep(max(0.0, self._since + 1.0 - now))
