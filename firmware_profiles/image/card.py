"""Writes an image onto a card so that what is on it is known: every block, then read back past every cache.

The first MiB goes on last: a card whose writing was cut off has no partition table and starts nothing. Holes of the
image are written too, since a used card holds something there. A device is opened for this program alone (O_EXCL), and
read with O_DIRECT, so that the card answers and not the memory.
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

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Written:
    """What was done. compared_by: how it was read back. ejected: the card may be taken out at once."""

    bytes: int
    write_s: float
    verify_s: float
    compared_by: str
    ejected: bool


def write(
    image: Path, card: Card, progress: Progress = lambda what, done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> Written:
    """The image, on the card from its first byte on, compared block by block.

    Raises ConfigError for a card that is too small or in use, FlashError where it does not hold what was written.
    """
    size = image.stat().st_size
    if size > card.size_bytes:
        raise ConfigError(f"is too small: the image has {size} bytes, it has {card.size_bytes}", where=str(card.path))
    with _opened(card) as device, image.open("rb") as source:
        began = clock()
        _write(source.fileno(), device, size, progress)
        between = clock()
        compared_by = _verify(source.fileno(), card, device, HEAD_BYTES, size, progress)
        _range(source.fileno(), device, 0, min(HEAD_BYTES, size), lambda done: None)
        os.fsync(device)
        _verify(source.fileno(), card, device, 0, min(HEAD_BYTES, size), lambda what, done, total: None)
        ended = clock()
        ejected = not card.is_file and _eject(device)
    return Written(size, between - began, ended - between, compared_by, ejected)


@contextlib.contextmanager
def _opened(card: Card) -> Iterator[int]:
    alone = 0 if card.is_file else os.O_EXCL
    try:
        device = os.open(card.path, os.O_RDWR | os.O_CLOEXEC | alone)
    except OSError as error:
        hints = {errno.EBUSY: "something uses it: unmount it", errno.EACCES: "run as root, or as one of group 'disk'"}
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
    _range(source, device, head, size, lambda done: progress("writing", done, size))
    os.fsync(device)
    progress("writing", size, size)


def _range(source: int, device: int, start: int, end: int, told: Callable[[int], None]) -> None:
    """Copies from ``start`` to ``end``; synchronised now and then, so that the progress is the card's."""
    at, since = start, 0
    while at < end:
        block = os.pread(source, min(BLOCK_BYTES, end - at), at)
        if not block:
            raise FlashError("the image became shorter while it was written")
        view, place = memoryview(block), at
        while view:
            count = os.pwrite(device, view, place)
            view, place = view[count:], place + count
        at, since = at + len(block), since + len(block)
        if since >= SYNC_BYTES:
            os.fdatasync(device)
            since = 0
        told(at)


# Reading back ---------------------------------------------------------------------------------------------------------


def _verify(source: int, card: Card, device: int, start: int, end: int, progress: Progress) -> str:
    """Compares bytes ``start`` to ``end``. Raises FlashError at the first that differs. Returns how it was read."""
    if not card.is_file:
        fcntl.ioctl(device, BLKFLSBUF, 0)
    os.posix_fadvise(device, 0, 0, os.POSIX_FADV_DONTNEED)
    reader, how = _uncached(card.path)
    at = start - start % ALIGNED_BYTES
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:  # begins at a page, as O_DIRECT asks
            while at < end:
                wanted = os.pread(source, min(BLOCK_BYTES, end - at), at)
                found = _filled(reader, buffer, -(-len(wanted) // ALIGNED_BYTES) * ALIGNED_BYTES, at)
                if found < len(wanted) or buffer[: len(wanted)] != wanted:
                    _differs(wanted, buffer[:found], at)
                at += len(wanted)
                progress("verifying", min(at, end), end)
    finally:
        os.close(reader)
    return how


def _uncached(path: Path) -> tuple[int, str]:
    """A descriptor that reads past the memory, where the file system can."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        with contextlib.suppress(OSError):
            return os.open(path, flags | direct), "O_DIRECT"
    return os.open(path, flags), "reading with the cache dropped"


def _filled(reader: int, buffer: mmap.mmap, count: int, at: int) -> int:
    """Reads up to ``count`` bytes from ``at`` on; fewer at the end of a file that stands for a card."""
    with memoryview(buffer) as view:
        return os.preadv(reader, [view[:count]], at)


def _differs(wanted: bytes, found: bytes, at: int) -> None:
    first = next((n for n, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), len(found))
    raise FlashError(f"the card does not hold what was written, first at byte {at + first}",
                     hint="try again; a card that does so twice is worn out, or smaller than it says")


def _eject(device: int) -> bool:
    """Has the kernel read the new table, and the reader let go of the card; neither is needed for the data."""
    for request in (BLKRRPART, CDROMEJECT):
        try:
            fcntl.ioctl(device, request, 0)
        except OSError:
            done = False
        else:
            done = True
    return done
