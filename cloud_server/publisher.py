"""Retained chunks and the signed manifest, in order and at the broker's pace.

What must stay at the broker is remembered, and published again when a broker comes back without it. Chunks of blobs
that no manifest names any more are cleared; which ones lie at the broker is on disk, so that a restarted aggregator
clears those of its earlier life too.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

from fleet_core import storage, topics
from fleet_core.errors import StateError
from fleet_core.link.base import Link
from fleet_core.messages import Blob
from fleet_core.transfer import chunks

UNDER_WAY = 100
MAX_SHELF_BYTES = 1 << 20


class Publisher:
    """Call ``tick`` often; it sends while fewer than 100 publishes wait for their acknowledgement.

    shelf: the file that names the blobs (id -> chunks) that may lie at the broker.
    """

    def __init__(self, fleet: str, link: Link, shelf: Path):
        self._fleet, self._link, self._shelf = fleet, link, shelf
        self._blobs: dict[str, tuple[Blob, bytes]] = {}
        self._stale = _read(shelf)
        self._manifest: bytes | None = None
        self._queue: deque[tuple[str, bytes, str]] = deque()  # topic, payload, the blob that is gone with it

    def blob(self, blob: Blob, data: bytes) -> Blob:
        """Publishes a blob unless it is there already."""
        if blob.id not in self._blobs:
            self._blobs[blob.id] = (blob, data)
            self._stale.pop(blob.id, None)
            self._note()
            self._send(blob, data)
        return blob

    def manifest(self, signed: bytes, keep: set[str]) -> None:
        """Publishes the round after its blobs, then clears every blob that ``keep`` does not name."""
        self._manifest = signed
        self._queue.append((topics.current(self._fleet), signed, ""))
        for blob_id in [name for name in self._blobs if name not in keep]:
            self._stale[blob_id] = self._blobs.pop(blob_id)[0].n
        self._clear_stale()
        self._note()

    def reconnected(self) -> None:
        """The broker may have lost what it retained: everything again, the manifest last."""
        self._queue.clear()
        for blob, data in self._blobs.values():
            self._send(blob, data)
        if self._manifest is not None:
            self._queue.append((topics.current(self._fleet), self._manifest, ""))
            self._clear_stale()

    def tick(self) -> None:
        while self._queue and self._link.connected and self._link.unacknowledged < UNDER_WAY:
            topic, payload, gone = self._queue[0]
            self._link.publish(topic, payload, retain=True)
            self._queue.popleft()
            self._stale.pop(gone, None)

    @property
    def idle(self) -> bool:
        return not self._queue

    def _send(self, blob: Blob, data: bytes) -> None:
        parts = chunks(data, blob)
        self._queue.extend((topics.chunk(self._fleet, blob.id, k), part, "") for k, part in enumerate(parts))

    def _clear_stale(self) -> None:
        for blob_id, n in self._stale.items():
            last = n - 1
            self._queue.extend(
                (topics.chunk(self._fleet, blob_id, k), b"", blob_id if k == last else "") for k in range(n)
            )

    def _note(self) -> None:
        lying = {blob_id: blob.n for blob_id, (blob, _) in self._blobs.items()}
        storage.write_atomic(self._shelf, json.dumps({**self._stale, **lying}).encode())


def _read(shelf: Path) -> dict[str, int]:
    """What the shelf names; nothing when it is absent or damaged: it only saves the broker's memory."""
    if not shelf.exists():
        return {}
    try:
        found = json.loads(storage.read_bytes(shelf, limit=MAX_SHELF_BYTES))
        return {str(name): min(int(n), 1_000_000) for name, n in found.items() if len(str(name)) == 32}
    except (StateError, ValueError, AttributeError, TypeError):
        return {}
