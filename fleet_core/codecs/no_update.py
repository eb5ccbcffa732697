"""``nothing``: the note of a device that sends no update. Decodes to zeros.

Its bytes identify the update that was not sent, so notes of different trainings have different ids.
"""

from __future__ import annotations

import hashlib

import numpy as np

from fleet_core.base.errors import CodecError
from fleet_core.codecs import vector
from fleet_core.codecs.interface import Array, Arrays, Codec, Seed, Shapes

BYTES = 8


class Nothing(Codec):
    """Not for a user to choose."""

    name = "nothing"
    about = "an update too small to send"

    def encode(self, arrays: Arrays, seed: Seed) -> bytes:
        return hashlib.sha256(vector.joined(arrays).astype("<f4").tobytes()).digest()[:BYTES]

    def decode(self, data: bytes, shapes: Shapes) -> dict[str, Array]:
        if len(data) != BYTES:
            raise CodecError(f"a note of {len(data)} bytes", expected=str(BYTES))
        return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def max_bytes(self, shapes: Shapes) -> int:
        return BYTES

    def bound(self, arrays: Arrays) -> float:
        return vector.length(arrays)
