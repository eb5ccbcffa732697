"""Human activity recognition with a phone at the waist: raw inertial windows.

Anguita, Ghio, Oneto, Parra, Reyes-Ortiz, "A Public Domain Dataset for Human Activity Recognition Using Smartphones"
(ESANN 2013), UCI 240. A window is 128 samples at 50 Hz of nine channels; consecutive windows of a recording overlap by
half. The train part holds 21 people, the test part nine others. The 561 features of the archive are not read.

Time. A *segment* is a run of windows of one person in which each window begins with the second half of the previous
one; windows of different segments share no sample. All windows of a segment have the time of its beginning, so that a
split by time cuts between segments, not through overlapping windows. The segments of a person follow each other, one
window's length apart, with the first segment of every activity before the second of any, so that an early part and both
halves contain every activity. The rows of a segment are in the order of recording.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.samples import Samples
from fleet_core.data.sets.archives import zip_files

CHANNELS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
ACTIVITIES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
SAMPLES, HALF, RATE_HZ = 128, 64, 50
MAX_PERSON = 99
LIMIT_BYTES = 512 << 20
INNER = "UCI HAR Dataset.zip"


def har(files: Mapping[str, Path]) -> tuple[Samples, Samples]:
    """x float32 [N, 9, 128], accelerations in g and angular rates in rad/s in the order of CHANNELS; y int64 [N]
    in the order of ACTIVITIES; client: the person's number; time: seconds, one for each segment."""
    path = files["human+activity+recognition+using+smartphones.zip"]
    outer = dict(zip_files(path, lambda name: name == INNER, LIMIT_BYTES, str(path)))
    source = outer.pop(INNER, path)
    return _part(source, "train", str(path)), _part(source, "test", str(path))


def segments(x: NDArray[Any], client: NDArray[np.str_]) -> NDArray[np.int64]:
    """The number of each row's segment, int64 [N]. x: [N, C, 128]."""
    continues = (client[1:] == client[:-1]) & (x[1:, :, :HALF] == x[:-1, :, HALF:]).all(axis=(1, 2))
    return np.concatenate([[0], np.cumsum(~continues)]).astype(np.int64)


def segment_times(client: NDArray[np.str_], y: NDArray[np.int64], segment: NDArray[np.int64]) -> NDArray[np.float64]:
    """The time in seconds at which each row's segment begins, float64 [N]. A segment's activity is that of its first
    window."""
    _, first, length = np.unique(segment, return_index=True, return_counts=True)
    time = np.empty(len(segment), np.float64)
    for person in np.unique(client):
        own = [k for k in range(len(first)) if client[first[k]] == person]
        seen: Counter[int] = Counter()
        turns = []
        for k in own:
            turns.append((seen[int(y[first[k]])], k))
            seen[int(y[first[k]])] += 1
        begin = 0.0
        for _, k in sorted(turns):
            time[first[k] : first[k] + length[k]] = begin
            begin += (HALF * (length[k] + 1) + SAMPLES) / RATE_HZ
    return time


def _part(source: Path | bytes, part: str, where: str) -> Samples:
    signals = [f"{part}/Inertial Signals/{channel}_{part}.txt" for channel in CHANNELS]
    names = [f"UCI HAR Dataset/{name}" for name in (*signals, f"{part}/y_{part}.txt", f"{part}/subject_{part}.txt")]
    tables = {name: _table(data, f"{where}: {name}")
              for name, data in zip_files(source, names.__contains__, LIMIT_BYTES, where)}
    missing = [name for name in names if name not in tables]
    if missing:
        raise DataError(f"lacks {', '.join(missing)}", where=where)
    rows = len(tables[names[0]])
    for name, table in tables.items():
        width = SAMPLES if "Inertial" in name else 1
        if table.shape != (rows, width):
            raise DataError(f"has shape {table.shape}", where=f"{where}: {name}", expected=f"({rows}, {width})")
    y = _whole(tables[names[-2]], len(ACTIVITIES), f"{where}: {names[-2]}") - 1
    client = np.char.zfill(_whole(tables[names[-1]], MAX_PERSON, f"{where}: {names[-1]}").astype(np.str_), 2)
    x = np.stack([tables[name] for name in names[: len(CHANNELS)]], axis=1)
    return Samples(x, y, client, segment_times(client, y, segments(x, client)), ACTIVITIES)


def _table(data: bytes, where: str) -> NDArray[np.float32]:
    """Numbers in rows, float32 [N, columns]."""
    if not data.strip():
        raise DataError("is empty", where=where)
    try:
        table: NDArray[np.float32] = np.loadtxt(io.StringIO(data.decode("ascii")), dtype=np.float32, ndmin=2)
    except (ValueError, UnicodeDecodeError) as error:
        raise DataError(f"is not a table of numbers: {error}", where=where) from error
    if not np.isfinite(table).all():
        raise DataError("holds a value that is not finite", where=where)
    return table


def _whole(table: NDArray[np.float32], most: int, where: str) -> NDArray[np.int64]:
    """One whole number per row, 1 to ``most``."""
    numbers = table[:, 0].astype(np.int64)
    if (numbers != table[:, 0]).any() or numbers.min() < 1 or numbers.max() > most:
        raise DataError("holds a number out of range", where=where, expected=f"1 to {most}")
    return numbers
