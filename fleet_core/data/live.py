"""Cuts samples from readings as they arrive, with the same bits that the file readers give for the same readings.

A window has one label and no gap in time, as in ``fleet_core.data.readers.windows``. The usual step is the median of
the last ``STEPS`` steps; a file's reader takes it from the whole file. Sound is cut as by ``sound.windows``.

n: readings. C: channels.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.shaping import sound
from fleet_core.data.shaping.resample import Resampler
from fleet_core.model.layout import InputSpec

GAP = 1.5  # usual steps, as in files
STEPS = 100
KNOWN_STEPS = 5  # with fewer there is no usual step


@dataclass(frozen=True, eq=False)
class Readings:
    """Readings in their order. values: float64 [n, C]. time: float64 [n], Unix seconds. labels: one for each, empty
    for none; None: none has one. timed: the times are the sensor's, so gaps in them count."""

    values: NDArray[np.float64]
    time: NDArray[np.float64]
    labels: Sequence[str] | None = None
    timed: bool = False


@dataclass(frozen=True, eq=False)
class Taken:
    """A raw sample [*shape], the Unix seconds of its last reading, and its label; empty for none."""

    x: NDArray[Any]
    time: float
    label: str = ""


@dataclass(frozen=True)
class Cutting:
    """stride: readings, after resampling, between the starts of two windows; None: the fleet's. rate_hz: readings a
    second that arrive. to_hz: readings a second of the samples; 0: the fleet's. If one is not known, nothing is
    resampled. gain, offset: of each channel, or one for all, applied first: value · gain + offset."""

    stride: int | None = None
    rate_hz: float = 0.0
    to_hz: float = 0.0
    gain: tuple[float, ...] = ()
    offset: tuple[float, ...] = ()


class Cutter:
    """Cuts the samples of ``spec`` from the readings of one sensor: rows of features, windows, or spectrograms.

    Raises DataError if samples are made of something else.
    """

    def __init__(self, spec: InputSpec, cutting: Cutting):
        if len(spec.shape) > 2:
            raise DataError(f"samples of shape {list(spec.shape)} are not made of readings",
                            expected="a source of images or of whole samples")
        self._spec, self._cutting = spec, cutting
        self.channels = 1 if spec.sound_hz else spec.shape[0]
        self.length = (sound.length_of(spec.sound_hz, spec.shape[-1]) if spec.sound_hz
                       else spec.shape[1] if len(spec.shape) == 2 else 1)
        self._stride = cutting.stride or spec.stride or self.length
        self._hz = float(spec.sound_hz) or cutting.to_hz or spec.rate_hz
        resamples = cutting.rate_hz and self._hz and cutting.rate_hz != self._hz
        self._resampler = Resampler(cutting.rate_hz, self._hz) if resamples else None
        self._steps = deque[float](maxlen=STEPS)
        self._last_time: float | None = None
        self._label = ""
        self._reset()

    def more(self, readings: Readings) -> list[Taken]:
        """Takes readings and returns the samples that are complete. Raises DataError for readings of other channels, or
        that are not finite, and takes none of them."""
        values = self._calibrated(readings)
        made: list[Taken] = []
        for first, end, anew in self._stretches(readings):
            if anew:
                made += self.end()
                self._label = "" if readings.labels is None else readings.labels[first]
            made += self._take(values[first:end], readings.time[first:end])
        return made

    def end(self) -> list[Taken]:
        """Ends the stretch: no window has readings from before and after it. Returns the samples of its last readings:
        for sound, windows that are at least half full."""
        if self._resampler is not None and self._came:
            rest = self._resampler.last(np.empty((0, self.channels), np.float32))
            self._hold(rest, np.empty(0))
        made = self._full()
        if self._spec.sound_hz:
            half = self.length // 2
            while len(self._held) - self._next >= (half if self._made else 1):
                made.append(self._sample(self._held[self._next : self._next + self.length]))
                self._next += self._stride
        self._reset()
        return made

    def _reset(self) -> None:
        self._held = np.empty((0, self.channels), np.float32)
        self._times = np.empty(0)
        self._next = 0  # where in ``_held`` the next window begins; may lie beyond its end
        self._came = self._made = self._resampled = 0
        self._began = 0.0

    def _calibrated(self, readings: Readings) -> NDArray[np.float32]:
        values = readings.values
        if values.ndim != 2 or values.shape[1] != self.channels:
            raise DataError(f"a reading has {values.shape[-1] if values.ndim else 0} channels",
                            expected=f"{self.channels}, as the fleet's samples {list(self._spec.shape)}")
        for name, factors in (("gain", self._cutting.gain), ("offset", self._cutting.offset)):
            if len(factors) not in (0, 1, self.channels):
                raise DataError(f"{name} has {len(factors)} values",
                                expected=f"one, or one for each of {self.channels}")
        with np.errstate(over="ignore", invalid="ignore"):
            if self._cutting.gain:
                values = values * np.array(self._cutting.gain)
            if self._cutting.offset:
                values = values + np.array(self._cutting.offset)
            single: NDArray[np.float32] = values.astype(np.float32)
        if not np.isfinite(single).all():
            raise DataError("a reading is not finite", expected="finite float32 values")
        return single

    def _stretches(self, readings: Readings) -> Iterator[tuple[int, int, bool]]:
        """(first, end, whether a new stretch begins with them) of readings that belong together."""
        first, anew, before, count = 0, False, self._label, len(readings.time)
        for n in range(count) if readings.timed or readings.labels is not None or before else ():
            label = "" if readings.labels is None else readings.labels[n]
            if (readings.timed and self._is_gap(float(readings.time[n]))) or label != before:
                if n > first:
                    yield first, n, anew
                first, anew, before = n, True, label
        if count > first:
            yield first, count, anew

    def _is_gap(self, time: float) -> bool:
        step, self._last_time = 0.0 if self._last_time is None else time - self._last_time, time
        usual = statistics.median(self._steps) if len(self._steps) >= KNOWN_STEPS else np.inf
        if step > 0:
            self._steps.append(step)
        return step < 0 or step > GAP * usual

    def _take(self, values: NDArray[np.float32], times: NDArray[np.float64]) -> list[Taken]:
        if not self._came and len(times):
            self._began = float(times[0])
        self._came += len(values)
        self._hold(values if self._resampler is None else self._resampler.more(values), times)
        return self._full()

    def _hold(self, values: NDArray[np.float32], times: NDArray[np.float64]) -> None:
        if self._resampler is not None:
            times = self._began + (self._resampled + np.arange(len(values))) / self._hz
            self._resampled += len(values)
        self._held, self._times = np.concatenate([self._held, values]), np.concatenate([self._times, times])

    def _full(self) -> list[Taken]:
        made = []
        while self._next + self.length <= len(self._held):
            made.append(self._sample(self._held[self._next : self._next + self.length]))
            self._next += self._stride
        unused = min(self._next, len(self._held))
        self._held, self._times, self._next = self._held[unused:], self._times[unused:], self._next - unused
        return made

    def _sample(self, window: NDArray[np.float32]) -> Taken:
        """window [at most length, C]."""
        self._made += 1
        time = float(self._times[min(self._next + self.length, len(self._times)) - 1])
        if self._spec.sound_hz:
            wave_1L = np.zeros((1, self.length), np.float32)
            wave_1L[0, : len(window)] = window[:, 0]
            return Taken(sound.spectrograms(wave_1L, self._spec.sound_hz)[0], time, self._label)
        x = window[0] if len(self._spec.shape) == 1 else window.T
        return Taken(_as(self._spec.dtype, x), time, self._label)


def _as(dtype: str, x: NDArray[np.float32]) -> NDArray[Any]:
    """A copy in the dtype of the fleet's samples. Raises DataError for values that it cannot represent."""
    with np.errstate(all="ignore"):
        wanted = np.array(x, dtype, order="C")
    if wanted.dtype.kind in "iu" and not np.array_equal(wanted, x):
        raise DataError(f"has values that {dtype} cannot represent")
    return wanted
