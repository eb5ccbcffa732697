"""What a codec is: named float32 arrays to bytes, and back for known shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
"""Arrays by "group/name"."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes by "group/name", from the layout."""
Seed = tuple[int, ...]
"""(seed of the fleet or run, round, crc32 of the device's name, or 0 for a model)."""


LARGE_PENALTY = {
    "up dual": "diverges on quadratics whose largest curvature is 8 with penalty 2; with 16 it reaches their minimiser"
}


class Codec(ABC):
    """One way to encode. All arithmetic of ``decode`` is exact or correctly rounded element by element, so that
    aggregator and devices get the same bits.

    about: one line for users. lossless: decoding gives the same bits. feedback: a device adds what an update lost to
    its next one (error feedback). feedback_down: the aggregator adds what a model lost to the next one; false for a
    codec that leaves out most of a move: devices learn most of it once more, so feedback would add it twice. unbiased:
    the mean of the decoded values over seeds is the encoded value. misses: "up", "up STATE" or "down" -> how methods,
    or those whose devices keep that state, miss the minimiser of quadratics (tests/fleet_core/algorithms/test_lossy.py
    and test_sparse.py).
    """

    name: ClassVar[str]
    about: ClassVar[str]
    lossless: ClassVar[bool] = False
    feedback: ClassVar[bool] = True
    feedback_down: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False
    misses: ClassVar[Mapping[str, str]] = {}

    def remarks(self, way: str, keeps: Collection[str]) -> list[str]:
        """How a method whose devices keep these states misses the minimiser with this codec, up or down."""
        return [text for key, text in self.misses.items() if key in (way, *(f"{way} {state}" for state in keeps))]

    @abstractmethod
    def encode(self, arrays: Arrays, seed: Seed) -> bytes:
        """Finite float32 arrays as bytes; the same for the same arguments, in any order of the arrays."""

    @abstractmethod
    def decode(self, data: bytes, shapes: Shapes) -> dict[str, Array]:
        """Float32 arrays, possibly not finite, of at most ``max_bytes`` bytes. Raises CodecError, or StateError for a
        name without a group."""

    @abstractmethod
    def max_bytes(self, shapes: Shapes) -> int:
        """Bytes of the largest payload of these shapes. A longer one is refused before it is read."""

    @abstractmethod
    def bound(self, arrays: Arrays) -> float:
        """The largest Euclidean norm of what ``encode`` can lose of these arrays, but for float32 rounding."""
