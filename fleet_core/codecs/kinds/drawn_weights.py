"""``drawn``: first weights as the seed that they were drawn from, 12 bytes per array. Exact.

torch draws the weights of linear, convolution and recurrent layers uniformly from [-limit, limit): each value is the
low 24 bits of one 32-bit word of the Mersenne Twister, which numpy has too. Encoding finds where in the words each
array begins and checks every bit, so other arrays (trained ones, an embedding table) cannot be encoded. Decoding needs
no torch.

``drawn-part`` is the same for a part of a model, before which other arrays were drawn. It has another name because some
agents know ``drawn`` alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

import numpy as np

from fleet_core.base.errors import CodecError
from fleet_core.codecs.frame import FramedCodec, Reader
from fleet_core.codecs.interface import Array, Arrays, Seed, Shapes
from fleet_core.codecs.vector import shapes_of, size

CONSTANT = -1
PLACE = np.dtype([("start", "<i8"), ("value", "<f4")])
"""Where an array's words start, and its limit; or CONSTANT, and the value of all its elements."""
NEIGHBOURS = 4  # float32 numbers on both sides of an estimated limit that are tried
MOST_BEFORE = 1 << 26  # words before a part; all of them take a fraction of a second
BLOCK = 1 << 16


class DrawnWeights(FramedCodec):
    """Not for updates: the first element of ``seed`` must be the seed of the weights. before: most words that come
    before those of the arrays."""

    name = "drawn"
    before = 0
    about = "first weights, as their seed"
    lossless = True
    feedback, feedback_down = False, False

    def body(self, arrays: Arrays, seed: Seed) -> bytes:
        """Raises CodecError for arrays that do not follow from the seed, and for none."""
        if not arrays:
            raise CodecError("no weights")
        before = min(self.before, seed[1]) if len(seed) > 1 else 0
        words = _words(seed[0], 0, before + size(shapes_of(arrays)))
        places = {name: (CONSTANT, value) for name, array in arrays.items() if (value := _constant(array)) is not None}
        single = sum(array.size == 1 for array in arrays.values())  # taken for constants, though they may be drawn
        start = _first([array for name, array in arrays.items() if name not in places], words) if before else 0
        while left := {name: array for name, array in arrays.items() if name not in places}:
            found = next(((name, at, limit) for at in range(start, start + single + 1) for name, array in left.items()
                          if (limit := _limit(array, words[at : at + array.size])) is not None), None)
            if found is None:
                raise CodecError(f"{', '.join(left)}: not drawn from the seed {seed[0]}")
            name, start, limit = found
            places[name] = start, limit
            start += arrays[name].size
        table = np.asarray([places[name] for name in sorted(arrays)], PLACE)
        return np.asarray([seed[0] % 2**32], "<u4").tobytes() + table.tobytes()

    def arrays(self, body: Reader, shapes: Shapes) -> dict[str, Array]:
        (seed,) = body.take("<u4", 1)
        table = np.frombuffer(body.take("u1", PLACE.itemsize * len(shapes)).tobytes(), PLACE)
        places = dict(zip(sorted(shapes), table.tolist(), strict=True))
        drawn = {name: start for name, (start, _) in places.items() if start != CONSTANT}
        first = min(drawn.values(), default=0)
        end = max((start + math.prod(shapes[name]) for name, start in drawn.items()), default=0)
        most = min(first, self.before) + size(shapes)
        if first < 0 or end > most:
            raise CodecError("names words that are not there", expected=f"at most {most}")
        words = _words(int(seed), first, end - first)
        return {
            name: np.full(shape, value, np.float32) if start == CONSTANT
            else _uniform(words[start - first : start - first + math.prod(shape)], value).reshape(shape)
            for name, shape in shapes.items() for start, value in [places[name]]
        }

    def body_bytes(self, shapes: Shapes) -> int:
        return 4 + PLACE.itemsize * len(shapes)

    def bound(self, arrays: Arrays) -> float:
        return 0.0


class DrawnPart(DrawnWeights):
    """The second element of ``seed`` is the number of values that may have been drawn before."""

    name = "drawn-part"
    before = MOST_BEFORE


def _words(seed: int, first: int, count: int) -> Array:
    """uint32 [count], from the word ``first`` on, as torch's generator on the processor draws them."""
    source = np.random.RandomState(seed % 2**32)
    for at in range(0, first, BLOCK):
        source.randint(0, 2**32, min(BLOCK, first - at), np.uint32)
    return source.randint(0, 2**32, count, np.uint32)


def _shares(words: Array) -> Array:
    """The values before they are multiplied by the limit: float64 in [-1, 1)."""
    return (words & np.uint32(0xFFFFFF)) * 2.0**-23 - 1


def _first(arrays: Collection[Array], words: Array) -> int:
    """Where the words of the first array begin; 0 if it is not found. Two successive values have the ratio of their
    shares, except for rounding."""
    shares, found = _shares(words), list[int]()
    for array in arrays:
        one, two = array.reshape(-1)[:2].astype(np.float64)
        near = np.abs(one * shares[1:] - two * shares[:-1]) <= 2.0**-23 * (abs(one) + abs(two))
        starts = (at for at in np.flatnonzero(near).tolist() if _limit(array, words[at : at + array.size]) is not None)
        found += itertools.islice(starts, 1)
    return min(found, default=0)


def _uniform(words: Array, limit: float) -> Array:
    """float32; rounded once, as by a fused multiply-add."""
    return ((words & np.uint32(0xFFFFFF)) * 2.0**-24 * (2 * limit) - limit).astype(np.float32)


def _constant(array: Array) -> float | None:
    """The value of all elements; 0 for an array without any."""
    values = array.reshape(-1)
    first = values[0] if array.size else np.float32(0)
    return float(first) if (values.view(np.uint32) == first.view(np.uint32)).all() else None


def _limit(array: Array, words: Array) -> float | None:
    """The limit with which these words give the array's bits, or None."""
    values = array.reshape(-1)
    if len(words) != len(values):
        return None
    shares = _shares(words)
    widest = int(np.abs(shares).argmax())
    estimate = np.float32(float(values[widest]) / shares[widest]) if shares[widest] else np.float32(0)
    bits = int(estimate.view(np.uint32))
    for step in sorted(range(-NEIGHBOURS, NEIGHBOURS + 1), key=abs):
        limit = float(np.uint32(max(0, bits + step)).view(np.float32)) if estimate > 0 else 0.0
        if limit > 0 and np.array_equal(_uniform(words, limit).view(np.uint32), values.view(np.uint32)):
            return limit
    return None
