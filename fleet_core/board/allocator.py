"""Controls how glibc keeps freed memory; has no effect with other C libraries.

By default glibc returns a large array to the system when it is freed, and gets new pages for the next one. A model's
arrays are allocated and freed many times in a round. Keeping freed memory saves these page faults and has the same
peak; ``trim`` returns it when the process is idle. """

from __future__ import annotations

import contextlib
import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # of mallopt(3)
KEPT_BYTES = 1 << 28
LARGEST_KEPT_BYTES = 1 << 25


def keep_freed() -> None:
    """From now on the process keeps freed arrays of up to 32 MiB until ``trim``."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        libc.mallopt(TRIM_THRESHOLD, KEPT_BYTES)


def share() -> None:
    """From now on threads allocate from one arena. By default each has its own, whose free memory others cannot use."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(ARENA_MAX, 1)


def trim() -> None:
    """Returns free memory to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
