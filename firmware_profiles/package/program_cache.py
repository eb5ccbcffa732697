"""Where programs are kept between flashes: of each Python and architecture the newest few, and what is in use.

    KEY.json                          what was asked for gave this; its time is that of its last use
    VERSION-ARCH-cpPYTHON.tar.gz      the archive that it names
    .lock                             held for a moment by whoever takes, adds or clears

A process that was given an archive holds a shared lock on it until it ends; an archive that is held is not cleared.
Unreadable notes, archives that nothing names and what killed runs left are cleared on the way.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_core.base import storage
from fleet_core.base.errors import StateError

NEWEST = 4
"""Kept of each Python and architecture: with torch and without it, now and before."""
LEFT_S = 86400.0
MAKING = ".making-"
MAX_NOTE_BYTES = 1 << 20
_HELD: list[int] = []


@dataclass(frozen=True)
class Kept:
    """One program. used_at: Unix seconds. in_use: by a process that runs now."""

    version: str
    python: str
    arch: str
    size_bytes: int
    installed_bytes: int
    used_at: float
    in_use: bool


class Cache:
    """The programs in ``folder``, which is made where it is missing. Methods raise OSError and StateError."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, key: str) -> tuple[dict[str, Any], Path] | None:
        """What is noted under ``key``, and the archive, held from now on; None where it is absent or not whole."""
        with self._locked():
            told = self._noted(self._note(key))
            path = None if told is None else self.folder / str(told["file"])
            handle = None if path is None else _opened(path)
            if told is None or path is None or handle is None:
                return None
            fcntl.flock(handle, fcntl.LOCK_SH)
            os.utime(self._note(key))
        if sha256_of(path) != told["sha256"]:
            os.close(handle)
            return None
        _HELD.append(handle)
        return told, path

    def add(self, key: str, packed: Path, told: Mapping[str, Any]) -> Path:
        """The archive ``packed`` gets the name told["file"], and is held; what is old goes."""
        path = self.folder / str(told["file"])
        with self._locked():
            storage.move(packed, path)
            storage.write_json(self._note(key), told)
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(handle, fcntl.LOCK_SH)
            _HELD.append(handle)
            self._clear(NEWEST)
        return path

    def clear(self) -> list[Kept]:
        """Everything that is not in use goes; returns what went."""
        with self._locked():
            before = self._entries()
            self._clear(0)
            left = {kept.version for kept in self._entries()}
        return [kept for kept in before if kept.version not in left]

    def entries(self) -> list[Kept]:
        """What is here, last used first."""
        with self._locked():
            return self._entries()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _note(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _noted(self, path: Path) -> dict[str, Any] | None:
        try:
            told = json.loads(storage.read_bytes(path, limit=MAX_NOTE_BYTES))
            named = Path(str(told["file"])).name == told["file"]
            return dict(told) if named and {"version", "sha256", "arch", "python"} <= told.keys() else None
        except (StateError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _notes(self) -> list[tuple[Path, dict[str, Any] | None]]:
        """Last used first."""
        paths = sorted(self.folder.glob("*.json"), key=lambda path: (-path.stat().st_mtime_ns, path.name))
        return [(path, self._noted(path)) for path in paths]

    def _entries(self) -> list[Kept]:
        found = dict[str, Kept]()
        for path, told in self._notes():
            archive = None if told is None else self.folder / told["file"]
            if told is not None and archive is not None and archive.is_file():
                found.setdefault(archive.name, Kept(
                    str(told["version"]), str(told["python"]), str(told["arch"]), archive.stat().st_size,
                    int(told.get("installed_bytes", 0)), path.stat().st_mtime, not _free(archive),
                ))
        return list(found.values())

    def _clear(self, newest: int) -> None:
        """All but the ``newest`` of each kind, and but what is in use."""
        kept = dict[tuple[str, str], list[str]]()
        for path, told in self._notes():
            if told is None:
                path.unlink()
                continue
            of_kind = kept.setdefault((str(told["arch"]), str(told["python"])), [])
            file = str(told["file"])
            if file in of_kind:
                continue
            if len(of_kind) < newest or not _free(self.folder / file):
                of_kind.append(file)
            else:
                path.unlink()
        named = {file for files in kept.values() for file in files}
        for archive in self.folder.glob("*.tar.gz"):
            if archive.name not in named and _free(archive):
                archive.unlink()
        for left in self.folder.glob(f"{MAKING}*"):
            if left.stat().st_mtime < time.time() - LEFT_S:
                shutil.rmtree(left, ignore_errors=True)


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _free(path: Path) -> bool:
    """Whether no process holds it, this one included; an absent one is free."""
    handle = _opened(path)
    if handle is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """In hex, of a file of any size."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
