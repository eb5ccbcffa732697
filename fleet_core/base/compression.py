"""zstd with a cap on what comes out: the standard library's from Python 3.14, its backport below."""

from __future__ import annotations

import sys

from fleet_core.base.errors import CodecError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

OPTIONS: dict[int, int] = {
    zstd.CompressionParameter.compression_level: 1,
    zstd.CompressionParameter.hash_log: 6,
    zstd.CompressionParameter.checksum_flag: 1,
}
"""Weights hold hardly a repetition: looking for them in a large table costs time and gains nothing over the entropy
coding. The checksum finds a frame that changed on the disk."""

SMALLEST_WINDOW_LOG, LARGEST_WINDOW_LOG = 10, 27


def compress(data: bytes | memoryview) -> bytes:
    return zstd.compress(data, options=OPTIONS)


def decompress(data: bytes, limit: int) -> bytes:
    """At most ``limit`` bytes. Raises CodecError for bytes that are no zstd frame, or hold more than ``limit``."""
    window_log = min(max(limit.bit_length(), SMALLEST_WINDOW_LOG), LARGEST_WINDOW_LOG)
    machine = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window_log})
    try:
        out = machine.decompress(data, max_length=limit + 1)
    except zstd.ZstdError as error:
        raise CodecError(f"is no zstd frame of at most {limit} bytes: {error}") from error
    if len(out) > limit:
        raise CodecError("decompresses to more than its limit", expected=f"at most {limit} bytes")
    if not machine.eof or machine.unused_data:
        raise CodecError("is a zstd frame that is cut short or followed by other bytes")
    return out
