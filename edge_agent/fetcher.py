"""Pulls one content-addressed blob at a time by subscribing to one segment of its retained chunks after the other."""

from __future__ import annotations

from collections.abc import Callable

from fleet_core import topics
from fleet_core.errors import MessageError
from fleet_core.link.base import Link
from fleet_core.messages import Blob
from fleet_core.transfer import Inbox

SILENCE_S = 3.0


class Fetcher:
    """What is being fetched now. Segments are asked for again when nothing arrived for three seconds."""

    def __init__(self, fleet: str, link: Link, clock: Callable[[], float]):
        self._fleet, self._link, self._clock = fleet, link, clock
        self._inbox: Inbox | None = None
        self._segment: int | None = None
        self._heard = 0.0
        self.received_bytes = 0

    @property
    def target(self) -> str | None:
        """Id of the blob being fetched."""
        return None if self._inbox is None else self._inbox.blob.id

    def start(self, blob: Blob, limit: int) -> None:
        """Begins, unless this blob is already under way. Raises MessageError for a blob over ``limit`` bytes."""
        if self.target == blob.id:
            return
        self.cancel()
        self._inbox = Inbox(blob, limit)
        self._ask()

    def cancel(self) -> None:
        if self._inbox is not None and self._segment is not None:
            self._link.unsubscribe(topics.segment(self._fleet, self._inbox.blob.id, self._segment))
        self._inbox, self._segment = None, None

    def put(self, blob_id: str, k: int, data: bytes) -> bytes | None:
        """A chunk that arrived; the whole blob when it was the last one. Chunks of other blobs are ignored."""
        inbox = self._inbox
        if inbox is None or inbox.blob.id != blob_id:
            return None
        self._heard = self._clock()
        if inbox.put(k, data):
            self.received_bytes += len(data)
        if inbox.complete:
            self.cancel()
            return inbox.take()
        if inbox.missing_segment() != self._segment:
            self._ask()
        return None

    def tick(self) -> None:
        """Asks again after silence: a retained chunk is replayed when its filter is subscribed anew."""
        if self._inbox is not None and self._link.connected and self._clock() - self._heard > SILENCE_S:
            self._ask()

    def _ask(self) -> None:
        if self._inbox is None:
            raise MessageError("nothing is being fetched")
        if self._segment is not None:
            self._link.unsubscribe(topics.segment(self._fleet, self._inbox.blob.id, self._segment))
        self._segment = self._inbox.missing_segment()
        self._heard = self._clock()
        if self._segment is not None:
            self._link.subscribe(topics.segment(self._fleet, self._inbox.blob.id, self._segment))
