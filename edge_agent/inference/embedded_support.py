"""A device's labelled samples as an encoder embeds them, kept so that a sample is embedded once.

Shapes: S samples, D embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Embed = Callable[[Array], Array]

MARK_BYTES = 16
MAX_KEPT = 1 << 22
"""Numbers in the embeddings that are kept on the disk (16 MiB); of more nothing is, and they are made anew."""


@dataclass(frozen=True, eq=False)
class Support:
    """z: float32 [S, D]. y: int64 [S]. marks: uint8 [S, 16], by which a raw sample is known again."""

    z: Array
    y: Array
    marks: Array

    @classmethod
    def of(cls, embed: Embed, x: Array, y: Array, known: Support | None = None) -> Support:
        """Raw samples x [S, *shape] with labels y int64 [S]; only those that ``known`` lacks are embedded."""
        marks = marks_of(x)
        places = {} if known is None else {mark.tobytes(): row for row, mark in enumerate(known.marks)}
        rows = np.array([places.get(mark.tobytes(), -1) for mark in marks], np.int64)
        held = None if known is None else known.z[rows[rows >= 0]]
        new = embed(x[rows < 0]) if held is None or len(held) < len(x) else held[:0]
        z = np.empty((len(x), new.shape[1]), np.float32)
        z[rows < 0] = new
        if held is not None:
            z[rows >= 0] = held
        return cls(z, np.asarray(y, np.int64), marks)

    def more(self, z: Array, x: Array, y: Array) -> Support:
        """These and others that are embedded already."""
        joined = (np.concatenate(pair) for pair in ((self.z, z), (self.y, y), (self.marks, marks_of(x))))
        return Support(*joined)

    def arrays(self) -> dict[str, Array]:
        """As they are kept; empty where they are too many."""
        return {} if self.z.size > MAX_KEPT else {"z": self.z, "y": self.y, "marks": self.marks}

    @classmethod
    def kept(cls, arrays: dict[str, Array]) -> Support | None:
        """What ``arrays`` gave, or None where it is not among them, whole."""
        z, y, marks = (arrays.get(name) for name in ("z", "y", "marks"))
        if z is None or y is None or marks is None:
            return None
        shapes = z.ndim == 2 and y.shape == z.shape[:1] and marks.shape == (len(z), MARK_BYTES)
        dtypes = (z.dtype, y.dtype, marks.dtype) == (np.float32, np.int64, np.uint8)
        return cls(z, y, marks) if shapes and dtypes else None


def marks_of(x: Array) -> Array:
    """uint8 [S, 16]: a hash of each raw sample."""
    import hashlib  # loads OpenSSL: 4 MB that answering does without

    found = b"".join(hashlib.blake2b(row.tobytes(), digest_size=MARK_BYTES).digest() for row in x)
    return np.frombuffer(found, np.uint8).reshape(len(x), MARK_BYTES)
