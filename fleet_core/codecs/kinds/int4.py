"""``int4``: four bits per value and a bfloat16 scale per output channel (axis 0), rounded to nearest."""

from __future__ import annotations

import numpy as np

from fleet_core.base.errors import CodecError
from fleet_core.codecs.frame import Reader
from fleet_core.codecs.interface import Array
from fleet_core.codecs.kinds.int8_channel import ChannelCodec


class Int4(ChannelCodec):
    """Codes −7 to 7 travel as 1 to 15, two in a byte."""

    name = "int4"
    about = "four bits per value, one scale per output channel"
    levels = 7

    def packed(self, codes: Array) -> bytes:
        nibbles = np.zeros(len(codes) + len(codes) % 2, np.uint8)
        nibbles[: len(codes)] = codes + 8
        return (nibbles[::2] | nibbles[1::2] << 4).astype(np.uint8).tobytes()

    def unpacked(self, body: Reader, count: int) -> Array:
        pairs = body.take("u1", self.packed_bytes(count))
        nibbles = np.stack([pairs & 15, pairs >> 4], 1).reshape(-1)
        if not nibbles[:count].all() or nibbles[count:].any():
            raise CodecError("has a code that is none of -7 to 7")
        return nibbles[:count].astype(np.int8) - np.int8(8)

    def packed_bytes(self, count: int) -> int:
        return (count + 1) // 2
