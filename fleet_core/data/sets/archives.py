"""Reads members of compressed files and archives one by one, with size limits. Their names are never used as paths."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

from fleet_core.base.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"
MAX_MEMBERS = 200_000
CHUNK_BYTES = 1 << 20
BROKEN = (OSError, EOFError, ValueError, NotImplementedError, RuntimeError, tarfile.TarError, zipfile.BadZipFile,
          zlib.error, lzma.LZMAError)


def gunzip(path: Path, limit_bytes: int) -> bytes:
    """The content of a .gz file, or of the same file already unpacked. Raises DataError, also over ``limit_bytes``."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == GZIP_MAGIC
        with gzip.open(path) if packed else path.open("rb") as stream:
            return _at_most(cast("IO[bytes]", stream), limit_bytes, str(path))
    except BROKEN as error:
        raise DataError(f"cannot be unpacked: {error}", where=str(path)) from error


def unlzma(path: Path, to: IO[bytes], limit_bytes: int) -> None:
    """Writes the content of a .lzma or .xz file. Raises DataError, also over ``limit_bytes``."""
    written = 0
    try:
        with lzma.open(path) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                written += len(chunk)
                _bound(written, limit_bytes, str(path))
                to.write(chunk)
    except BROKEN as error:
        raise DataError(f"cannot be unpacked: {error}", where=str(path)) from error


def tar_files(path: Path, wanted: Callable[[str], object], limit_bytes: int) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each regular file of a .tar.gz whose name is wanted, in the archive's order.

    limit_bytes: the largest size of the whole archive, unpacked. Links, devices and folders are ignored. Raises
    DataError.
    """
    try:
        with gzip.open(path) as packed:
            stream = cast("IO[bytes]", _Bounded(cast("IO[bytes]", packed), limit_bytes, str(path)))
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for count, member in enumerate(archive):
                    _few(count, str(path))
                    if not member.isreg() or member.issparse() or not wanted(member.name):
                        continue
                    content = archive.extractfile(member)
                    data = b"" if content is None else content.read()
                    if len(data) != member.size:
                        raise DataError("is truncated", where=f"{path}: {member.name}")
                    yield member.name, data
    except BROKEN as error:
        raise DataError(f"cannot be unpacked: {error}", where=str(path)) from error


def zip_files(
    source: Path | bytes, wanted: Callable[[str], object], limit_bytes: int, where: str
) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each regular file of a .zip whose name is wanted, in the archive's order.

    limit_bytes: the largest size of the wanted files together, unpacked. Raises DataError.
    """
    total = 0
    try:
        with zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source) as archive:
            for count, info in enumerate(archive.infolist()):
                _few(count, where)
                if info.is_dir() or not wanted(info.filename):
                    continue
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise DataError("has an unsupported compression", where=f"{where}: {info.filename}")
                total += info.file_size
                _bound(total, limit_bytes, where)
                with archive.open(info) as member:
                    yield info.filename, _at_most(member, info.file_size, f"{where}: {info.filename}")
    except BROKEN as error:
        raise DataError(f"cannot be unpacked: {error}", where=where) from error


class _Bounded:
    """A readable stream that raises DataError after ``limit_bytes``."""

    def __init__(self, stream: IO[bytes], limit_bytes: int, where: str):
        self._stream, self._limit_bytes, self._where = stream, limit_bytes, where
        self._read_bytes = 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._read_bytes += len(data)
        _bound(self._read_bytes, self._limit_bytes, self._where)
        return data


def _at_most(stream: IO[bytes], limit_bytes: int, where: str) -> bytes:
    data = stream.read(limit_bytes + 1)
    _bound(len(data), limit_bytes, where)
    return data


def _bound(size_bytes: int, limit_bytes: int, where: str) -> None:
    if size_bytes > limit_bytes:
        raise DataError(f"has more than {limit_bytes} bytes unpacked", where=where)


def _few(count: int, where: str) -> None:
    if count >= MAX_MEMBERS:
        raise DataError(f"has more than {MAX_MEMBERS} members", where=where)
