"""zstd with a cap on what comes out: the standard library's from Python 3.14, its backport below."""

from __future__ import annotations

import sys

from fleet_core.errors import CodecError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL = 3


def compress(data: bytes) -> bytes:
    return zstd.compress(data, level=LEVEL)


def decompress(data: bytes, limit: int) -> bytes:
    """At most ``limit`` bytes. Raises CodecError for bytes that are no zstd frame, or hold more than ``limit``."""
    machine = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 27})
    try:
        out = machine.decompress(data, max_length=limit + 1)
    except zstd.ZstdError as error:
        raise CodecError(f"is no zstd frame: {error}") from error
    if len(out) > limit:
        raise CodecError("decompresses to more than its limit", expected=f"at most {limit} bytes")
    if not machine.eof or machine.unused_data:
        raise CodecError("is a zstd frame that is cut short or followed by other bytes")
    return out
