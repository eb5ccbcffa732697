"""A cache of embedded support samples, so that each sample is embedded once.

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
MAX_CACHED = 1 << 22
"""Numbers of embeddings that are stored on the disk (16 MiB). Larger supports are not stored but embedded again."""


@dataclass(frozen=True, eq=False)
class Support:
    """z: embeddings float32 [S, D]. y: labels int64 [S], or targets float64 [S, K]. marks: hashes of the raw samples
    uint8 [S, 16]."""

    z: Array
    y: Array
    marks: Array

    @classmethod
    def of(cls, embed: Embed, x: Array, y: Array, cached: Support | None = None) -> Support:
        """The support of raw samples x [S, *shape] with labels y [S] or targets [S, K]. Embeds only samples that are
        not ``cached``."""
        marks = marks_of(x)
        row_of = {} if cached is None else {mark.tobytes(): row for row, mark in enumerate(cached.marks)}
        rows = np.array([row_of.get(mark.tobytes(), -1) for mark in marks], np.int64)
        old = None if cached is None else cached.z[rows[rows >= 0]]
        new = embed(x[rows < 0]) if old is None or len(old) < len(x) else old[:0]
        z = np.empty((len(x), new.shape[1]), np.float32)
        z[rows < 0] = new
        if old is not None:
            z[rows >= 0] = old
        return cls(z, np.asarray(y, np.int64 if y.ndim == 1 else np.float64), marks)

    def extended(self, z: Array, x: Array, y: Array) -> Support:
        """This support with more raw samples x, their embeddings z and labels y."""
        joined = (np.concatenate(pair) for pair in ((self.z, z), (self.y, y), (self.marks, marks_of(x))))
        return Support(*joined)

    def arrays(self) -> dict[str, Array]:
        """The arrays to store; empty if the embeddings exceed ``MAX_CACHED``."""
        return {} if self.z.size > MAX_CACHED else {"z": self.z, "y": self.y, "marks": self.marks}

    @classmethod
    def from_arrays(cls, arrays: dict[str, Array]) -> Support | None:
        """The inverse of ``arrays``; None if an array is missing or of another shape or dtype."""
        z, y, marks = (arrays.get(name) for name in ("z", "y", "marks"))
        if z is None or y is None or marks is None:
            return None
        shapes = z.ndim == 2 and y.ndim in (1, 2) and len(y) == len(z) and marks.shape == (len(z), MARK_BYTES)
        truths = np.int64 if y.ndim == 1 else np.float64
        dtypes = (z.dtype, y.dtype, marks.dtype) == (np.float32, truths, np.uint8)
        return cls(z, y, marks) if shapes and dtypes else None


def marks_of(x: Array) -> Array:
    """uint8 [S, 16]: a hash of each raw sample."""
    import hashlib  # loads OpenSSL: 4 MB that answering does not need

    digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=MARK_BYTES).digest() for row in x)
    return np.frombuffer(digests, np.uint8).reshape(len(x), MARK_BYTES)
