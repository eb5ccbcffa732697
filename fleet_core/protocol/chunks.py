"""Blobs in chunks: what a receiver still needs, and what a sender may send.

Down: chunks are retained and content-addressed; a device pulls them by subscribing to one segment after the other.
Up: the receiver grants credit (``need``), and asks again when the *device* is silent, never because a chunk is old.
A chunk is checked by length and hash before it is kept; the whole by the root over its chunks' hashes, so that every
byte is hashed once.
"""

from __future__ import annotations

import hashlib
import itertools

from fleet_core.base.errors import MessageError
from fleet_core.protocol.messages import CHUNK_HASH_DIGITS, Blob
from fleet_core.protocol.topics import SEGMENT


class Inbox:
    """Collects the chunks of one blob. Memory: the blob's size, taken as chunks come, only after ``Blob.check``."""

    def __init__(self, blob: Blob, limit: int):
        self.blob = blob.check(limit)
        self._parts: list[bytes | None] = [None] * blob.n
        self._digests = [b""] * blob.n
        self._gap = 0  # every chunk before it is here
        self.missing_count = blob.n

    def put(self, k: int, data: bytes) -> bool:
        """True when the chunk was new. Raises MessageError for a chunk that is not the blob's."""
        if not 0 <= k < self.blob.n or len(data) != self.blob.length(k):
            raise MessageError(f"chunk {k} has {len(data)} bytes", where=f"blob {self.blob.id}")
        digest = hashlib.sha256(data).digest()
        if digest.hex()[:CHUNK_HASH_DIGITS] != self.blob.hash(k):
            raise MessageError(f"chunk {k} does not match its hash", where=f"blob {self.blob.id}")
        if self._parts[k] is not None:
            return False
        self._parts[k], self._digests[k] = data, digest
        self.missing_count -= 1
        while self._gap < self.blob.n and self._parts[self._gap] is not None:
            self._gap += 1
        return True

    def missing(self, most: int | None = None) -> list[int]:
        """The first ``most`` chunks that are not here yet."""
        gaps = (k for k in range(self._gap, self.blob.n) if self._parts[k] is None)
        return list(itertools.islice(gaps, most))

    def missing_segment(self) -> int | None:
        """The first segment with a chunk that is not here, or None when all are."""
        return None if self.complete else self._gap // SEGMENT

    @property
    def complete(self) -> bool:
        return self.missing_count == 0

    def take(self) -> bytes:
        """The whole blob, once: its chunks are let go of. Raises MessageError when the root is another's."""
        if hashlib.sha256(b"".join(self._digests)).hexdigest() != self.blob.root:
            raise MessageError("does not match its root", where=f"blob {self.blob.id}")
        parts = [part for part in self._parts if part is not None]
        self._parts.clear()
        return b"".join(parts)


def chunks(data: bytes, blob: Blob) -> list[bytes]:
    """The blob's chunks in order."""
    return [data[k * blob.chunk : (k + 1) * blob.chunk] for k in range(blob.n)]
