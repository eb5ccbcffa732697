"""zstd with a limit on the decompressed size: the standard library's from Python 3.14 on, its backport below."""

from __future__ import annotations

import functools
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
"""Weights contain hardly any repetition, so a large hash table costs time and gains nothing over entropy coding. The
checksum detects a frame that changed on disk."""

SMALLEST_WINDOW_LOG, LARGEST_WINDOW_LOG = 10, 27


MAGIC = b"\x28\xb5\x2f\xfd"
"""The first bytes of every zstd frame."""


def compress(data: bytes | memoryview, level: int | None = None, *, dictionary: bytes = b"") -> bytes:
    """level: zstd's, for text; None: settings for weights. dictionary: bytes that the data resembles; decompressing the
    frame needs them too."""
    if level is None:
        return zstd.compress(data, options=OPTIONS)
    prepared = _dictionary(dictionary)  # digested once for each level, not at each call
    return zstd.compress(data, level, zstd_dict=None if prepared is None else prepared.as_digested_dict)


def decompress(data: bytes, limit: int, *, dictionary: bytes = b"") -> bytes:
    """Raises CodecError unless ``data`` is exactly one zstd frame of at most ``limit`` decompressed bytes."""
    window_log = min(max(limit.bit_length(), SMALLEST_WINDOW_LOG), LARGEST_WINDOW_LOG)
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: window_log}
    decompressor = zstd.ZstdDecompressor(_dictionary(dictionary), options)
    try:
        out = decompressor.decompress(data, max_length=limit + 1)
    except zstd.ZstdError as error:
        raise CodecError(f"is not a zstd frame of at most {limit} bytes: {error}") from error
    if len(out) > limit:
        raise CodecError("decompresses to more than its limit", expected=f"at most {limit} bytes")
    if not decompressor.eof or decompressor.unused_data:
        raise CodecError("is a zstd frame that is truncated or followed by other bytes")
    return out


@functools.lru_cache(maxsize=4)
def _dictionary(content: bytes) -> zstd.ZstdDict | None:
    return zstd.ZstdDict(content, is_raw=True) if content else None
