"""The bytes of an image as .img, .img.xz or .img.zst, told apart by their content, block by block and bounded."""

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
"""Of memory that an .xz may ask for; ``xz -9`` takes 65 MiB."""
XZ, ZST = b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"

Told = Callable[[int, int], None]
"""Called with the bytes of the file that were read, and its size."""


def blocks(path: Path, told: Told = lambda done, total: None) -> Iterator[bytes]:
    """The image in blocks of BLOCK_BYTES, the last one shorter. Raises ConfigError for a file that cannot be read,
    FlashError for one that is damaged, cut short or larger than MAX_IMAGE_BYTES."""
    held, total = bytearray(), 0
    for part in _parts(path, told):
        total += len(part)
        if total > MAX_IMAGE_BYTES:
            raise FlashError(f"unpacks to more than {MAX_IMAGE_BYTES >> 30} GiB", where=str(path))
        held += part
        while len(held) >= BLOCK_BYTES:
            yield bytes(held[:BLOCK_BYTES])
            del held[:BLOCK_BYTES]
    if held:
        yield bytes(held)


def _parts(path: Path, told: Told) -> Iterator[bytes]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(6)
            file.seek(0)
            fresh = _decompressor(start)
            raw = _read(file, size, told)
            yield from raw if fresh is None else _unpacked(raw, fresh, path)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", where=str(path),
                          expected="an image, .img, .img.xz or .img.zst") from error


def _read(file: Any, size: int, told: Told) -> Iterator[bytes]:
    done = 0
    while block := file.read(1 << 20):
        done += len(block)
        told(done, size)
        yield block


def _decompressor(start: bytes) -> Callable[[], Any] | None:
    if start == XZ:
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_LZMA_BYTES)
    if start[:4] == ZST:
        return zstd.ZstdDecompressor
    if start[:2] == b"\x1f\x8b" or start[:2] == b"PK":
        raise FlashError("is packed as .gz or .zip", expected=".img, .img.xz or .img.zst", hint="unpack it first")
    return None


def _unpacked(raw: Iterator[bytes], fresh: Callable[[], Any], path: Path) -> Iterator[bytes]:
    """One stream after the other, as ``xz`` and ``zstd`` take them."""
    stream, held = fresh(), b""
    try:
        while True:
            if stream.eof:
                held = stream.unused_data.lstrip(b"\0") or next(raw, b"").lstrip(b"\0")
                if not held:
                    return
                stream = fresh()
            elif stream.needs_input:
                held = next(raw, b"")
                if not held:
                    raise FlashError("is cut short", where=str(path), hint="fetch the image again")
            else:
                held = b""
            yield stream.decompress(held, BLOCK_BYTES)
    except (lzma.LZMAError, zstd.ZstdError, EOFError) as error:
        raise FlashError(f"is damaged: {error}", where=str(path), hint="fetch the image again") from error
