"""Subnormal numbers as zero in numpy: sets the processor's flag for this thread, as ``torch.set_flush_denormal`` does.

It calls ``fegetenv`` and ``fesetenv`` of the C library, whose environment holds the flags at a known place: on x86-64
the register MXCSR (bits FTZ and DAZ), on ARM64 FPCR (bit FZ). Elsewhere numbers stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import platform
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

SIZE = 64
"""At least as many bytes as an ``fenv_t`` has: 32 on x86-64, 8 on ARM64."""

_FLAGS = {("linux", "x86_64"): (28, 0x8040), ("linux", "aarch64"): (0, 1 << 24)}
"""{(system, processor): (offset in ``fenv_t``, bits)}."""


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Within it this thread treats subnormal float32 (below 1.2e-38) as zero, if the processor's flag is known."""
    place, library = _FLAGS.get((sys.platform, platform.machine())), _library()
    if place is None or library is None:
        yield
        return
    before = ctypes.create_string_buffer(SIZE)
    library.fegetenv(before)
    offset, bits = place
    raw = bytearray(before.raw)
    raw[offset : offset + 4] = (int.from_bytes(raw[offset : offset + 4], "little") | bits).to_bytes(4, "little")
    after = ctypes.create_string_buffer(bytes(raw), SIZE)
    library.fesetenv(after)
    try:
        yield
    finally:
        library.fesetenv(before)


@cache
def _library() -> Any:
    """The C library's mathematics, or None."""
    for name in ("libm.so.6", ctypes.util.find_library("m") or ""):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            if library.fegetenv and library.fesetenv:
                return library
    return None
