"""Values as small integers times a scale, bfloat16, and random numbers that are the same everywhere."""

from __future__ import annotations

import math

import numpy as np

from fleet_core.base.errors import CodecError
from fleet_core.codecs.interface import Array, Arrays, Seed, Shapes

LARGEST_BFLOAT16 = np.uint32(0x7F7F_0000)


def scale_for(largest: float, levels: int) -> float:
    """The smallest float32 scale with scale · levels ≥ ``largest``."""
    scale = np.float32(largest / levels)
    return float(scale if float(scale) * levels >= largest else np.nextafter(scale, np.float32(np.inf)))


def largest(values: Array) -> float:
    return float(np.abs(values).max(initial=0.0))


def nearest(values: Array, scale: Array | float) -> Array:
    """int8, values / scale rounded to nearest; 0 where the scale is 0."""
    rounded: Array = np.rint(_ratio(values, scale))
    return rounded.astype(np.int8)


def stochastic(values: Array, scale: Array | float, random: Array) -> Array:
    """int8, values / scale rounded up or down at random, so that the mean is exact. random: float64 in [0, 1)."""
    rounded: Array = np.floor(_ratio(values, scale) + random)
    return rounded.astype(np.int8)


def _ratio(values: Array, scale: Array | float) -> Array:
    divisor = np.asarray(scale, np.float64)
    return np.divide(values, divisor, out=np.zeros(values.shape), where=divisor > 0)


def rounding_bound(values: Array, scale: float) -> float:
    """Largest norm of what rounding to nearest loses: no value loses more than half a step, or than itself."""
    norm = float(np.linalg.norm(values.astype(np.float64)))
    return min(norm, math.sqrt(values.size) * scale / 2)


# Channels -------------------------------------------------------------------------------------------------------------


def channels(array: Array) -> Array:
    """[output channels, rest]; scalars and vectors are one channel."""
    return array.reshape(channel_count(array.shape), -1) if array.size else array.reshape(0, 1)


def channel_count(shape: tuple[int, ...]) -> int:
    return (shape[0] if len(shape) > 1 else 1) if math.prod(shape) else 0


def all_channels(shapes: Shapes) -> int:
    return sum(map(channel_count, shapes.values()))


def channel_scales(array: Array, levels: int) -> Array:
    """Float32 [channels], each a bfloat16 value with scale · levels ≥ the channel's largest value."""
    return up_to_bfloat16(np.asarray([scale_for(largest(row), levels) for row in channels(array)], np.float32))


def channel_bound(arrays: Arrays, levels: int) -> float:
    """``rounding_bound`` of all channels together."""
    parts = (
        rounding_bound(row, float(scale))
        for array in arrays.values()
        for row, scale in zip(channels(array), channel_scales(array, levels), strict=True)
    )
    return math.sqrt(sum(part * part for part in parts))


# Four bits: two codes in a byte, the first one in the low half -------------------------------------------------------


def nibbles(codes: Array) -> bytes:
    """codes: uint8 below 16."""
    padded = np.zeros(len(codes) + len(codes) % 2, np.uint8)
    padded[: len(codes)] = codes
    return (padded[::2] | padded[1::2] << 4).astype(np.uint8).tobytes()


def from_nibbles(pairs: Array, count: int) -> Array:
    """uint8 [count]; pairs: uint8 [nibble_bytes(count)]. Raises CodecError if the half byte after an odd count is not
    0."""
    codes = np.stack([pairs & 15, pairs >> 4], 1).reshape(-1)
    if codes[count:].any():
        raise CodecError("has a code too many")
    return codes[:count]


def nibble_bytes(count: int) -> int:
    return (count + 1) // 2


# bfloat16: the upper half of float32 ----------------------------------------------------------------------------------


def to_bfloat16(values: Array) -> Array:
    """uint16, rounded to nearest, ties to even; the largest finite value instead of infinity."""
    bits = np.asarray(values, "<f4", order="C").view("<u4")
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    magnitude = np.minimum(rounded & np.uint32(0x7FFF_FFFF), LARGEST_BFLOAT16)
    halves: Array = ((bits & np.uint32(0x8000_0000)) | magnitude) >> np.uint32(16)
    return halves.astype("<u2")


def from_bfloat16(halves: Array) -> Array:
    """float32."""
    return np.asarray((halves.astype("<u4") << np.uint32(16)).view("<f4"), np.float32)


def up_to_bfloat16(values: Array) -> Array:
    """Float32 values ≥ 0, rounded up to bfloat16."""
    bits = np.asarray(values, "<f4", order="C").view("<u4")
    up = np.minimum((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF_0000), LARGEST_BFLOAT16)
    return np.asarray(up.view("<f4"), np.float32)


# Random numbers -------------------------------------------------------------------------------------------------------


def key(seed: Seed) -> int:
    """64 bits of a seed."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])


def random_words(key: int, count: int) -> Array:
    """uint64 [count]: raw output of Philox, which is the same for every version of numpy (NEP 19)."""
    return np.random.Philox(key=key).random_raw(count)


def uniform(words: Array) -> Array:
    """float64 in [0, 1), from the upper 53 bits."""
    return (words >> np.uint64(11)) * 2.0**-53
