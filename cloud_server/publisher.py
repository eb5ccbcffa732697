"""Retained chunks and the signed manifest, in order and at the broker's pace.

What must stay at the broker is remembered, and published again when a broker comes back without it. Chunks of blobs
that no manifest names any more are cleared.
"""

from __future__ import annotations

from collections import deque

from fleet_core import topics
from fleet_core.link.base import Link
from fleet_core.messages import Blob
from fleet_core.transfer import chunks

UNDER_WAY = 100


class Publisher:
    """Call ``tick`` often; it sends while fewer than 100 publishes wait for their acknowledgement."""

    def __init__(self, fleet: str, link: Link):
        self._fleet, self._link = fleet, link
        self._blobs: dict[str, tuple[Blob, bytes]] = {}
        self._manifest: bytes | None = None
        self._queue: deque[tuple[str, bytes]] = deque()

    def blob(self, blob: Blob, data: bytes) -> Blob:
        """Publishes a blob unless it is there already."""
        if blob.id not in self._blobs:
            self._blobs[blob.id] = (blob, data)
            self._send(blob, data)
        return blob

    def manifest(self, signed: bytes, keep: set[str]) -> None:
        """Publishes the round after its blobs, then clears every blob that ``keep`` does not name."""
        self._manifest = signed
        self._queue.append((topics.current(self._fleet), signed))
        for blob_id in [name for name in self._blobs if name not in keep]:
            blob, _ = self._blobs.pop(blob_id)
            self._queue.extend((topics.chunk(self._fleet, blob_id, k), b"") for k in range(blob.n))

    def reconnected(self) -> None:
        """The broker may have lost what it retained: everything again, the manifest last."""
        self._queue.clear()
        for blob, data in self._blobs.values():
            self._send(blob, data)
        if self._manifest is not None:
            self._queue.append((topics.current(self._fleet), self._manifest))

    def tick(self) -> None:
        while self._queue and self._link.connected and self._link.unacknowledged < UNDER_WAY:
            topic, payload = self._queue.popleft()
            self._link.publish(topic, payload, retain=True)

    @property
    def idle(self) -> bool:
        return not self._queue

    def _send(self, blob: Blob, data: bytes) -> None:
        parts = chunks(data, blob)
        self._queue.extend((topics.chunk(self._fleet, blob.id, k), part) for k, part in enumerate(parts))
