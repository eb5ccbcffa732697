"""Blobs and their chunks: describing, cutting, checking and reassembling content-addressed bytes.

Downloads: chunks are retained messages; a device pulls them by subscribing to one segment after another.
Uploads: the receiver grants chunks (``need``). It asks again when the *device* is silent, not when a chunk is late.
Each chunk is checked by length and hash before it is kept, and the whole by the root over the chunk hashes, so every
byte is hashed once.
"""

from __future__ import annotations

import itertools
import mmap
import re
from dataclasses import dataclass, field

from fleet_core.base.errors import MessageError
from fleet_core.protocol.messages import ID, whole
from fleet_core.protocol.topics import SEGMENT

MAX_BLOB_BYTES = 1 << 32
CHUNK_HASH_DIGITS = 16


@dataclass(frozen=True)
class Blob:
    """Describes bytes that are cut into chunks.

    root: sha256 in hex over the sha256 digests of the chunks in order. id: its first 32 digits. size, chunk: bytes.
    n: number of chunks. hashes: the first 16 hex digits of each chunk's sha256, concatenated.
    """

    id: str = field(metadata={"pattern": ID})
    root: str = field(metadata={"pattern": r"[0-9a-f]{64}"})
    size: int = field(metadata=whole(MAX_BLOB_BYTES, 1))
    chunk: int = field(metadata=whole(1 << 24, 1024))
    n: int = field(metadata=whole(1_000_000, 1))
    hashes: str = field(metadata={"max_length": 16_000_000})

    @staticmethod
    def of(data: bytes | mmap.mmap, chunk: int) -> Blob:
        """Describes ``data`` cut into chunks of ``chunk`` bytes."""
        view = memoryview(data)
        digests = [_sha256(view[k : k + chunk]) for k in range(0, max(1, len(data)), chunk)]
        root = _sha256(b"".join(digests)).hex()
        hashes = "".join(digest.hex()[:CHUNK_HASH_DIGITS] for digest in digests)
        return Blob(root[:32], root, len(data), chunk, len(digests), hashes)

    def check(self, limit: int) -> Blob:
        """Returns itself. Raises MessageError when it is inconsistent or larger than ``limit`` bytes."""
        if self.size > limit:
            raise MessageError(f"a blob of {self.size} bytes", expected=f"at most {limit}")
        if self.n != -(-self.size // self.chunk) or len(self.hashes) != self.n * CHUNK_HASH_DIGITS:
            raise MessageError(f"{self.n} chunks of {self.chunk} bytes do not make {self.size} bytes")
        if not self.root.startswith(self.id):
            raise MessageError("a blob's id is not the start of its root")
        return self

    def length(self, k: int) -> int:
        """Bytes of chunk ``k``."""
        return min(self.chunk, self.size - k * self.chunk)

    def hash(self, k: int) -> str:
        return self.hashes[k * CHUNK_HASH_DIGITS : (k + 1) * CHUNK_HASH_DIGITS]


class Inbox:
    """Collects the chunks of one blob. Memory grows with the chunks received, up to the blob's size.

    Raises MessageError for a blob that is inconsistent or larger than ``limit`` bytes.
    """

    def __init__(self, blob: Blob, limit: int):
        self.blob = blob.check(limit)
        self._parts: list[bytes | None] = [None] * blob.n
        self._digests = [b""] * blob.n
        self._first_missing = 0
        self.missing_count = blob.n

    def put(self, k: int, data: bytes) -> bool:
        """Stores chunk ``k``; returns whether it was new. Raises MessageError when its length or hash is wrong."""
        if not 0 <= k < self.blob.n or len(data) != self.blob.length(k):
            raise MessageError(f"chunk {k} has {len(data)} bytes", where=f"blob {self.blob.id}")
        digest = _sha256(data)
        if digest.hex()[:CHUNK_HASH_DIGITS] != self.blob.hash(k):
            raise MessageError(f"chunk {k} does not match its hash", where=f"blob {self.blob.id}")
        if self._parts[k] is not None:
            return False
        self._parts[k], self._digests[k] = data, digest
        self.missing_count -= 1
        while self._first_missing < self.blob.n and self._parts[self._first_missing] is not None:
            self._first_missing += 1
        return True

    def missing(self, most: int | None = None) -> list[int]:
        """The first ``most`` missing chunks; None: all of them."""
        gaps = (k for k in range(self._first_missing, self.blob.n) if self._parts[k] is None)
        return list(itertools.islice(gaps, most))

    def missing_segment(self) -> int | None:
        """The first segment with a missing chunk, or None when the blob is complete."""
        return None if self.complete else self._first_missing // SEGMENT

    @property
    def complete(self) -> bool:
        return self.missing_count == 0

    def take(self) -> bytes:
        """Returns the whole blob and frees its chunks; call it once. Raises MessageError when the root differs."""
        if _sha256(b"".join(self._digests)).hex() != self.blob.root:
            raise MessageError("does not match its root", where=f"blob {self.blob.id}")
        parts = [part for part in self._parts if part is not None]
        self._parts.clear()
        return b"".join(parts)


def cut(data: bytes, blob: Blob) -> list[bytes]:
    """The blob's chunks in order."""
    return [data[k * blob.chunk : (k + 1) * blob.chunk] for k in range(blob.n)]


def as_ranges(numbers: list[int]) -> str:
    """Ascending numbers as text, for example ``0-7,12``."""
    parts: list[str] = []
    start = previous = -2
    for n in [*numbers, -2]:
        if n != previous + 1:
            if start >= 0:
                parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = n
        previous = n
    return ",".join(parts)


def from_ranges(text: str, limit: int) -> list[int]:
    """The inverse of ``as_ranges``. Raises MessageError unless all numbers ascend and are below ``limit``."""
    found: list[int] = []
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < limit or (found and first <= found[-1]):
            raise MessageError(f"'{text[:80]}' is not a list of numbers", expected=f"ascending ranges below {limit}")
        found.extend(range(first, last + 1))
    return found


def _sha256(data: bytes | memoryview) -> bytes:
    import hashlib  # loads OpenSSL, 4 MB that a process which only answers does not need

    return hashlib.sha256(data).digest()
