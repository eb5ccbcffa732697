"""Exponential backoff with jitter, so that devices that lost their connection together do not retry together.

The jitter is a function of the device's name, so that a run can be repeated.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable


class Backoff:
    """Times the retries of one device. The interval is ``first_s`` seconds, doubled at every ``repeat`` up to
    ``last_s``, and lengthened by 0 to 100 % of itself (the jitter)."""

    def __init__(self, name: str, clock: Callable[[], float], first_s: float, last_s: float):
        self._name, self._clock, self._first_s, self._last_s = name, clock, first_s, last_s
        self._since = clock()
        self.repeats = 0

    @property
    def expired(self) -> bool:
        return self._clock() - self._since > self.wait_s

    @property
    def wait_s(self) -> float:
        jitter = zlib.crc32(f"{self._name}/{self.repeats}".encode()) / 2**32
        return min(self._first_s * 2.0 ** min(self.repeats, 32), self._last_s) * (1 + jitter)

    def reset(self) -> None:
        """An answer arrived: start again with the first interval."""
        self._since, self.repeats = self._clock(), 0

    def repeat(self) -> None:
        """The message was sent again: start the next, longer interval."""
        self._since, self.repeats = self._clock(), self.repeats + 1
