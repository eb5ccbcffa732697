"""Turns sound into windows of a log-mel spectrogram, by the same function from files and from arrays.

A frame is the power of two of samples that is nearest to 32 ms, and frames overlap by half; Hann window; power in 32
triangular mel bands up to half the rate (HTK's mel scale), natural logarithm of power + 1e-6. Full scale is ±1. Each
window is computed by itself, so that its bits do not depend on what else is computed.

n: windows. L: samples of sound in a window. F: frames. B: bands.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.shaping.resample import Resampler

Array = NDArray[Any]

BANDS = 32
FLOOR = 1e-6
FRAME_S = 0.032
LOWEST_HZ, HIGHEST_HZ = 1000, 192_000


def frame_of(rate_hz: int) -> int:
    """Samples in a frame; frames begin half of that apart."""
    return int(2 ** round(math.log2(rate_hz * FRAME_S)))


def frames_in(rate_hz: int, seconds: float) -> int:
    """F of the shortest window that has so many seconds."""
    frame = frame_of(rate_hz)
    return 1 + max(0, math.ceil((seconds * rate_hz - frame) / (frame // 2)))


def length_of(rate_hz: int, frames: int) -> int:
    """L of a window with F frames."""
    frame = frame_of(rate_hz)
    return frame + frame // 2 * (frames - 1)


def full_scale(sound: Array) -> NDArray[np.float32]:
    """Sound as float32, full scale ±1, from float, or from int8, int16 and int32 of full range. Raises DataError."""
    if sound.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return sound.astype(np.float32)
    if sound.dtype not in (np.int8, np.int16, np.int32):
        raise DataError(f"has sound of {sound.dtype}", expected="float from -1 to 1, or int16")
    return (sound / float(2 ** (8 * sound.dtype.itemsize - 1))).astype(np.float32)


def at_rate(sound: NDArray[np.float32], from_hz: int, to_hz: int) -> NDArray[np.float32]:
    """Sound [samples] at another rate."""
    if from_hz == to_hz or not len(sound):
        return sound
    return Resampler(from_hz, to_hz).last(sound)


def windows(sound: NDArray[np.float32], length: int, stride: int) -> NDArray[np.float32]:
    """[n, L] of sound [samples]. A last window that is at least half full, or the only one, is padded with silence."""
    starts = [0, *range(stride, max(0, len(sound) - length // 2) + 1, stride)]
    found = np.zeros((len(starts), length), np.float32)
    for window, start in zip(found, starts, strict=True):
        part = sound[start : start + length]
        window[: len(part)] = part
    return found


def spectrograms(sound: NDArray[np.float32], rate_hz: int) -> NDArray[np.float32]:
    """float32 [n, B, F] of windows [n, L]."""
    frame, bands = frame_of(rate_hz), mel_bands(rate_hz)
    hann = np.hanning(frame + 1)[:-1].astype(np.float32)
    framed = np.lib.stride_tricks.sliding_window_view(sound, frame, axis=1)[:, :: frame // 2]
    found = np.empty((len(sound), BANDS, framed.shape[1]), np.float32)
    for row, frames_FW in enumerate(framed):
        power_FK = np.abs(np.fft.rfft(frames_FW * hann, axis=1)) ** 2
        found[row] = np.log(bands @ power_FK.T + FLOOR)
    return found


@cache
def mel_bands(rate_hz: int) -> NDArray[np.float64]:
    """Triangular weights of a frame's frequencies in the bands, float64 [B, frame/2 + 1]."""
    hz = np.fft.rfftfreq(frame_of(rate_hz), 1 / rate_hz)
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + rate_hz / 2 / 700), BANDS + 2) / 2595) - 1)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    weights: NDArray[np.float64] = np.maximum(
        0.0, np.minimum((hz - low) / (centre - low), (high - hz) / (high - centre))
    )
    return weights
