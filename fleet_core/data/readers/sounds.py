"""Reads sound: a folder of .wav files, sorted by class or listed in a labels.csv, or .wav files without labels.

PCM of 8, 16, 24 or 32 bits, any number of channels, which are averaged. Each file is brought to one rate and cut into
windows, which become spectrograms (``fleet_core.data.shaping.sound``).
"""

from __future__ import annotations

import csv
import wave
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base import schema
from fleet_core.base.errors import DataError
from fleet_core.data.readers.raw import Cut, Raw, bound, check_file, spread
from fleet_core.data.shaping import sound

LABELS = "labels.csv"
MAX_S = 3600
"""The longest recording in one file."""
MAX_FILES = 200_000
DEFAULT_HZ = 16_000
"""The highest rate of a fleet, unless one is given: a higher rate would use bands for frequencies that few can hear."""
PCM = "a .wav file of PCM, 8, 16, 24 or 32 bits"
CONVERT = "convert it: ffmpeg -i FILE -c:a pcm_s16le NEW.wav; record so: arecord -f S16_LE"


@dataclass(frozen=True)
class Recording:
    """A file with its label, client and time in seconds, if there are any."""

    file: Path
    label: str = ""
    client: str | None = None
    time: float | None = None


def is_sound(path: Path) -> bool:
    """Whether ``path`` is a .wav file, or a folder with one in it, at most two levels down."""
    if not path.is_dir():
        return path.suffix.lower() == ".wav"
    classes = _folders(path)
    within = (path, *classes, *(folder for one in classes for folder in _folders(one)))
    return any(_is_wave(file) for folder in within for file in folder.iterdir())


def rate_of(path: Path) -> int:
    """The rate in Hz for a fleet of these recordings: the lowest that one has, at most ``DEFAULT_HZ``. Raises
    DataError."""
    lowest = DEFAULT_HZ
    for one in _recordings(path, labelled=False):
        with opened(one.file) as file:
            lowest = min(lowest, file.getframerate())
    return lowest


def rate_wanted(path: Path, rate: int | None, seconds: float | None, window: int | None = None) -> int:
    """The rate of a fleet that learns from sound: the given one, or the recordings'; 0 for other samples. seconds: of a
    window of sound, if it is asked for; window: of readings, whose rate ``rate`` is then. Raises DataError."""
    if window is not None and seconds is None:
        return 0
    if rate is not None or (path.exists() and is_sound(path)):
        if rate is not None and rate < sound.LOWEST_HZ:
            raise DataError(f"{rate} Hz is not a valid rate for sound", where=str(path),
                            expected=f"{sound.LOWEST_HZ} Hz or more", hint="the rate of readings goes with --window")
        return rate or rate_of(path)
    if seconds is not None:
        raise DataError("holds no sound", where=str(path), expected="a folder of .wav files",
                        hint="leave out --seconds, or give the --rate of sound in arrays")
    return 0


def read_sounds(path: Path, limit_bytes: int, cut: Cut, *, labelled: bool = True) -> Raw:
    """x float32 [N, bands, frames]: the windows of each recording, in the order of time. labelled: a folder with a
    subfolder for each class, with a folder of those for each device, or with a labels.csv; False: a .wav file or a
    folder of them. cut: rate and window. Raises DataError that names the file."""
    recordings, used, parts = _recordings(path, labelled), list[Recording](), list[NDArray[np.float32]]()
    rate = cut.rate_hz or rate_of(path)
    frames = cut.frames(rate)
    length, size = sound.length_of(rate, frames), 0
    stride = cut.stride or length
    for one in recordings:
        wave_L = sound.at_rate(*read_wave(one.file, limit_bytes), rate)
        count = len(range(0, len(wave_L), stride))
        size += 4 * count * sound.BANDS * frames
        bound(size, limit_bytes, path)
        parts.append(sound.spectrograms(sound.windows(wave_L, length, stride), rate))
        used += [one] * len(parts[-1])
    x = np.concatenate(parts) if parts else np.empty((0, sound.BANDS, frames), np.float32)
    first = np.concatenate([np.arange(len(part)) for part in parts]) if parts else np.empty(0)
    note = f"sound at {rate} Hz, in windows of {length / rate:.3g} s: {len(x)} windows of {len(recordings)} recordings"
    labels = np.array([one.label for one in used], np.str_)
    return Raw(
        x, labels if labelled else np.empty(0, np.int64), _column([one.client for one in used], path, np.str_),
        _times(used, first * stride / rate, path), np.unique(labels) if labelled else None,
        lambda i: str(used[i].file), (note,),
    )


def read_wave(path: Path, limit_bytes: int) -> tuple[NDArray[np.float32], int]:
    """(sound [samples], the mean of its channels, full scale ±1; rate in Hz) of a .wav file. Raises DataError."""
    check_file(path, limit_bytes)
    with opened(path) as file:
        channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
        try:
            data = file.readframes(min(file.getnframes(), MAX_S * rate + 1))
        except (wave.Error, EOFError, ValueError) as error:
            raise DataError(f"cannot be read as sound: {error}", where=str(path), expected=PCM) from error
    number = len(data) // (channels * width)
    if not 0 < number <= MAX_S * rate:
        raise DataError("has no sound" if not number else f"is longer than {MAX_S} s", where=str(path),
                        expected=f"at most {MAX_S} s", hint="cut it into parts" if number else None)
    return mono(data[: number * channels * width], width, channels), rate


def mono(data: bytes, width: int, channels: int) -> NDArray[np.float32]:
    """The mean of the channels of PCM of ``width`` bytes, full scale ±1."""
    values = _integers(np.frombuffer(data, np.uint8), width).reshape(-1, channels)
    total = np.zeros(len(values))
    for channel in values.T:
        total += channel
    return (total / (channels * 2.0 ** (8 * width - 1))).astype(np.float32)


def _integers(data: NDArray[np.uint8], width: int) -> NDArray[Any]:
    """Signed integers of ``width`` bytes, little-endian; a single byte is unsigned in a .wav file."""
    if width == 1:
        return data.astype(np.int16) - 128
    if width == 3:
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = data.reshape(-1, 3)
        shifted: NDArray[Any] = wide.reshape(-1).view("<i4") >> 8
        return shifted
    return data.view(f"<i{width}")


def opened(path: Path) -> wave.Wave_read:
    """The open file. Raises DataError unless it is PCM of a possible form."""
    try:
        file = wave.open(str(path), "rb")  # noqa: SIM115 (the caller closes it)
    except (OSError, wave.Error, EOFError, ValueError, RuntimeError) as error:
        reason = str(error) or "it ends too early"
        raise DataError(f"cannot be read as sound: {reason}", where=str(path), expected=PCM, hint=CONVERT) from error
    form = file.getnchannels(), file.getsampwidth(), file.getframerate()
    if not (1 <= form[0] <= 64 and form[1] in (1, 2, 3, 4) and sound.LOWEST_HZ <= form[2] <= sound.HIGHEST_HZ):
        file.close()
        raise DataError(f"has {form[0]} channels of {form[1]} bytes at {form[2]} Hz", where=str(path),
                        expected=f"{PCM}, 1 to 64 channels at {sound.LOWEST_HZ} to {sound.HIGHEST_HZ} Hz")
    return file


# Folders --------------------------------------------------------------------------------------------------------------


def _recordings(path: Path, labelled: bool) -> list[Recording]:
    """The files in the order in which they are learned from. Raises DataError if there are none."""
    try:
        found = [Recording(path)] if path.is_file() else _of_folder(path, labelled)
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(path)) from error
    if not found:
        expected = f"a folder of .wav files for each class, a folder of those for each device, or a {LABELS}"
        raise DataError("has no .wav file", where=str(path), expected=expected)
    if len(found) > MAX_FILES:
        raise DataError(f"has {len(found)} files", where=str(path), expected=f"at most {MAX_FILES}")
    return found


def is_unsorted(path: Path) -> bool:
    """Whether the folder has .wav files that have no label."""
    return not (path / LABELS).is_file() and any(map(_is_wave, path.iterdir()))


def _of_folder(path: Path, labelled: bool) -> list[Recording]:
    if (path / LABELS).is_file():
        return _listed(path)
    flat = [Recording(file) for file in sorted(path.iterdir()) if _is_wave(file)]
    if flat and labelled:
        raise DataError("has .wav files without a label", where=str(path),
                        expected=f"a subfolder for each class, or a {LABELS} with the columns file and label")
    by_device = [one for device in _folders(path) for one in _by_class(device, device.name)]
    return flat or _by_class(path) or by_device


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _by_class(path: Path, client: str | None = None) -> list[Recording]:
    """The files in the subfolders, which are named like the classes."""
    found = [Recording(file, folder.name, client) for folder in _folders(path) for file in sorted(folder.iterdir())
             if _is_wave(file)]
    return [found[k] for k in spread([one.label for one in found])]


def _is_wave(file: Path) -> bool:
    return file.suffix.lower() == ".wav" and not file.name.startswith(".") and file.is_file()


def _listed(folder: Path) -> list[Recording]:
    """The files that labels.csv names: columns file and label, optionally client and time."""
    path = folder / LABELS
    check_file(path, 64 << 20)
    try:
        with open(path, encoding="utf-8-sig", newline="") as text:
            reader = csv.DictReader(text, strict=True)
            columns = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            for wanted in ("file", "label"):
                if wanted not in columns:
                    raise DataError(f"has no column '{wanted}'{schema.did_you_mean(wanted, columns)}",
                                    where=f"{path}: line 1", expected="file,label, and optionally client and time")
            return [_row(row, folder, f"{path}: line {reader.line_num}") for row in reader]
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), expected="a .csv file in UTF-8") from error


def _row(row: dict[str, Any], folder: Path, where: str) -> Recording:
    cells = {key: (row.get(key) or "").strip() for key in ("file", "label", "client", "time")}
    file = Path(cells["file"])
    if not cells["file"] or file.is_absolute() or ".." in file.parts:
        raise DataError(f"names the file '{cells['file'][:100]}'", where=where, expected="a file inside the folder")
    if not cells["label"]:
        raise DataError("has no label", where=where, expected="a class")
    try:
        time = float(cells["time"]) if cells["time"] else None
    except ValueError as error:
        raise DataError(f"'{cells['time'][:40]}' is not a number", where=f"{where}: column time") from error
    return Recording(folder / file, cells["label"], cells["client"] or None, time)


def _times(used: list[Recording], offset_s: NDArray[np.float64], path: Path) -> NDArray[np.float64] | None:
    begun = _column([one.time for one in used], path, np.float64)
    return None if begun is None else begun + offset_s


def _column(values: Iterable[Any], path: Path, dtype: Any) -> NDArray[Any] | None:
    """None if no recording has a value. Raises DataError if only some have one."""
    values = list(values)
    missing = sum(value is None for value in values)
    if missing and missing < len(values):
        raise DataError("gives a client or a time for some files only", where=str(path / LABELS),
                        expected="for all files or for none")
    return None if missing or not values else np.array(values, dtype)
