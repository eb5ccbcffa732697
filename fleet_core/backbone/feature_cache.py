"""Features on the disk, by the hash of their raw sample: a file of records that is only appended to.

A record is the sample's key (16 bytes), the crc32 of what follows and of the key, and D float32 values. A record that a
power cut has torn fails its crc32 and is computed again. Several processes may append.

Shapes: n samples, D features.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fleet_core.base import storage
from fleet_core.base.errors import StateError

Array = np.ndarray[Any, Any]

KEY_BYTES = 16


def keys_of(x: Array) -> list[bytes]:
    """The keys of raw samples [n, *shape]."""
    rows = np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8)
    return [hashlib.blake2b(row.data, digest_size=KEY_BYTES).digest() for row in rows]


class FeatureCache:
    """The features of one backbone in the file ``path``, which has at most ``quota`` bytes. width: D."""

    def __init__(self, path: Path, width: int, quota: int):
        self._path, self._quota = path, quota
        self._record = np.dtype([("key", f"V{KEY_BYTES}"), ("crc", "<u4"), ("z", "<f4", (width,))])

    def get(self, keys: Collection[bytes]) -> dict[bytes, Array]:
        """float32 [D] of those keys that are there."""
        records, wanted, found = self._records(), set(keys), dict[bytes, Array]()
        for row, key in enumerate(records["key"].tolist()):
            if key in wanted and records["crc"][row] == _crc(key, records["z"][row]):
                found[key] = np.array(records["z"][row])
        return found

    def put(self, new: Mapping[bytes, Array], asked: Collection[bytes]) -> None:
        """Stores features. asked: the keys that are in use; when the file is full, others are dropped, and features
        that still do not fit are not stored. Raises StateError."""
        made = np.zeros(len(new), self._record)
        for row, (key, z) in enumerate(new.items()):
            made[row] = (key, _crc(key, z), z)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                whole = os.fstat(descriptor).st_size // self._record.itemsize * self._record.itemsize
                file.truncate(whole)  # the rest is of a write that was cut off
                if whole + made.nbytes > self._quota:
                    return self._rewrite(made, set(asked))
                rest = memoryview(made.tobytes())
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError as error:
            raise StateError(f"cannot be written: {error.strerror or error}", where=str(self._path)) from error

    def _rewrite(self, new: Array, asked: Collection[bytes]) -> None:
        """Replaces the file by the records that are in use, then the new ones, as many as fit."""
        old = self._records()
        kept = old[[key in asked for key in old["key"].tolist()]] if len(old) else old
        room = self._quota // self._record.itemsize
        parts = (kept[:room].tobytes(), new[: max(0, room - len(kept))].tobytes())
        storage.write_parts(self._path, parts, mode=0o600, durable=False)

    def _records(self) -> Array:
        """All records, mapped; none if the file cannot be read."""
        try:
            number = self._path.stat().st_size // self._record.itemsize
            if number:
                return np.memmap(self._path, self._record, "r", shape=(number,))
        except (OSError, ValueError):
            pass
        return np.zeros(0, self._record)


def _crc(key: bytes, z: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(z, "<f4").tobytes(), zlib.crc32(key))
