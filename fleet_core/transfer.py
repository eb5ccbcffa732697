"""Blobs in chunks: what a receiver still needs, and what a sender may send.

Down: chunks are retained and content-addressed; a device pulls them by subscribing to one segment after the other.
Up: the receiver grants credit (``need``), and asks again when the *device* is silent, never because a chunk is old.
A chunk is checked by length and hash before it is kept; the whole is checked by sha256.
"""

from __future__ import annotations

import hashlib

from fleet_core.errors import MessageError
from fleet_core.messages import CHUNK_HASH_DIGITS, Blob
from fleet_core.topics import SEGMENT


class Inbox:
    """Collects the chunks of one blob. Memory: the blob's size, taken only after ``Blob.check``."""

    def __init__(self, blob: Blob, limit: int):
        self.blob = blob.check(limit)
        self._data = bytearray(blob.size)
        self._have = bytearray(blob.n)
        self.missing_count = blob.n

    def put(self, k: int, data: bytes) -> bool:
        """True when the chunk was new. Raises MessageError for a chunk that is not the blob's."""
        if not 0 <= k < self.blob.n or len(data) != self.blob.length(k):
            raise MessageError(f"chunk {k} has {len(data)} bytes", where=f"blob {self.blob.id}")
        if hashlib.sha256(data).hexdigest()[:CHUNK_HASH_DIGITS] != self.blob.hash(k):
            raise MessageError(f"chunk {k} does not match its hash", where=f"blob {self.blob.id}")
        if self._have[k]:
            return False
        start = k * self.blob.chunk
        self._data[start : start + len(data)] = data
        self._have[k] = 1
        self.missing_count -= 1
        return True

    def missing(self, most: int | None = None) -> list[int]:
        """The first ``most`` chunks that are not here yet."""
        found: list[int] = []
        k = self._have.find(0)
        while k >= 0 and (most is None or len(found) < most):
            found.append(k)
            k = self._have.find(0, k + 1)
        return found

    def missing_segment(self) -> int | None:
        """The first segment with a chunk that is not here, or None when all are."""
        k = self._have.find(0)
        return None if k < 0 else k // SEGMENT

    @property
    def complete(self) -> bool:
        return self.missing_count == 0

    def take(self) -> bytes:
        """The blob's bytes. Raises MessageError when the sha256 is another's."""
        data = bytes(self._data)
        if hashlib.sha256(data).hexdigest() != self.blob.sha256:
            raise MessageError("does not match its sha256", where=f"blob {self.blob.id}")
        return data


def chunks(data: bytes, blob: Blob) -> list[bytes]:
    """The blob's chunks in order."""
    return [data[k * blob.chunk : (k + 1) * blob.chunk] for k in range(blob.n)]
