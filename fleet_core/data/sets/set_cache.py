"""Named data sets in the user's cache.

The folder ``METAFLEET_DATA/NAME`` (by default below the platform's user cache) has ``train.npz``, ``test.npz`` if the
set has a test part, and ``note.json``, which tells where they come from. The note is written last: without it, or with
one by an older version of the reader, the set counts as absent.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from fleet_core.base import schema
from fleet_core.base.errors import DataError, StateError
from fleet_core.base.storage import read_bytes, write_json
from fleet_core.data.heartbeat import FILE as HEARTBEAT
from fleet_core.data.heartbeat import load_heartbeat
from fleet_core.data.samples import Samples, load, save
from fleet_core.data.sets.registry import Entry, entry

FOLDER_VARIABLE = "METAFLEET_DATA"
IN_PACKAGE = "package"
MAX_NOTE_BYTES = 1 << 20
TRAIN, TEST, NOTE = "train.npz", "test.npz", "note.json"

Parts = tuple[Samples, Samples | None]


@dataclass(frozen=True)
class Source:
    """A file from which a set was made. origin: its URL or path."""

    file: str
    origin: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Note:
    """Describes a set in the cache. checked: whether every source had the registered sha256. when: UTC."""

    name: str
    version: int
    checked: bool
    sources: tuple[Source, ...]
    remark: str
    when: str
    train: int
    test: int
    clients: int
    bytes: int


@dataclass(frozen=True)
class NamedSet:
    """A loaded set. test: the official test part, or None. note: None for the set that ships with the package."""

    entry: Entry
    train: Samples
    test: Samples | None
    note: Note | None


def home() -> Path:
    """The folder of all sets."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(os.path.expanduser(named))
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "metafleet" / "datasets"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "metafleet" / "datasets"


def load_set(name: str) -> NamedSet:
    """Loads a set. Raises DataError when the name is unknown or the set has not been fetched."""
    wanted = entry(name)
    if wanted.reader == IN_PACKAGE:
        return NamedSet(wanted, load_heartbeat(), None, None)
    note = note_of(wanted)
    if note is None:
        raise DataError(f"the data set '{name}' has not been fetched", where=str(home() / name),
                        hint=f"metafleet datasets fetch {name}" + ("" if wanted.files else " --from PATH"))
    folder = home() / name
    test = load(folder / TEST, dtype=wanted.dtype) if note.test else None
    return NamedSet(wanted, load(folder / TRAIN, dtype=wanted.dtype), test, note)


def note_of(wanted: Entry) -> Note | None:
    """The note of a set in the cache; None when the set is absent or made by another version of its reader."""
    path = home() / wanted.name / NOTE
    if not path.exists():
        return None
    try:
        note, _ = schema.read(Note, json.loads(read_bytes(path, limit=MAX_NOTE_BYTES)), unknown="ignore")
    except (StateError, ValueError, RecursionError):
        return None
    return note if note is not None and note.version == wanted.version else None


def is_here(wanted: Entry) -> bool:
    return wanted.reader == IN_PACKAGE or note_of(wanted) is not None


def disk_bytes(wanted: Entry) -> int | None:
    """The size of the set on disk, None when it is absent."""
    if wanted.reader == IN_PACKAGE:
        return HEARTBEAT.stat().st_size
    note = note_of(wanted)
    return None if note is None else note.bytes


def store(wanted: Entry, parts: Parts, sources: tuple[Source, ...], *, checked: bool, remark: str = "") -> Note:
    """Checks the parts against the entry and writes them. Raises DataError and StateError.

    checked: they were made from the registered originals, so the numbers of samples and clients are checked too.
    """
    train, test = parts
    _fits(wanted, train, "train")
    if test is not None:
        _fits(wanted, test, "test")
    clients = len(set(train.clients) | set(test.clients if test is not None else ()))
    counts = {"train": len(train), "test": 0 if test is None else len(test), "clients": clients}
    if checked:
        _counts(wanted, counts)
    folder = home() / wanted.name
    _clear(folder)
    files = {TRAIN: train} if test is None else {TRAIN: train, TEST: test}
    for name, samples in files.items():
        save(folder / name, samples)
    size_bytes = sum((folder / name).stat().st_size for name in files)
    note = Note(wanted.name, wanted.version, checked, sources, remark, _now(), bytes=size_bytes, **counts)
    write_json(folder / NOTE, schema.plain(note))
    return note


def _clear(folder: Path) -> None:
    """Deletes the files of an earlier fetch, the note first."""
    try:
        for name in (NOTE, TRAIN, TEST):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise StateError(f"cannot be deleted: {error.strerror or error}", where=str(folder)) from error


def _fits(wanted: Entry, samples: Samples, part: str) -> None:
    where = f"{wanted.name}: {part}"
    shape, dtype = samples.x.shape[1:], samples.x.dtype.name
    if (shape, dtype) != (wanted.shape, wanted.dtype):
        raise DataError(f"a sample is {dtype} {shape}", where=where, expected=f"{wanted.dtype} {wanted.shape}")
    if samples.classes is None or len(samples.classes) != wanted.classes:
        names = "no" if samples.classes is None else len(samples.classes)
        raise DataError(f"names {names} classes", where=where, expected=str(wanted.classes))


def _counts(wanted: Entry, counts: Mapping[str, int]) -> None:
    for what, count in counts.items():
        registered = getattr(wanted, what)
        if registered is not None and registered != count:
            raise DataError(f"has {count} in '{what}'", where=wanted.name, expected=str(registered))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
