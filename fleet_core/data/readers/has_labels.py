"""Whether a file or folder has labels, for samples that need none. Reads no more than a first line."""

from __future__ import annotations

import csv
import json
import zipfile
from contextlib import suppress
from pathlib import Path

from fleet_core.data.readers.images import has_images
from fleet_core.data.readers.sounds import is_sound, is_unsorted


def has_labels(path: Path) -> bool:
    """False too for what cannot be read, which its reader then refuses."""
    with suppress(OSError, ValueError, RecursionError, csv.Error, zipfile.BadZipFile):
        if path.is_dir():
            return not (is_unsorted(path) if is_sound(path) else has_images(path))
        if path.suffix.lower() == ".npz":
            with zipfile.ZipFile(path) as archive:
                return "y.npy" in archive.namelist()
        if path.suffix.lower() == ".csv":
            with open(path, encoding="utf-8-sig", newline="") as file:
                return "label" in [name.strip() for name in next(csv.reader(file), [])]
        if path.suffix.lower() in (".ndjson", ".jsonl"):
            with open(path, encoding="utf-8-sig") as file:
                return "label" in json.loads(next((line for line in file if line.strip()), "{}"))
    return False
