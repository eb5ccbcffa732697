"""Caches programs between flashes: the newest few of each Python and architecture, and those in use.

    KEY.json                          facts of the program for a request; its mtime is that of its last use
    VERSION-ARCH-cpPYTHON.tar.gz      the archive that it names
    .lock                             locked while an archive is taken, added or removed

A process that was given an archive holds a shared lock on it until it ends, and a locked archive is not removed.
Removing also removes unreadable facts, archives without facts and the folders of killed runs.
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
"""Programs per Python and architecture: with and without torch, of this version and the previous one."""
ABANDONED_S = 86400.0
MAKING = ".making-"
MAX_FACTS_BYTES = 1 << 20
_LOCKED: list[int] = []
"""Descriptors of the archives that this process uses."""


@dataclass(frozen=True)
class Kept:
    """A cached program. used_at: Unix seconds. in_use: by a running process."""

    version: str
    python: str
    arch: str
    size_bytes: int
    installed_bytes: int
    used_at: float
    in_use: bool


class Cache:
    """The programs in ``folder``, which is created if needed. Methods raise OSError and StateError."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, key: str) -> tuple[dict[str, Any], Path] | None:
        """(facts, archive) stored under ``key``, and locks the archive; None if it is absent or damaged."""
        with self._locked():
            facts = self._facts(self._facts_path(key))
            path = None if facts is None else self.folder / str(facts["file"])
            handle = None if path is None else _opened(path)
            if facts is None or path is None or handle is None:
                return None
            fcntl.flock(handle, fcntl.LOCK_SH)
            os.utime(self._facts_path(key))
        if sha256_of(path) != facts["sha256"]:
            os.close(handle)
            return None
        _LOCKED.append(handle)
        return facts, path

    def add(self, key: str, packed: Path, facts: Mapping[str, Any]) -> Path:
        """Moves the archive ``packed`` to facts["file"], locks it, and removes old archives."""
        path = self.folder / str(facts["file"])
        with self._locked():
            storage.move(packed, path)
            storage.write_json(self._facts_path(key), facts)
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(handle, fcntl.LOCK_SH)
            _LOCKED.append(handle)
            self._remove_old(NEWEST)
        return path

    def clear(self) -> list[Kept]:
        """Removes everything that is not in use, and returns it."""
        with self._locked():
            before = self._entries()
            self._remove_old(0)
            left = {kept.version for kept in self._entries()}
        return [kept for kept in before if kept.version not in left]

    def entries(self) -> list[Kept]:
        """The cached programs, last used first."""
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

    def _facts_path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _facts(self, path: Path) -> dict[str, Any] | None:
        """None if they are damaged."""
        try:
            facts = json.loads(storage.read_bytes(path, limit=MAX_FACTS_BYTES))
            in_folder = Path(str(facts["file"])).name == facts["file"]
            return dict(facts) if in_folder and {"version", "sha256", "arch", "python"} <= facts.keys() else None
        except (StateError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _all_facts(self) -> list[tuple[Path, dict[str, Any] | None]]:
        """Last used first."""
        paths = sorted(self.folder.glob("*.json"), key=lambda path: (-path.stat().st_mtime_ns, path.name))
        return [(path, self._facts(path)) for path in paths]

    def _entries(self) -> list[Kept]:
        entries = dict[str, Kept]()
        for path, facts in self._all_facts():
            archive = None if facts is None else self.folder / facts["file"]
            if facts is not None and archive is not None and archive.is_file():
                entries.setdefault(archive.name, Kept(
                    str(facts["version"]), str(facts["python"]), str(facts["arch"]), archive.stat().st_size,
                    int(facts.get("installed_bytes", 0)), path.stat().st_mtime, not _is_free(archive),
                ))
        return list(entries.values())

    def _remove_old(self, newest: int) -> None:
        """Keeps the ``newest`` archives per Python and architecture, and those in use."""
        kept = dict[tuple[str, str], list[str]]()
        for path, facts in self._all_facts():
            if facts is None:
                path.unlink()
                continue
            of_kind = kept.setdefault((str(facts["arch"]), str(facts["python"])), [])
            file = str(facts["file"])
            if file in of_kind:
                continue
            if len(of_kind) < newest or not _is_free(self.folder / file):
                of_kind.append(file)
            else:
                path.unlink()
        kept_files = {file for files in kept.values() for file in files}
        for archive in self.folder.glob("*.tar.gz"):
            if archive.name not in kept_files and _is_free(archive):
                archive.unlink()
        for folder in self.folder.glob(f"{MAKING}*"):
            if folder.stat().st_mtime < time.time() - ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _is_free(path: Path) -> bool:
    """Whether no process, this one included, holds a lock on it. True if it does not exist."""
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
    """SHA-256 in hex of a file of any size."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
