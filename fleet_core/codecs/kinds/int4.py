"""``int4``: four bits per value and a bfloat16 scale per output channel (axis 0), rounded to nearest."""

from __future__ import annotations

import numpy as np

from fleet_core.base.errors import CodecError
from fleet_core.codecs.frame import Reader
from fleet_core.codecs.interface import Array
from fleet_core.codecs.kinds.int8_channel import ChannelCodec
from fleet_core.codecs.quantize import from_nibbles, nibble_bytes, nibbles


class Int4(ChannelCodec):
    """Codes −7 to 7 travel as 1 to 15, two in a byte."""

    name = "int4"
    about = "four bits per value, one scale per output channel"
    levels = 7

    def packed(self, codes: Array) -> bytes:
        return nibbles((codes + 8).astype(np.uint8))

    def unpacked(self, body: Reader, count: int) -> Array:
        codes = from_nibbles(body.take("u1", self.packed_bytes(count)), count)
        if not codes.all():
            raise CodecError("has a code that is none of -7 to 7")
        return codes.astype(np.int8) - np.int8(8)

    def packed_bytes(self, count: int) -> int:
        return nibble_bytes(count)
