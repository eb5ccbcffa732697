"""Writes an image to a card, every block of it, and reads it back without caches.

The first MiB is written last: a card whose writing was cut off has no partition table and starts nothing. Holes of the
image are written too, because a used card has old data there. The device is opened exclusively (O_EXCL), and read with
O_DIRECT, so that the data comes from the card and not from memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from firmware_profiles.image.block_device import Card
from fleet_core.base.errors import ConfigError, FlashError

BLOCK_BYTES = 4 << 20
HEAD_BYTES = 1 << 20
SYNC_BYTES = 64 << 20
ALIGNED_BYTES = 4096
BLKRRPART, BLKFLSBUF, CDROMEJECT = 0x125F, 0x1261, 0x5309

AS_WHO = "run as root, or as a user in the group 'disk'"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Written:
    """compared_by: how the card was read back. ejected: the card may be taken out at once."""

    bytes: int
    write_s: float
    verify_s: float
    compared_by: str
    ejected: bool


def check(card: Card, size: int) -> None:
    """Raises ConfigError if the card cannot take ``size`` bytes, or may not be written. Opens nothing: after a program
    has closed a disk that it could write, the system reads its partitions again, and may mount them."""
    if size > card.size_bytes:
        raise ConfigError(f"is too small: the image has {size} bytes, it has {card.size_bytes}", where=str(card.path))
    if not os.access(card.path, os.R_OK | os.W_OK):
        raise ConfigError("may not be written by you", where=str(card.path), hint=AS_WHO)


def write(
    image: Path, card: Card, progress: Progress = lambda what, done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> Written:
    """Writes the image from the card's first byte on, and compares it block by block.

    Raises ConfigError if the card is too small or in use, FlashError if it does not hold what was written.
    """
    size = image.stat().st_size
    check(card, size)
    with _opened(card) as device, image.open("rb") as source:
        began = clock()
        _write(source.fileno(), device, size, progress)
        between = clock()
        compared_by = _verify(source.fileno(), card, device, HEAD_BYTES, size, progress)
        _copy_range(source.fileno(), device, 0, min(HEAD_BYTES, size), lambda done: None)
        os.fsync(device)
        _verify(source.fileno(), card, device, 0, min(HEAD_BYTES, size), lambda what, done, total: None)
        ended = clock()
        ejected = not card.is_file and _eject(device)
    return Written(size, between - began, ended - between, compared_by, ejected)


@contextlib.contextmanager
def _opened(card: Card) -> Iterator[int]:
    exclusive = 0 if card.is_file else os.O_EXCL
    try:
        device = os.open(card.path, os.O_RDWR | os.O_CLOEXEC | exclusive)
    except OSError as error:
        hints = {errno.EBUSY: "something uses it: unmount it",
                 errno.EACCES: AS_WHO}
        raise ConfigError(f"cannot be opened: {error.strerror}", where=str(card.path),
                          hint=hints.get(error.errno or 0)) from error
    try:
        yield device
    except OSError as error:
        raise FlashError(f"the card failed: {error.strerror or error}", where=str(card.path),
                         hint="was it taken out? try again, or another card") from error
    finally:
        os.close(device)


def _write(source: int, device: int, size: int, progress: Progress) -> None:
    head = min(HEAD_BYTES, size)
    os.pwrite(device, bytes(head), 0)
    os.fsync(device)
    _copy_range(source, device, head, size, lambda done: progress("writing", done, size))
    os.fsync(device)
    progress("writing", size, size)


def _copy_range(source: int, device: int, start: int, end: int, progress: Callable[[int], None]) -> None:
    """Copies from ``start`` to ``end``, and syncs regularly, so that the progress is that of the card."""
    at, unsynced = start, 0
    while at < end:
        block = os.pread(source, min(BLOCK_BYTES, end - at), at)
        if not block:
            raise FlashError("the image became shorter while it was written")
        view, place = memoryview(block), at
        while view:
            count = os.pwrite(device, view, place)
            view, place = view[count:], place + count
        at, unsynced = at + len(block), unsynced + len(block)
        if unsynced >= SYNC_BYTES:
            os.fdatasync(device)
            unsynced = 0
        progress(at)


# Reading back ---------------------------------------------------------------------------------------------------------


def _verify(source: int, card: Card, device: int, start: int, end: int, progress: Progress) -> str:
    """Compares bytes ``start`` to ``end``; returns how they were read. Raises FlashError at the first difference."""
    if not card.is_file:
        fcntl.ioctl(device, BLKFLSBUF, 0)
    os.posix_fadvise(device, 0, 0, os.POSIX_FADV_DONTNEED)
    reader, how = _uncached(card.path)
    at = start - start % ALIGNED_BYTES
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:  # page-aligned, as O_DIRECT needs
            while at < end:
                wanted = os.pread(source, min(BLOCK_BYTES, end - at), at)
                count = _read_into(reader, buffer, -(-len(wanted) // ALIGNED_BYTES) * ALIGNED_BYTES, at)
                if count < len(wanted) or buffer[: len(wanted)] != wanted:
                    raise _difference(wanted, buffer[:count], at)
                at += len(wanted)
                progress("verifying", min(at, end), end)
    finally:
        os.close(reader)
    return how


def _uncached(path: Path) -> tuple[int, str]:
    """(descriptor that reads without the page cache if possible, how it reads)."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        with contextlib.suppress(OSError):
            return os.open(path, flags | direct), "O_DIRECT"
    return os.open(path, flags), "reading with the cache dropped"


def _read_into(reader: int, buffer: mmap.mmap, count: int, at: int) -> int:
    """Reads up to ``count`` bytes from ``at`` on; fewer at the end of a file in place of a card."""
    with memoryview(buffer) as view:
        return os.preadv(reader, [view[:count]], at)


def _difference(wanted: bytes, read: bytes, at: int) -> FlashError:
    first = next((n for n, (a, b) in enumerate(zip(wanted, read, strict=False)) if a != b), len(read))
    return FlashError(f"the card does not hold what was written, first at byte {at + first}",
                      hint="try again; a card that fails twice is worn out, or smaller than it reports")


def _eject(device: int) -> bool:
    """Makes the kernel read the new table and the reader eject the card; the data does not depend on it. Returns
    whether the card was ejected."""
    for request in (BLKRRPART, CDROMEJECT):
        try:
            fcntl.ioctl(device, request, 0)
        except OSError:
            done = False
        else:
            done = True
    return done
