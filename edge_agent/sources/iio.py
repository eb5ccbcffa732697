"""Sensors of the kernel (Industrial I/O): files under /sys that are read at a steady rate.

A value is (raw + offset) · scale, as the kernel's ABI says (Documentation/ABI/testing/sysfs-bus-iio); ``in_temp_input``
and its like are read as they are. Units are the kernel's: m/s², rad/s, milli-°C, kPa.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_agent.sources.interface import Item, Lost
from fleet_core.base.errors import SourceError
from fleet_core.board.source_settings import IioSource
from fleet_core.data.live import Readings

LATE = 1.5  # periods after which a reading is missing
MAX_FILE_BYTES = 256


@dataclass(frozen=True)
class Channel:
    """An open file, and the scale and offset that convert its number to the unit."""

    name: str
    descriptor: int
    scale: float
    offset: float

    def value(self) -> float:
        """Raises OSError, ValueError."""
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        return (float(os.read(self.descriptor, MAX_FILE_BYTES)) + self.offset) * self.scale


class IioFeed:
    """The readings of a sensor. sleep: waits for a number of seconds. Raises SourceError."""

    def __init__(
        self, source: IioSource, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._clock, self._now, self._sleep = clock, now, sleep
        self._period_s = 1 / source.rate_hz
        self._folder = _folder(source)
        self._channels: list[Channel] = []
        try:
            for name in source.channels:
                self._channels.append(self._opened(name))
        except SourceError:
            self.close()
            raise
        self._due = clock()

    def read(self, timeout_s: float) -> list[Item] | None:
        until, found, rows, times = self._clock() + timeout_s, list[Item](), list[list[float]](), list[float]()
        if self._due >= until:
            self._sleep(timeout_s)
        while self._due < until:
            self._sleep(max(0.0, self._due - self._clock()))
            if self._clock() - self._due > LATE * self._period_s:  # the board was busy
                found += _readings(rows, times)
                found.append(Lost("readings were missed: the board was busy, or rate_hz is too high"))
                rows, times, self._due = [], [], self._clock()
            rows.append(self._row())
            times.append(self._now())
            self._due += self._period_s
        return [*found, *_readings(rows, times)]

    def close(self) -> None:
        for one in self._channels:
            os.close(one.descriptor)
        self._channels = []

    def _row(self) -> list[float]:
        row = []
        for one in self._channels:
            try:
                row.append(one.value())
            except (OSError, ValueError) as error:
                said = error.strerror if isinstance(error, OSError) else "it is not a number"
                raise SourceError(f"channel {one.name} cannot be read: {said}", where=str(self._folder)) from error
        return row

    def _opened(self, name: str) -> Channel:
        for end, scaled in (("raw", True), ("input", False)):
            with suppress(FileNotFoundError):
                descriptor = os.open(self._folder / f"in_{name}_{end}", os.O_RDONLY | os.O_CLOEXEC)
                scale, offset = (self._number(name, "scale", 1.0), self._number(name, "offset", 0.0)) if scaled \
                    else (1.0, 0.0)
                return Channel(name, descriptor, scale, offset)
        known = sorted(path.name[3:].rpartition("_")[0] for end in ("raw", "input")
                       for path in self._folder.glob(f"in_*_{end}"))
        raise SourceError(f"has no channel '{name}'", where=str(self._folder),
                          expected="one of " + ", ".join(known) if known else "a file in_…_raw")

    def _number(self, channel: str, what: str, absent: float) -> float:
        """A value of the channel, or of all channels of its kind (``in_accel_scale`` for ``accel_x``)."""
        for name in (channel, channel.rpartition("_")[0], channel.rstrip("0123456789")):
            with suppress(FileNotFoundError, ValueError):
                return float((self._folder / f"in_{name}_{what}").read_text())
        return absent


def _readings(rows: list[list[float]], times: list[float]) -> list[Item]:
    """All rows as one item; empty without rows."""
    return [Readings(np.array(rows, np.float64), np.array(times, np.float64))] if rows else []


def _folder(source: IioSource) -> Path:
    """The folder of the sensor with this name; a folder's own name is accepted too."""
    root = Path(source.folder)
    names = {}
    with suppress(OSError):
        for path in sorted(root.iterdir()):
            with suppress(OSError):
                names[path] = (path / "name").read_text().strip()
    for path, name in names.items():
        if source.device in (path.name, name):
            return path
    known = ", ".join(f"{path.name} ({name})" for path, name in names.items())
    raise SourceError(f"there is no sensor '{source.device}'", where=str(root), expected=known or "one of the kernel's",
                      hint=None if known else "an overlay loads its driver: dtoverlay in config.txt, then reboot")
