"""How long something that got no answer is waited for before it is said again: longer every time, and not by all at
once. Devices that were cut off together must not come back together (thundering herd), so each waits a share of its own
longer; the share follows from its name, so that a run can be repeated."""

from __future__ import annotations

import zlib
from collections.abc import Callable


class Backoff:
    """A timer for one device. wait: ``first_s`` seconds, doubled at every ``again`` up to ``last_s``, and up to as much
    again by the device's own share."""

    def __init__(self, name: str, clock: Callable[[], float], first_s: float, last_s: float):
        self._name, self._clock, self._first_s, self._last_s = name, clock, first_s, last_s
        self._since = clock()
        self.times = 0

    @property
    def over(self) -> bool:
        return self._clock() - self._since > self.wait_s

    @property
    def wait_s(self) -> float:
        share = zlib.crc32(f"{self._name}/{self.times}".encode()) / 2**32
        return min(self._first_s * 2.0 ** min(self.times, 32), self._last_s) * (1 + share)

    def answered(self) -> None:
        """There was an answer: the next wait is the first one."""
        self._since, self.times = self._clock(), 0

    def again(self) -> None:
        """It was said again."""
        self._since, self.times = self._clock(), self.times + 1
