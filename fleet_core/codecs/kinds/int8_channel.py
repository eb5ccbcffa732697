"""``int8-channel``: one signed byte per value and a bfloat16 scale per output channel (axis 0), rounded to nearest."""

from __future__ import annotations

import numpy as np

from fleet_core.codecs.frame import FramedCodec, Reader, checked_scales
from fleet_core.codecs.interface import Array, Arrays, Seed, Shapes
from fleet_core.codecs.quantize import (
    all_channels,
    channel_bound,
    channel_count,
    channel_scales,
    channels,
    from_bfloat16,
    nearest,
    to_bfloat16,
)
from fleet_core.codecs.vector import divided, in_order, size


class ChannelCodec(FramedCodec):
    """Integers from −``levels`` to ``levels`` times a scale per output channel."""

    levels: int

    def body(self, arrays: Arrays, seed: Seed) -> bytes:
        scales, codes = [np.zeros(0, np.float32)], [np.zeros(0, np.int8)]
        for array in in_order(arrays):
            scales.append(channel_scales(array, self.levels))
            codes.append(nearest(channels(array), scales[-1][:, None]).ravel())
        return to_bfloat16(np.concatenate(scales)).tobytes() + self.packed(np.concatenate(codes))

    def arrays(self, body: Reader, shapes: Shapes) -> dict[str, Array]:
        scales = checked_scales(from_bfloat16(body.take("<u2", all_channels(shapes))))
        codes = divided(self.unpacked(body, size(shapes)), shapes)
        arrays, end = {}, 0
        for name, code in codes.items():
            start, end = end, end + channel_count(code.shape)
            values = channels(code).astype(np.float32) * scales[start:end, None]
            arrays[name] = values.reshape(code.shape)
        return arrays

    def body_bytes(self, shapes: Shapes) -> int:
        return 2 * all_channels(shapes) + self.packed_bytes(size(shapes))

    def bound(self, arrays: Arrays) -> float:
        return channel_bound(arrays, self.levels)

    def packed(self, codes: Array) -> bytes:
        """int8 codes as bytes."""
        return codes.tobytes()

    def unpacked(self, body: Reader, count: int) -> Array:
        return body.take("i1", count)

    def packed_bytes(self, count: int) -> int:
        return count


class Int8Channel(ChannelCodec):
    name = "int8-channel"
    about = "a byte per value, one scale per output channel"
    levels = 127
