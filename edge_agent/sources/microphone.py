"""A microphone, recorded by ``arecord`` of alsa-utils, or a .wav file in its place.

Sound is read as by ``fleet_core.data.readers.sounds``: channels are averaged, full scale is ±1.
"""

from __future__ import annotations

import contextlib
import time
import wave
from pathlib import Path

import numpy as np

from edge_agent.sources.command import Program
from edge_agent.sources.interface import Item
from fleet_core.base.errors import SourceError
from fleet_core.board.source_settings import MicrophoneSource
from fleet_core.data.live import Readings
from fleet_core.data.readers import sounds

WIDTH = 2  # bytes of S16_LE
PIECE_S = 0.25
HINT = "apt install alsa-utils; arecord -L names the microphones; the agent's user belongs to the group audio"


class MicrophoneFeed:
    """Sound as it is recorded. Raises SourceError."""

    def __init__(self, source: MicrophoneSource, home: Path):
        self._channels, self._rate_hz = source.channels, source.rate_hz
        command = ("arecord", "-q", "-t", "raw", "-f", "S16_LE", "-r", f"{source.rate_hz:g}", "-c",
                   str(source.channels), "-D", source.device)
        self._program = Program(command, home, HINT)
        self._rest = b""

    def read(self, timeout_s: float) -> list[Item] | None:
        data = self._program.read(timeout_s)
        if data is None:
            raise SourceError("arecord has ended", hint=HINT)
        data, whole = self._rest + data, (len(self._rest) + len(data)) // (WIDTH * self._channels)
        self._rest = data[whole * WIDTH * self._channels :]
        return _heard(data[: whole * WIDTH * self._channels], WIDTH, self._channels, self._rate_hz)

    def close(self) -> None:
        self._program.close()


class WaveFeed:
    """The sound of a .wav file, once. Raises DataError if it is no .wav file, SourceError if it has another rate."""

    def __init__(self, source: MicrophoneSource, home: Path):
        path = home / (source.file or "")
        self._file = sounds.opened(path)
        rate = self._file.getframerate()
        if rate != source.rate_hz:
            self._file.close()
            raise SourceError(f"is sound at {rate} Hz", where=str(path), expected=f"rate_hz, {source.rate_hz:g} Hz")
        self._rate, self._piece, self._at = rate, max(1, int(rate * PIECE_S)), time.time()

    def read(self, timeout_s: float) -> list[Item] | None:
        with contextlib.suppress(wave.Error, EOFError):
            data = self._file.readframes(self._piece)
            if data:
                items = _heard(data, self._file.getsampwidth(), self._file.getnchannels(), self._rate, self._at)
                self._at += self._piece / self._rate
                return items
        return None

    def close(self) -> None:
        self._file.close()


def _heard(data: bytes, width: int, channels: int, rate_hz: float, begin: float | None = None) -> list[Item]:
    """begin: Unix seconds of the first reading; None: the last one is now."""
    if not data:
        return []
    heard_L = sounds.mono(data, width, channels)
    first = time.time() - len(heard_L) / rate_hz if begin is None else begin
    return [Readings(heard_L[:, None].astype(np.float64), first + np.arange(len(heard_L)) / rate_hz)]
