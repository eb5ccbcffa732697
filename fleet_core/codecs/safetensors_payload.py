"""The wire format of ``fp32`` and ``int8``: safetensors under zstd. Earlier versions read and write it too."""

from __future__ import annotations

from typing import Any

import numpy as np

from fleet_core.base import storage
from fleet_core.base.compression import compress, decompress
from fleet_core.base.errors import CodecError, StateError
from fleet_core.codecs.interface import Array, Arrays, Shapes
from fleet_core.codecs.vector import size

HEADER_BYTES_PER_ARRAY = 512


def pack(arrays: Arrays, *, words: bool = False) -> bytes:
    """words: all first bytes of the 32-bit words come first, then all second bytes, and so on."""
    return payload(storage.pack(arrays), words=words)


def payload(packed: bytes, *, words: bool = False) -> bytes:
    """Compresses safetensors bytes."""
    return compress(_planes(packed) if words else packed)


def unpack(data: bytes, shapes: Shapes, *, words: bool = False) -> dict[str, Array]:
    """The inverse of ``pack``. Raises CodecError."""
    try:
        frame = decompress(data, _limit(shapes))
        arrays, _ = storage.unpack(_words(frame) if words else frame, where="payload")
    except StateError as error:
        raise CodecError(error.what) from error
    return arrays


def max_bytes(shapes: Shapes) -> int:
    """Bytes of the largest payload: zstd adds at most a 256th and a small constant to what it cannot compress."""
    limit = _limit(shapes)
    return limit + (limit >> 8) + 128


def _limit(shapes: Shapes) -> int:
    """Bytes before compression: four per value, and a header with an entry for each array and its scale."""
    return 4 * size(shapes) + HEADER_BYTES_PER_ARRAY * (2 * len(shapes) + 2)


def _planes(words: bytes) -> memoryview:
    array = np.frombuffer(words, dtype="<u4")
    places = np.empty((4, len(array)), dtype=np.uint8)
    for k, plane in enumerate(places):
        np.right_shift(array, np.uint32(8 * k), out=plane, casting="unsafe")
    return places.reshape(-1).data


def _words(planes: bytes) -> bytes:
    """The inverse of ``_planes``."""
    if len(planes) % 4:
        raise CodecError(f"{len(planes)} bytes are not a multiple of 4")
    places = np.frombuffer(planes, dtype=np.uint8).reshape(4, -1)
    words: np.ndarray[Any, Any] = places[3].astype("<u4")
    for plane in places[2::-1]:
        words <<= np.uint32(8)
        words |= plane
    return words.tobytes()
