"""The Free Spoken Digit Dataset: recordings of one digit each, 8 kHz, mono, 16 bit; as spectrograms or as sound.

Z. Jackson and others, https://github.com/Jakobovski/free-spoken-digit-dataset. A recording is
``DIGIT_SPEAKER_TAKE.wav``; according to the data set's readme, takes 0 to 4 of every digit and speaker are the test
part.

Sound: the first 8,320 samples (1.04 s) of a recording, padded with silence; full scale is ±1. Spectrogram: 64 frames of
256 samples, 128 apart, Hann window; power in 32 triangular mel bands up to 4 kHz (HTK's mel scale), natural logarithm
of power + 1e-6. Time is the number of the take, and a speaker's rows are sorted by it, so that a split by time has all
digits in both parts.
"""

from __future__ import annotations

import io
import re
import wave
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.samples import Samples
from fleet_core.data.sets.archives import tar_files
from fleet_core.data.shaping import sound

RATE_HZ = 8000
FRAMES = 64
LENGTH = sound.length_of(RATE_HZ, FRAMES)
TEST_TAKES = 5
DIGITS = tuple("0123456789")
LIMIT_BYTES = 256 << 20
MAX_SAMPLES = 10 * RATE_HZ
NAME = re.compile(r"[^/]+/recordings/(\d)_([A-Za-z]+)_(\d{1,3})\.wav")


def spoken_digits(files: Mapping[str, Path]) -> tuple[Samples, Samples]:
    """x float32 [N, 1, 32, 64], y int64 [N], client: the speaker, time: the take."""
    train, test = spoken_digits_raw(files)
    return spectrograms(train), spectrograms(test)


def spoken_digits_raw(files: Mapping[str, Path]) -> tuple[Samples, Samples]:
    """x float32 [N, 1, 8320], y int64 [N], client: the speaker, time: the take."""
    path = files["free-spoken-digit-dataset-1.0.9.tar.gz"]
    found = []
    for name, data in tar_files(path, NAME.fullmatch, LIMIT_BYTES):
        match = NAME.fullmatch(name)
        assert match is not None
        found.append((int(match[3]), match[2], int(match[1]), read_wave(data, f"{path}: {name}")))
    if not found:
        raise DataError("has no recording", where=str(path), expected="recordings/DIGIT_SPEAKER_TAKE.wav")
    return by_take(found)


def by_take(recordings: list[tuple[int, str, int, NDArray[np.int16]]]) -> tuple[Samples, Samples]:
    """Divides recordings (take, speaker, digit, sound int16) into train and test part."""
    ordered = sorted(recordings, key=lambda recording: recording[:3])
    take = np.array([one[0] for one in ordered], dtype=np.float64)
    whole = Samples(
        np.stack([fitted(one[3]) for one in ordered])[:, None],
        np.array([one[2] for one in ordered], dtype=np.int64),
        np.array([one[1] for one in ordered], dtype=np.str_),
        take,
        DIGITS,
    )
    return whole.take(take >= TEST_TAKES), whole.take(take < TEST_TAKES)


def read_wave(data: bytes, where: str) -> NDArray[np.int16]:
    """The samples of a .wav file, int16. Raises DataError."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            if form != (1, 2, RATE_HZ):
                raise DataError(f"has {form[0]} channels of {form[1]} bytes at {form[2]} Hz", where=where,
                                expected=f"1 channel of 2 bytes at {RATE_HZ} Hz")
            frames = file.readframes(MAX_SAMPLES)
    except (wave.Error, EOFError, ValueError, RuntimeError) as error:
        raise DataError(f"cannot be read as sound: {error}", where=where) from error
    found = np.frombuffer(frames[: len(frames) // 2 * 2], "<i2").astype(np.int16)
    if not found.size:
        raise DataError("is empty", where=where)
    return found


def fitted(recording: NDArray[np.int16]) -> NDArray[np.float32]:
    """Cuts or pads a recording to float32 [8320], full scale ±1."""
    out = np.zeros(LENGTH, np.float32)
    out[: len(recording)] = recording[:LENGTH] / np.float32(1 << 15)
    return out


def spectrograms(samples: Samples) -> Samples:
    """Converts sound, x float32 [N, 1, 8320], to log-mel spectrograms, x float32 [N, 1, 32, 64]."""
    x = sound.spectrograms(samples.x[:, 0], RATE_HZ)[:, None]
    return Samples(x, samples.y, samples.client, samples.time, samples.classes)
