"""Pulls one content-addressed blob at a time by subscribing to one segment of its retained chunks after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection

from fleet_core.base.backoff import Backoff
from fleet_core.base.errors import MessageError
from fleet_core.link.interface import Link
from fleet_core.protocol import topics
from fleet_core.protocol.chunks import Blob, Inbox

SILENCE_S, MOST_SILENCE_S = 3.0, 60.0
MISSING = 2  # silences in a row after which it is said


class Fetcher:
    """What is being fetched now.

    A segment is asked for again when nothing arrived for three seconds, then six, and so on: on a slow link the first
    answer may still be under way. ``book(kind, bytes)`` is told what came when a fetch ends, whole or not;
    ``missing(kind, times)`` that nothing came, the second time in a row and at every time after.
    """

    def __init__(
        self, fleet: str, link: Link, clock: Callable[[], float], book: Callable[[str, int], None], *,
        device: str = "", missing: Callable[[str, int], None] = lambda kind, times: None,
    ):
        self._fleet, self._link, self._book, self._missing = fleet, link, book, missing
        self._backoff = Backoff(device, clock, SILENCE_S, MOST_SILENCE_S)
        self._inbox: Inbox | None = None
        self._kind = ""
        self._came_bytes = 0
        self._segment: int | None = None

    @property
    def target(self) -> str | None:
        """Id of the blob being fetched."""
        return None if self._inbox is None else self._inbox.blob.id

    def start(self, blob: Blob, limit: int, kind: str) -> None:
        """Begins, unless this blob is already under way. Raises MessageError for a blob over ``limit`` bytes."""
        if self.target == blob.id:
            return
        self.cancel()
        self._inbox, self._kind = Inbox(blob, limit), kind
        self._backoff.reset()
        self._ask()

    def keep(self, named: Collection[str]) -> None:
        """Lets go of a blob that is not among the ``named`` ones: its chunks are no longer at the broker."""
        if self.target is not None and self.target not in named:
            self.cancel()

    def cancel(self) -> None:
        if self._inbox is not None and self._segment is not None:
            self._link.unsubscribe(topics.segment(self._fleet, self._inbox.blob.id, self._segment))
        if self._came_bytes:
            self._book(self._kind, self._came_bytes)
        self._inbox, self._segment, self._came_bytes = None, None, 0

    def put(self, blob_id: str, k: int, data: bytes) -> bytes | None:
        """A chunk that arrived; the whole blob when it was the last one. Chunks of other blobs, and chunks that were
        cleared, are ignored. Raises MessageError for bytes that are not the blob's."""
        inbox = self._inbox
        if inbox is None or inbox.blob.id != blob_id or not data:
            return None
        self._came_bytes += len(data)
        if inbox.put(k, data):
            self._backoff.reset()
        if inbox.complete:
            self.cancel()
            return inbox.take()
        if inbox.missing_segment() != self._segment:
            self._ask()
        return None

    def tick(self) -> None:
        """Asks again after silence: a retained chunk is replayed when its filter is subscribed anew."""
        if self._inbox is not None and self._link.connected and self._backoff.expired:
            self._backoff.repeat()
            if self._backoff.repeats >= MISSING:
                self._missing(self._kind, self._backoff.repeats)
            self._ask()

    def _ask(self) -> None:
        if self._inbox is None:
            raise MessageError("nothing is being fetched")
        if self._segment is not None:
            self._link.unsubscribe(topics.segment(self._fleet, self._inbox.blob.id, self._segment))
        self._segment = self._inbox.missing_segment()
        if self._segment is not None:
            self._link.subscribe(topics.segment(self._fleet, self._inbox.blob.id, self._segment), qos=0)
