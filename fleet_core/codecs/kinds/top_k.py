"""``topk-10``, ``topk-1``, ``topk-01``: the 10 %, 1 % or 0.1 % largest of all values, as int8 with one float32 scale.
``topk-10-4bit`` and so on: each as a sign and one of eight magnitudes, evenly from the smallest to the largest sent.

Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018. Places travel as gaps in a Rice code (Rice and
Plaunt 1971), whose parameter both sides compute from the two counts: about 4.8, 8.2 and 11.5 bits for a place.
"""

from __future__ import annotations

import math

import numpy as np

from fleet_core.base.errors import CodecError
from fleet_core.codecs.frame import FramedCodec, Reader
from fleet_core.codecs.interface import LARGE_PENALTY, Array, Arrays, Seed, Shapes
from fleet_core.codecs.quantize import from_nibbles, largest, nearest, nibble_bytes, nibbles, scale_for
from fleet_core.codecs.vector import divided, joined, length, size

SLOW = "is far from the minimiser of quadratics after 500 rounds"


class TopK(FramedCodec):
    feedback_down = False
    share: float

    def body(self, arrays: Arrays, seed: Seed) -> bytes:
        values = joined(arrays)
        places = _largest_places(values, self._kept(len(values)))
        return self.packed(values[places]) + rice_encode(places, len(values))

    def arrays(self, body: Reader, shapes: Shapes) -> dict[str, Array]:
        count = size(shapes)
        kept = self.unpacked(body, self._kept(count))
        values = np.zeros(count, np.float32)
        values[rice_decode(body, len(kept), count)] = kept
        return divided(values, shapes)

    def body_bytes(self, shapes: Shapes) -> int:
        count = size(shapes)
        return self.packed_bytes(self._kept(count)) + rice_max_bytes(self._kept(count), count)

    def bound(self, arrays: Arrays) -> float:
        """The norm of what is not among the largest, and the rounding of those."""
        values, norm = joined(arrays), length(arrays)
        kept = self._kept(len(values))
        rounding = math.sqrt(kept) * self.step(values[_largest_places(values, kept)]) / 2
        return min(norm, math.sqrt(1 - kept / max(1, len(values))) * norm + rounding)

    def step(self, kept: Array) -> float:
        """Distance of neighbouring values that ``packed`` can tell apart."""
        return scale_for(largest(kept), 127)

    def packed(self, kept: Array) -> bytes:
        scale = self.step(kept)
        return np.asarray([scale], "<f4").tobytes() + nearest(kept, scale).tobytes()

    def unpacked(self, body: Reader, count: int) -> Array:
        """Float32 [count]. Raises CodecError."""
        scale = body.scales(1)
        kept: Array = body.take("i1", count).astype(np.float32) * scale
        return kept

    def packed_bytes(self, count: int) -> int:
        return 4 + count

    def _kept(self, count: int) -> int:
        return math.ceil(count * self.share)


class TopK4Bit(TopK):
    """Two codes in a byte, the first one in the low half: 8 for a negative value, plus the magnitude's number."""

    def step(self, kept: Array) -> float:
        magnitude = np.abs(kept)
        return scale_for(largest(magnitude - magnitude.min()), 7) if len(kept) else 0.0

    def packed(self, kept: Array) -> bytes:
        magnitude = np.abs(kept)
        lowest, step = magnitude.min() if len(kept) else 0.0, self.step(kept)
        codes = nearest(magnitude - lowest, step).astype(np.uint8) | (kept < 0).astype(np.uint8) << 3
        return np.asarray([lowest, step], "<f4").tobytes() + nibbles(codes)

    def unpacked(self, body: Reader, count: int) -> Array:
        lowest, step = body.scales(2)
        codes = from_nibbles(body.take("u1", nibble_bytes(count)), count)
        magnitude: Array = (codes & 7).astype(np.float32) * step + lowest
        return np.where(codes & 8, -magnitude, magnitude)

    def packed_bytes(self, count: int) -> int:
        return 8 + nibble_bytes(count)


class TopK10(TopK):
    name = "topk-10"
    about = "the largest 10 % of the values"
    share = 0.1


class TopK1(TopK):
    name = "topk-1"
    about = "the largest 1 % of the values; PFLDyn needs a large penalty"
    share = 0.01
    misses = LARGE_PENALTY


class TopK01(TopK):
    name = "topk-01"
    about = "the largest 0.1 % of the values; slow, and PFLDyn may diverge"
    share = 0.001
    misses = {"up dual": "diverges on quadratics"} | dict.fromkeys(("up control", "down"), SLOW)


class TopK10With4Bits(TopK4Bit):
    name = "topk-10-4bit"
    about = "the largest 10 % of the values, four bits for each"
    share = 0.1


class TopK1With4Bits(TopK4Bit):
    name = "topk-1-4bit"
    about = "the largest 1 % of the values, four bits for each; PFLDyn needs a large penalty"
    share = 0.01
    misses = LARGE_PENALTY


class TopK01With4Bits(TopK4Bit):
    name = "topk-01-4bit"
    about = "the largest 0.1 % of the values, four bits for each; slow, and PFLDyn may diverge"
    share = 0.001
    misses = TopK01.misses


def _largest_places(values: Array, kept: int) -> Array:
    """Places of the ``kept`` largest magnitudes, ascending; of equal ones the first."""
    magnitude = np.abs(values)
    if kept == len(values):
        return np.arange(kept)
    limit = np.partition(magnitude, len(values) - kept)[len(values) - kept]
    places = np.flatnonzero(magnitude >= limit)
    if len(places) == kept:
        return places
    equal = np.flatnonzero(magnitude[places] == limit)
    return np.delete(places, equal[kept - len(places):])


# Rice code: quotients of the gaps in unary (zeros and a one), then remainders of ``_bits`` bits -----------------------


def rice_encode(places: Array, count: int) -> bytes:
    """places: ascending, below ``count``."""
    bits = _bits(len(places), count)
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum((gaps >> bits) + 1)
    unary = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    unary[ends - 1] = 1
    remainders = (gaps[:, None] >> np.arange(bits)) & 1
    return np.packbits(remainders.astype(np.uint8)).tobytes() + np.packbits(unary).tobytes()


def rice_decode(body: Reader, kept: int, count: int) -> Array:
    """The rest of ``body`` as places. Raises CodecError."""
    bits = _bits(kept, count)
    remainders = np.unpackbits(body.take("u1", (kept * bits + 7) // 8))[: kept * bits].reshape(kept, bits)
    ends = np.flatnonzero(np.unpackbits(body.take("u1", body.left)))
    if len(ends) != kept:
        raise CodecError(f"has {len(ends)} places", expected=str(kept))
    quotients = np.diff(ends, prepend=-1) - 1
    gaps = quotients << bits
    for bit in range(bits):
        gaps += remainders[:, bit].astype(np.int64) << bit
    places = np.cumsum(gaps + 1) - 1
    if kept and places[-1] >= count:
        raise CodecError(f"has a value at place {places[-1]} of {count}")
    return places


def rice_max_bytes(kept: int, count: int) -> int:
    """Bytes of the longest code: the quotients add up to at most count / 2^bits."""
    bits = _bits(kept, count)
    return (kept * bits + 7) // 8 + (kept + (count >> bits) + 7) // 8


def _bits(kept: int, count: int) -> int:
    """log2 of the mean gap times ln 2, rounded down."""
    return max(0, math.floor(math.log2(max(1.0, count / kept * math.log(2))))) if kept else 0
