"""``mask``: 5 % of all values, drawn anew in every round, as int8 rounded at random, with one float32 scale.

Konečný et al., "Federated Learning: Strategies for Improving Communication Efficiency", 2016: the mask follows from a
seed in the frame, so that only values travel; they are multiplied by n / kept, so that the mean is exact.
"""

from __future__ import annotations

import math

import numpy as np

from fleet_core.codecs.frame import FramedCodec, Reader
from fleet_core.codecs.interface import Array, Arrays, Seed, Shapes
from fleet_core.codecs.quantize import key, largest, random_words, scale_for, stochastic, uniform
from fleet_core.codecs.vector import divided, joined, length, shapes_of, size

SHARE = 0.05


class Mask(FramedCodec):
    name = "mask"
    about = "5 % of the values, drawn at random; unbiased, but so noisy that methods diverge on quadratics"
    feedback, feedback_down, unbiased = False, False, True
    misses = dict.fromkeys(("up", "down"), "diverges on quadratics: its noise is larger than what is sent")

    def body(self, arrays: Arrays, seed: Seed) -> bytes:
        values = joined(arrays).astype(np.float64)
        kept, drawn = _kept(len(values)), key(seed)
        words = random_words(drawn, len(values) + kept)
        chosen = values[_places(words[: len(values)], kept)] * (len(values) / max(1, kept))
        scale = scale_for(largest(chosen), 127)
        codes = stochastic(chosen, scale, uniform(words[len(values) :]))
        return np.asarray([drawn], "<u8").tobytes() + np.asarray([scale], "<f4").tobytes() + codes.tobytes()

    def arrays(self, body: Reader, shapes: Shapes) -> dict[str, Array]:
        count = size(shapes)
        (drawn,), scale, codes = body.take("<u8", 1), body.scales(1), body.take("i1", _kept(count))
        values = np.zeros(count, np.float32)
        values[_places(random_words(int(drawn), count), len(codes))] = codes.astype(np.float32) * scale
        return divided(values, shapes)

    def body_bytes(self, shapes: Shapes) -> int:
        return 8 + 4 + _kept(size(shapes))

    def bound(self, arrays: Arrays) -> float:
        count = size(shapes_of(arrays))
        factor = count / max(1, _kept(count))
        return factor * (length(arrays) + math.sqrt(_kept(count)) * scale_for(largest(joined(arrays)), 127))


def _kept(count: int) -> int:
    return math.ceil(count * SHARE)


def _places(words: Array, kept: int) -> Array:
    """Places of the ``kept`` smallest words, ascending; of equal ones the first."""
    return np.sort(np.argsort(words, kind="stable")[:kept])
