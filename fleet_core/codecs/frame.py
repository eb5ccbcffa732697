"""The compact wire format: one byte for the kind, then the body under zstd, or a CRC-32 and the body as it is.

The body has no names, shapes or counts: both sides know the layout. Whichever kind is shorter is sent.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod

import numpy as np

from fleet_core.base.compression import compress, decompress
from fleet_core.base.errors import CodecError
from fleet_core.codecs.interface import Array, Arrays, Codec, Seed, Shapes

STORED, COMPRESSED = b"\0", b"\1"
OVERHEAD = 5


def pack(body: bytes) -> bytes:
    """At most ``OVERHEAD`` bytes longer than ``body``."""
    stored = STORED + zlib.crc32(body).to_bytes(4, "little") + body
    compressed = COMPRESSED + compress(body)
    return compressed if len(compressed) < len(stored) else stored


def unpack(data: bytes, limit: int) -> bytes:
    """The body of at most ``limit`` bytes. Raises CodecError."""
    kind, content = data[:1], data[1:]
    if kind == COMPRESSED:
        return decompress(content, limit)
    if kind != STORED or len(content) < 4:
        raise CodecError("is not a frame of a codec")
    body = content[4:]
    if len(body) > limit or zlib.crc32(body) != int.from_bytes(content[:4], "little"):
        raise CodecError("is a frame that is damaged or too long", expected=f"at most {limit} bytes")
    return body


class Reader:
    """Reads a body from front to back."""

    def __init__(self, body: bytes):
        self._body, self._at = body, 0

    @property
    def left(self) -> int:
        return len(self._body) - self._at

    def take(self, dtype: str, count: int) -> Array:
        """``count`` values. Raises CodecError if the body ends before."""
        need = count * np.dtype(dtype).itemsize
        if need > self.left:
            raise CodecError(f"ends {need - self.left} bytes too early")
        self._at += need
        return np.frombuffer(self._body, dtype, count, self._at - need)

    def scales(self, count: int) -> Array:
        """Float32 scales. Raises CodecError for one that is negative or not finite."""
        return checked_scales(self.take("<f4", count))

    def end(self) -> None:
        """Raises CodecError if bytes are left."""
        if self.left:
            raise CodecError(f"is followed by {self.left} other bytes")


def checked_scales(scales: Array) -> Array:
    """Raises CodecError for a scale that is negative or not finite."""
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise CodecError("has a scale that is negative or not finite")
    return scales


class FramedCodec(Codec):
    """A codec in the compact format."""

    @abstractmethod
    def body(self, arrays: Arrays, seed: Seed) -> bytes:
        """At most ``body_bytes`` bytes."""

    @abstractmethod
    def arrays(self, body: Reader, shapes: Shapes) -> dict[str, Array]:
        """The inverse of ``body``."""

    @abstractmethod
    def body_bytes(self, shapes: Shapes) -> int:
        """Bytes of the largest body."""

    def encode(self, arrays: Arrays, seed: Seed) -> bytes:
        return pack(self.body(arrays, seed))

    def decode(self, data: bytes, shapes: Shapes) -> dict[str, Array]:
        reader = Reader(unpack(data, self.body_bytes(shapes)))
        with np.errstate(over="ignore", invalid="ignore"):  # a scale that is too large gives values that are refused
            arrays = self.arrays(reader, shapes)
        reader.end()
        return arrays

    def max_bytes(self, shapes: Shapes) -> int:
        return self.body_bytes(shapes) + OVERHEAD
