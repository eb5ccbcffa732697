"""Recordings: generated tones as .wav files."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

RATE = 8000
TONES = {"high": 1500.0, "low": 300.0}


def tone(hz: float, seconds: float, seed: int, rate: int = RATE) -> NDArray[np.int16]:
    """A noisy tone, int16."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    loud = 0.3 * np.sin(2 * np.pi * hz * time * rng.uniform(0.9, 1.1)) + 0.05 * rng.normal(size=len(time))
    return np.clip(loud * 32767, -32768, 32767).astype(np.int16)


def write(path: Path, sound: NDArray[np.int16], *, rate: int = RATE, width: int = 2, channels: int = 1) -> Path:
    """The int16 sound in a .wav file of ``width`` bytes, the same in all channels."""
    wide = np.repeat(sound.astype(np.int32), channels)
    full = (wide << 16).astype("<i4")
    forms = {1: ((wide >> 8) + 128).astype(np.uint8), 2: wide.astype("<i2"),
             3: full.view(np.uint8).reshape(-1, 4)[:, 1:], 4: full}
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(np.ascontiguousarray(forms[width]).tobytes())
    return path


def recordings(folder: Path, *, each: int = 10, seconds: float = 0.5, seed: int = 0) -> Path:
    """A folder with a subfolder of tones for each class."""
    for number, (label, hz) in enumerate(TONES.items()):
        for take in range(each):
            write(folder / label / f"{take:02}.wav", tone(hz, seconds, seed + 100 * number + take))
    return folder
