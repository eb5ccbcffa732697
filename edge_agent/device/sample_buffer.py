"""A ring buffer on the disk for samples without a label: one file per sample, bounded in bytes, number and age.

A sample's id is its file's name and stays the same. Several processes may use the buffer at once: a lock file orders
their writes, and each file appears whole or not at all, also after a kill. The files are not flushed one by one, so a
power cut may lose the newest ones. A file that cannot be read is removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fleet_core.base import storage
from fleet_core.base.errors import DataError, StateError

ID = r"[0-9a-f]{24}"
MAX_SAMPLES = 10_000
MAX_SAMPLE_BYTES = 1 << 26
LAST = ".last"
"""The file with the id of the sample that was added last."""
BLOCK = 4096
SUFFIX = ".safetensors"
LABELLING = ".labelling-"
STORED = re.compile(ID + re.escape(SUFFIX)).fullmatch


@dataclass(frozen=True)
class Stored:
    """id: of the sample. time: Unix seconds at which it was taken. x: the raw sample [*shape]."""

    id: str
    time: float
    x: np.ndarray[Any, Any]


@dataclass
class Listing:
    """The files of a buffer as this process knows them. sizes: bytes on disk by name, oldest first. total: of all.
    as_of: the state of the folder after this process's last sample, as ``SampleBuffer._state``; None: not known."""

    sizes: OrderedDict[str, int] = field(default_factory=OrderedDict)
    total: int = 0
    as_of: tuple[int, str] | None = None

    def put(self, name: str, size: int) -> None:
        self.sizes[name] = size
        self.total += size

    def drop_oldest(self) -> str:
        name, size = self.sizes.popitem(last=False)
        self.total -= size
        return name


@dataclass(frozen=True)
class SampleBuffer:
    """max_bytes: of disk, each file rounded up to ``BLOCK``. max_age_s: seconds after which a sample is removed. clock:
    Unix seconds."""

    folder: Path
    max_bytes: int
    max_age_s: float
    clock: Callable[[], float] = time.time
    _listing: Listing = field(default_factory=Listing, repr=False, compare=False)
    """A full buffer has thousands of files: they are listed again only if another process changed the folder."""

    def add(self, x: np.ndarray[Any, Any], taken_at: float | None = None) -> str:
        """Stores a raw sample and returns its id; the oldest ones go where a limit is passed. taken_at: Unix seconds;
        None: now. Raises DataError for a sample over the limit, StateError."""
        size = _on_disk(x.nbytes + BLOCK)
        if size > min(self.max_bytes, MAX_SAMPLE_BYTES):
            raise DataError(
                f"a sample of {x.nbytes} bytes does not fit in the buffer", where=str(self.folder),
                expected=f"at most {min(self.max_bytes, MAX_SAMPLE_BYTES)} bytes of disk",
                hint="a larger max_bytes under [unlabelled] in device.toml",
            )  # fmt: skip
        now = self.clock()
        with storage.locked(self.folder):
            files = self._listed()
            latest = int(next(reversed(files.sizes))[:16], 16) if files.sizes else 0
            name = f"{max(latest + 1, int(now * 1e9)):016x}{secrets.token_hex(4)}"
            files.as_of = None  # listed again if what follows fails
            self._make_room(files, now, size)
            stored_time = {"time": repr(float(now if taken_at is None else taken_at))}
            storage.write_arrays(self.folder / (name + SUFFIX), {"x": x}, stored_time, mode=0o600, durable=False)
            files.put(name + SUFFIX, self._size(name + SUFFIX))
            with contextlib.suppress(StateError):  # without it the files are listed again
                storage.write_atomic(self.folder / LAST, name.encode(), mode=0o600, durable=False)
            files.as_of = self._state()
        return name

    def ids(self) -> list[str]:
        """Of the samples that have not passed the age, oldest first. Raises StateError."""
        oldest = self._oldest_kept(self.clock())
        return [name[:24] for name in self._files() if name >= oldest]

    def read(self, name: str) -> Stored | None:
        """The sample; None if there is none. Raises StateError if the file cannot be read; it is removed if damaged."""
        path = self._path(name)
        if path is None or not path.exists():
            return None
        return _read_or_remove(path)

    @contextlib.contextmanager
    def labelling(self, name: str, at: int) -> Iterator[Stored | None]:
        """The sample while it is stored as labelled sample number ``at``, or None if there is none; it is removed
        after the block, and kept if the block raises. ``recover`` finishes this after a kill. One process at a time may
        be in the block."""
        stored = self.read(name)
        path = self._path(name)
        if stored is None or path is None:
            yield None
            return
        moved = path.with_name(f"{name}{LABELLING}{at}")
        storage.move(path, moved)
        try:
            yield stored
        except BaseException:
            storage.move(moved, path)
            raise
        moved.unlink()

    def interrupted(self) -> bool:
        """Whether a process is in ``labelling``, or was killed there."""
        return any(self.folder.glob(f"*{LABELLING}*"))

    def recover(self, is_labelled: Callable[[int, np.ndarray[Any, Any]], bool]) -> None:
        """Ends what a killed process left in ``labelling``. is_labelled: whether a sample is stored as labelled sample
        of this number. Must not run while a process is in ``labelling``. Raises StateError, DataError."""
        for path in sorted(self.folder.glob(f"*{LABELLING}*")):
            name, _, at = path.name.partition(LABELLING)
            if not re.fullmatch(ID, name) or not at.isdecimal():
                continue
            stored = _read_or_remove(path)
            if stored is not None and is_labelled(int(at), stored.x):
                path.unlink()
            elif stored is not None:
                storage.move(path, path.with_name(name + SUFFIX))

    def _path(self, name: str) -> Path | None:
        return self.folder / (name + SUFFIX) if re.fullmatch(ID, name) else None

    def _files(self) -> list[str]:
        """The names of the samples' files, oldest first."""
        try:
            return sorted(name for name in os.listdir(self.folder) if STORED(name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StateError(f"cannot be read: {error.strerror or error}", where=str(self.folder)) from error

    def _oldest_kept(self, now: float) -> str:
        return f"{max(0, int((now - self.max_age_s) * 1e9)):016x}"

    def _listed(self) -> Listing:
        """The files that are there; needs the lock."""
        found = self._listing
        if found.as_of is None or found.as_of != self._state():
            known = dict(found.sizes)
            found.sizes.clear()
            found.total = 0
            for name in self._files():
                found.put(name, known[name] if name in known else self._size(name))
        return found

    def _state(self) -> tuple[int, str] | None:
        """When the folder changed, and the last sample that was added: the file system's clock may be too coarse to
        tell two samples apart. None if it cannot be read; the files are then listed again."""
        try:
            return self.folder.stat().st_mtime_ns, (self.folder / LAST).read_text()
        except (OSError, ValueError):
            return None

    def _make_room(self, files: Listing, now: float, size: int) -> None:
        """Removes old samples until another one of ``size`` bytes fits."""
        oldest = self._oldest_kept(now)
        while files.sizes:
            fits = files.total + size <= self.max_bytes and len(files.sizes) < MAX_SAMPLES
            if fits and next(iter(files.sizes)) >= oldest:
                break
            (self.folder / files.drop_oldest()).unlink(missing_ok=True)

    def _size(self, name: str) -> int:
        """Bytes on disk; 0 for a file that is gone."""
        try:
            return _on_disk(os.stat(self.folder / name).st_size)
        except FileNotFoundError:
            return 0


def _on_disk(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _read_or_remove(path: Path) -> Stored | None:
    """None for a file that is damaged, which is removed, or gone. Raises StateError if the disk cannot be read."""
    try:
        return _read(path)
    except StateError as error:
        if not storage.is_disk_error(error):
            path.unlink(missing_ok=True)
        elif path.exists():
            raise
        return None


def _read(path: Path) -> Stored:
    arrays, metadata = storage.map_file(path, limit=MAX_SAMPLE_BYTES)
    try:
        return Stored(path.name[:24], float(metadata["time"]), np.array(arrays["x"]))
    except (KeyError, ValueError) as error:
        raise StateError("is not a stored sample", where=str(path)) from error
