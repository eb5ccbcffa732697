"""A file that arrives in chunks and survives a power cut: hashes show which chunks are there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from fleet_core.base import storage
from fleet_core.base.errors import MessageError, StateError
from fleet_core.protocol.chunks import CHUNK_HASH_DIGITS, Blob
from fleet_core.protocol.topics import SEGMENT


class PartialFile:
    """The chunks of ``blob`` at their places in the file ``path``, which is made if it is missing. Call ``look`` until
    it returns True before anything else. Raises StateError if the file cannot be written."""

    def __init__(self, path: Path, blob: Blob):
        self.blob, self._path = blob, path
        self._digests: list[bytes] = [b""] * blob.n
        self._looked = self._first_missing = 0
        self._left = blob.n
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._file = os.fdopen(handle, "r+b", buffering=0)
            self._file.truncate(blob.size)
        except OSError as error:
            raise self._failed(error) from error

    def look(self, most: int = 64) -> bool:
        """Finds out, for at most ``most`` chunks a call, which ones are there already; True once all are known."""
        try:
            for k in range(self._looked, min(self._looked + most, self.blob.n)):
                self._file.seek(k * self.blob.chunk)
                self._note(k, hashlib.sha256(self._file.read(self.blob.length(k))).digest())
                self._looked = k + 1
        except OSError as error:
            raise self._failed(error) from error
        return self._looked == self.blob.n

    def put(self, k: int, data: bytes) -> bool:
        """Writes chunk ``k``; returns whether it was new. Raises MessageError for bytes that are not the chunk's."""
        if not 0 <= k < self.blob.n or len(data) != self.blob.length(k):
            raise MessageError(f"chunk {k} has {len(data)} bytes", where=f"blob {self.blob.id}")
        if self._digests[k]:
            return False
        digest = hashlib.sha256(data).digest()
        if not self._is_of(k, digest):
            raise MessageError(f"chunk {k} does not match its hash", where=f"blob {self.blob.id}")
        try:
            self._file.seek(k * self.blob.chunk)
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._failed(error) from error
        self._note(k, digest)
        return True

    @property
    def first_missing(self) -> int:
        """The first missing chunk; the number of chunks if none is missing."""
        while self._first_missing < self.blob.n and self._digests[self._first_missing]:
            self._first_missing += 1
        return self._first_missing

    @property
    def complete(self) -> bool:
        return self._left == 0

    def missing_segment(self) -> int | None:
        return None if self.complete else self.first_missing // SEGMENT

    def take(self) -> bytes:
        """Returns nothing: the bytes are in the file. Raises MessageError if the root differs."""
        if hashlib.sha256(b"".join(self._digests)).hexdigest() != self.blob.root:
            raise MessageError("does not match its root", where=f"blob {self.blob.id}")
        return b""

    def finish(self, to: Path) -> None:
        """Puts the file durably under its name ``to``. Raises StateError, and MessageError if the root differs."""
        self.take()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        self.close()
        storage.move(self._path, to)

    def close(self) -> None:
        self._file.close()

    def _is_of(self, k: int, digest: bytes) -> bool:
        return digest.hex()[:CHUNK_HASH_DIGITS] == self.blob.hash(k)

    def _note(self, k: int, digest: bytes) -> None:
        if not self._digests[k] and self._is_of(k, digest):
            self._digests[k] = digest
            self._left -= 1

    def _failed(self, error: OSError) -> StateError:
        return StateError(f"cannot be written: {error.strerror or error}", where=str(self._path),
                          hint="check free space and permissions")
