"""Readers of the supported file formats. They enforce size limits and return ``Raw`` arrays, which
``fleet_core.data.samples`` checks and converts to ``Samples``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fleet_core.base.errors import DataError
from fleet_core.data.readers.csv_file import read_csv
from fleet_core.data.readers.has_labels import has_labels
from fleet_core.data.readers.images import read_images, read_unsorted
from fleet_core.data.readers.ndjson import read_ndjson
from fleet_core.data.readers.npz import read_npz
from fleet_core.data.readers.raw import SECONDS, Cut, Raw, row_number
from fleet_core.data.readers.sounds import is_sound, rate_of, rate_wanted, read_sounds

__all__ = [
    "SECONDS",
    "Cut",
    "Raw",
    "has_labels",
    "is_sound",
    "rate_of",
    "rate_wanted",
    "read",
    "read_csv",
    "read_images",
    "read_ndjson",
    "read_npz",
    "read_sounds",
    "read_unsorted",
]

TABLES = {".csv": read_csv, ".ndjson": read_ndjson, ".jsonl": read_ndjson}


def read(path: Path, limit_bytes: int, cut: Cut, *, expected: str, labelled: bool = True) -> Raw:
    """Reads a file, or a folder of sound or images. expected: formats for the error message. Raises DataError."""
    if not path.exists():
        raise DataError("does not exist", where=str(path), expected=expected)
    kind = path.suffix.lower()
    if kind in TABLES and not path.is_dir():
        if labelled and cut.labels and not cut.outputs:
            raise DataError("names no labels", where=str(path), expected="the names of the columns that are labels",
                            hint="--labels NAME,NAME")
        return TABLES[kind](path, limit_bytes, cut, labelled=labelled)
    if cut.window is not None:
        raise DataError("is not a table of readings, so windows cannot be cut", where=str(path),
                        expected="a .csv or .ndjson file", hint="leave the window out")
    if labelled and cut.outputs is not None and kind != ".npz":
        has, named = ("one class", "labels") if cut.labels else ("classes, not numbers to predict", "outputs")
        raise DataError(f"has {has} for each sample, not several labels" if cut.labels else f"has {has}",
                        where=str(path),
                        expected=f".npz with x, y and perhaps {named}, or a table with a column '{cut.targets[0]}'")
    if (path.is_dir() or kind == ".wav") and is_sound(path):
        if labelled and not path.is_dir():
            raise DataError("is one recording", where=str(path), expected="a folder with a subfolder for each class")
        return read_sounds(path, limit_bytes, cut, labelled=labelled)
    if path.is_dir() and labelled:
        return read_images(path, limit_bytes, cut)
    if path.is_dir():
        return Raw(read_unsorted(path, limit_bytes, cut), np.empty(0, np.int64), None, None, None, row_number)
    if kind == ".npz":
        return read_npz(path, limit_bytes, labelled=labelled, labels=cut.labels)
    raise DataError(f"has an unknown format '{path.suffix}'", where=str(path), expected=expected)
