"""Reads an image (.img, .img.xz or .img.zst, recognized by its content) block by block, with limits."""

from __future__ import annotations

import lzma
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fleet_core.base.errors import ConfigError, FlashError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK_BYTES = 4 << 20
MAX_IMAGE_BYTES = 64 << 30
MAX_LZMA_BYTES = 256 << 20
"""Memory that unpacking an .xz may take; ``xz -9`` takes 65 MiB."""
XZ, ZST = b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"

Progress = Callable[[int, int], None]
"""Called with the bytes of the file that were read, and its size."""


def is_packed(path: Path) -> bool:
    """Whether the file is an .img.xz or .img.zst, by its content."""
    with path.open("rb") as file:
        start = file.read(6)
    return start == XZ or start[:4] == ZST


def blocks(path: Path, progress: Progress = lambda done, total: None) -> Iterator[bytes]:
    """The image in blocks of BLOCK_BYTES, the last one shorter. Raises ConfigError if the file cannot be read,
    FlashError if it is damaged, cut short or larger than MAX_IMAGE_BYTES."""
    buffer, total = bytearray(), 0
    for part in _parts(path, progress):
        total += len(part)
        if total > MAX_IMAGE_BYTES:
            raise FlashError(f"unpacks to more than {MAX_IMAGE_BYTES >> 30} GiB", where=str(path))
        buffer += part
        while len(buffer) >= BLOCK_BYTES:
            yield bytes(buffer[:BLOCK_BYTES])
            del buffer[:BLOCK_BYTES]
    if buffer:
        yield bytes(buffer)


def _parts(path: Path, progress: Progress) -> Iterator[bytes]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(6)
            file.seek(0)
            decompressor = _decompressor(start)
            raw = _read(file, size, progress)
            yield from raw if decompressor is None else _unpacked(raw, decompressor, path)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", where=str(path),
                          expected="an image, .img, .img.xz or .img.zst") from error


def _read(file: Any, size: int, progress: Progress) -> Iterator[bytes]:
    done = 0
    while block := file.read(1 << 20):
        done += len(block)
        progress(done, size)
        yield block


def _decompressor(start: bytes) -> Callable[[], Any] | None:
    if start == XZ:
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_LZMA_BYTES)
    if start[:4] == ZST:
        return zstd.ZstdDecompressor
    if start[:2] == b"\x1f\x8b" or start[:2] == b"PK":
        raise FlashError("is packed as .gz or .zip", expected=".img, .img.xz or .img.zst", hint="unpack it first")
    return None


def _unpacked(raw: Iterator[bytes], decompressor: Callable[[], Any], path: Path) -> Iterator[bytes]:
    """The content of concatenated streams, in order, as ``xz`` and ``zstd`` read them."""
    stream, data = decompressor(), b""
    try:
        while True:
            if stream.eof:
                data = stream.unused_data.lstrip(b"\0") or next(raw, b"").lstrip(b"\0")
                if not data:
                    return
                stream = decompressor()
            elif stream.needs_input:
                data = next(raw, b"")
                if not data:
                    raise FlashError("is cut short", where=str(path), hint="fetch the image again")
            else:
                data = b""
            yield stream.decompress(data, BLOCK_BYTES)
    except (lzma.LZMAError, zstd.ZstdError, EOFError) as error:
        raise FlashError(f"is damaged: {error}", where=str(path), hint="fetch the image again") from error
