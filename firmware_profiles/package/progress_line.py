"""Shows the progress of long work on stderr: share, speed and time left.

On a terminal one line is rewritten; elsewhere a line is printed per tenth.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO


class Progress:
    """Called with the name of the work, its bytes done, and its bytes in all."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = sys.stderr if stream is None else stream, clock
        self._is_terminal = self._stream.isatty()
        self._what, self._began, self._shown, self._start = "", 0.0, -1, 0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = self._clock()
        if what != self._what:
            self._what, self._began, self._shown, self._start = what, now, -1, done
        finished, steps = done >= total, 500 if self._is_terminal else 10
        step = steps if finished else steps * done // total
        if step <= self._shown:
            return
        self._shown = step
        line = self._line(what, done, total, now)
        if self._is_terminal:
            self._stream.write(f"\r\x1b[K{line}" + ("\n" if finished else ""))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def _line(self, what: str, done: int, total: int, now: float) -> str:
        past_s = now - self._began
        line = f"{what}: {100 * done // max(total, 1)} % of {total / 1e6:.0f} MB"
        if past_s <= 0 or done <= self._start:
            return line
        speed = (done - self._start) / past_s
        if done >= total:
            return f"{line}, {speed / 1e6:.1f} MB/s, {span(past_s)}"
        return f"{line}, {speed / 1e6:.1f} MB/s, {span((total - done) / speed)} left"


def span(seconds: float) -> str:
    """As 45 s, 3 min 20 s, 1 h 5 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
