"""How the C library keeps freed memory: on glibc by two settings and one call, elsewhere as it likes.

By default glibc gives a large array back to the system when it is freed and gets it again for the next, page by page.
Arrays of a model come and go many times in a round, and the pages cost more than the peak, which is the same. What lies
free is given back in one go when there is nothing to do.
"""

from __future__ import annotations

import contextlib
import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # of mallopt(3)
KEPT_BYTES = 1 << 28
LARGEST_KEPT_BYTES = 1 << 25


def keep_freed() -> None:
    """From now on freed arrays of up to 32 MiB stay in the process, until ``trim``."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        libc.mallopt(TRIM_THRESHOLD, KEPT_BYTES)


def share() -> None:
    """From now on new threads take memory from one pool; by default each has one of its own, and what lies free in it
    is nobody else's."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(ARENA_MAX, 1)


def trim() -> None:
    """Gives back what lies free."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
