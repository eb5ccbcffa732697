"""Readings in lines of text that come over a serial port."""

from __future__ import annotations

import os
import select
import termios
from pathlib import Path

from edge_agent.sources.interface import Item, Pace
from edge_agent.sources.text_lines import TextLines
from fleet_core.base.errors import ConfigError, SourceError
from fleet_core.board.source_settings import SerialSource

READ_BYTES = 1 << 16
HINT = "ls /dev/serial/by-id; the agent's user belongs to the group dialout"
SPEED_IN, SPEED_OUT = 4, 5  # places in the list of tcgetattr


class SerialFeed:
    """An open port. The first line is skipped, because it may be incomplete. Raises SourceError, ConfigError."""

    def __init__(self, source: SerialSource, home: Path):
        speed = getattr(termios, f"B{source.baud}", None)
        if speed is None:
            known = sorted(int(name[1:]) for name in dir(termios) if name[0] == "B" and name[1:].isdecimal())
            raise ConfigError(f"a serial port has no speed of {source.baud} baud", where=source.port,
                              expected="one of " + ", ".join(str(one) for one in known if one))
        self._port, self._text, self._pace = source.port, TextLines(source.columns, partial=True), Pace()
        try:
            self._descriptor = os.open(home / source.port, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise self._broken(error) from error
        try:
            _make_raw(self._descriptor, speed)
        except (OSError, termios.error) as error:
            os.close(self._descriptor)
            raise self._broken(error) from error

    def read(self, timeout_s: float) -> list[Item] | None:
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return []
        try:
            data = os.read(self._descriptor, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise self._broken(error) from error
        if not data:
            raise SourceError("is gone", where=self._port, hint=HINT)
        self._pace.came(len(data))
        return self._text.more(data)

    def close(self) -> None:
        os.close(self._descriptor)

    def _broken(self, error: Exception) -> SourceError:
        said = error.strerror if isinstance(error, OSError) else error.args[-1]
        return SourceError(f"cannot be read: {said}", where=self._port, expected="a serial port", hint=HINT)


def _make_raw(descriptor: int, speed: int) -> None:
    """Sets the port to raw bytes, 8 bits, no parity, no echo, at this speed."""
    mode = termios.tcgetattr(descriptor)
    mode[0] = termios.IGNBRK
    mode[1] = 0
    mode[2] = termios.CS8 | termios.CREAD | termios.CLOCAL
    mode[3] = 0
    mode[SPEED_IN] = mode[SPEED_OUT] = speed
    termios.tcsetattr(descriptor, termios.TCSANOW, mode)
