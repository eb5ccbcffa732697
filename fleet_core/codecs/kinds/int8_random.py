"""``int8-random``: one signed byte per value and one float32 scale per array, rounded up or down at random.

Unbiased stochastic rounding: Alistarh et al., "QSGD", NeurIPS 2017, with one scale per array (largest value / 127).
"""

from __future__ import annotations

import math

import numpy as np

from fleet_core.codecs.frame import FramedCodec, Reader
from fleet_core.codecs.interface import Array, Arrays, Seed, Shapes
from fleet_core.codecs.quantize import key, largest, random_words, scale_for, stochastic, uniform
from fleet_core.codecs.vector import divided, shapes_of, size


class Int8Random(FramedCodec):
    name = "int8-random"
    about = "a byte per value, rounded at random; unbiased, nothing is kept for later"
    feedback, feedback_down, unbiased = False, False, True

    def body(self, arrays: Arrays, seed: Seed) -> bytes:
        shapes = shapes_of(arrays)
        random = divided(uniform(random_words(key(seed), size(shapes))), shapes)
        scales = [scale_for(largest(arrays[name]), 127) for name in random]
        codes = [stochastic(arrays[name], s, random[name]).tobytes() for name, s in zip(random, scales, strict=True)]
        return np.asarray(scales, "<f4").tobytes() + b"".join(codes)

    def arrays(self, body: Reader, shapes: Shapes) -> dict[str, Array]:
        scales = dict(zip(sorted(shapes), body.scales(len(shapes)), strict=True))
        codes = divided(body.take("i1", size(shapes)).astype(np.float32), shapes)
        return {name: code * scales[name] for name, code in codes.items()}

    def body_bytes(self, shapes: Shapes) -> int:
        return 4 * len(shapes) + size(shapes)

    def bound(self, arrays: Arrays) -> float:
        return math.sqrt(sum(a.size * scale_for(largest(a), 127) ** 2 for a in arrays.values()))
