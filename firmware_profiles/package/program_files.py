"""The files of a program's archive, with their hashes: what ``MANIFEST.sha256`` lists and the fleet's key signs."""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

from fleet_core.base.errors import FlashError


@dataclass(frozen=True)
class Content:
    """The content of a program's archive. files: {path in the version's folder: (SHA-256 in hex, bytes)}."""

    folder: str
    files: dict[str, tuple[str, int]]

    @property
    def manifest(self) -> bytes:
        return "".join(f"{digest}  {name}\n" for name, (digest, _) in sorted(self.files.items())).encode()


def content_of(path: Path) -> Content:
    """Raises FlashError if the archive cannot be installed."""
    status = path.stat()
    return _content(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=16)
def _content(path: Path, mtime_ns: int, size: int) -> Content:
    """The content, read once for all devices; ``mtime_ns`` and ``size`` distinguish a file that was replaced."""
    del mtime_ns, size
    files, folders = {}, set()
    with opened(path) as archive:
        for entry, name in files_in(archive, path):
            stream = archive.extractfile(entry)
            assert stream is not None
            files[name] = (_sha256(stream), entry.size)
            folders.add(entry.name.partition("/")[0])
    if len(folders) != 1:
        raise FlashError(f"holds {len(folders)} folders", where=str(path), expected="one, the version's")
    return Content(folders.pop(), files)


def _sha256(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


@contextmanager
def opened(path: Path) -> Iterator[tarfile.TarFile]:
    """The archive as a stream. Raises FlashError."""
    try:
        with tarfile.open(path, "r|gz") as archive:
            yield archive
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FlashError(f"cannot be read: {error}", where=str(path), hint="delete it, and run this again") from error


def files_in(archive: tarfile.TarFile, path: Path) -> Iterator[tuple[tarfile.TarInfo, str]]:
    """(file, path in the version's folder) of the archive. Raises FlashError for names that sha256sum or a shell would
    misread, and for entries that are no plain files."""
    for entry in archive:
        if entry.isdir():
            continue
        _, _, name = entry.name.partition("/")
        plain = re.fullmatch(r"[ -\[\]-~]+", name) and ".." not in name.split("/") and ": FAILED" not in name
        if not entry.isfile() or not plain or name[0] in "/ ":
            raise FlashError(f"'{entry.name[:200]!a}' is not a plain file", where=str(path))
        yield entry, name
