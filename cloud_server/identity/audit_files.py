"""The files of the audit log: ``audit.ndjson``, which is written, and the full ones before it, ``audit-000001.ndjson``
and so on.

A full file is only renamed. The first line of the next file has the hash of its last line, so that the chain continues
even if the process died in between. A writer holds a lock on ``audit.ndjson``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fleet_core.base import storage

FILE = "audit.ndjson"
FULL_BYTES = 4 << 20
NUMBERED = re.compile(r"audit-(\d{6,12})\.ndjson")


def full_ones(folder: Path) -> list[Path]:
    """The full files, the oldest first."""
    return sorted((path for path in folder.glob("audit-*.ndjson") if NUMBERED.fullmatch(path.name)), key=number_of)


def number_of(path: Path) -> int:
    found = NUMBERED.fullmatch(path.name)
    return int(found[1]) if found else 0


@contextlib.contextmanager
def to_write(folder: Path, *, durable: bool) -> Iterator[int]:
    """``audit.ndjson``, opened and locked, after a full one was put aside. Raises OSError."""
    handle = _locked(folder, durable)
    try:
        yield handle
    finally:
        os.close(handle)


def _locked(folder: Path, durable: bool) -> int:
    path = folder / FILE
    while True:
        new = not path.exists()
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if new and os.geteuid() == 0:  # an aggregator that is not root writes it too
                os.fchown(handle, folder.stat().st_uid, folder.stat().st_gid)
            if not _is_at(handle, path):
                os.close(handle)  # another process has put it aside
                continue
            if os.fstat(handle).st_size >= FULL_BYTES:
                path.rename(folder / f"audit-{_next_number(folder):06}.ndjson")
                os.close(handle)
                continue
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(handle)
            raise
        if new and durable:
            storage.sync(folder)
        return handle


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _next_number(folder: Path) -> int:
    return max(map(number_of, full_ones(folder)), default=0) + 1


def to_read(folder: Path) -> tuple[list[Path], IO[bytes] | None, int]:
    """(the full files, ``audit.ndjson``, how many bytes of it to read), as they were at one moment. None if there is no
    such file. Raises OSError."""
    path = folder / FILE
    while True:
        if not path.exists():
            return full_ones(folder), None, 0
        file = path.open("rb")
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            if _is_at(file.fileno(), path):
                found = full_ones(folder), file, os.fstat(file.fileno()).st_size
                fcntl.flock(file, fcntl.LOCK_UN)
                return found
        except BaseException:
            file.close()
            raise
        file.close()
