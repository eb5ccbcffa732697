"""Downloads one content-addressed blob at a time: subscribes to one segment of its retained chunks after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from fleet_core.base.backoff import Backoff
from fleet_core.base.errors import MessageError
from fleet_core.link.interface import Link
from fleet_core.protocol import topics
from fleet_core.protocol.chunks import Blob, Inbox

SILENCE_S, MOST_SILENCE_S = 3.0, 60.0
MISSING = 2  # silences in a row before ``missing`` is called


class Receiver(Protocol):
    """Takes the chunks of a blob, as ``chunks.Inbox`` does."""

    @property
    def blob(self) -> Blob: ...

    @property
    def complete(self) -> bool: ...

    def put(self, k: int, data: bytes) -> bool: ...

    def missing_segment(self) -> int | None: ...

    def take(self) -> bytes: ...


class Fetcher:
    """The current download, if any.

    A segment is requested again after 3 s of silence, then 6 s, and so on: on a slow link the first answer may still be
    on its way. ``book(kind, bytes)`` is called with the bytes received when a download ends, complete or not;
    ``missing(kind, times)`` from the second silence in a row on.
    """

    def __init__(
        self, fleet: str, link: Link, clock: Callable[[], float], book: Callable[[str, int], None], *,
        device: str = "", missing: Callable[[str, int], None] = lambda kind, times: None,
    ):
        self._fleet, self._link, self._book, self._missing = fleet, link, book, missing
        self._backoff = Backoff(device, clock, SILENCE_S, MOST_SILENCE_S)
        self._inbox: Receiver | None = None
        self._kind = ""
        self._received_bytes = 0
        self._segment: int | None = None

    @property
    def target(self) -> str | None:
        """Id of the blob being fetched."""
        return None if self._inbox is None else self._inbox.blob.id

    def start(self, blob: Blob, limit: int, kind: str) -> None:
        """Begins, unless this blob is already being fetched. Raises MessageError for a blob over ``limit`` bytes."""
        if self.target != blob.id:
            self.into(Inbox(blob, limit), kind)

    def into(self, inbox: Receiver, kind: str) -> None:
        """Fetches the chunks that ``inbox`` lacks."""
        self.cancel()
        self._inbox, self._kind = inbox, kind
        self._backoff.reset()
        self._request_segment()

    def keep(self, published: Collection[str]) -> None:
        """Cancels a download that is not among the ``published`` ids: the broker no longer has its chunks."""
        if self.target is not None and self.target not in published:
            self.cancel()

    def cancel(self) -> None:
        if self._inbox is not None and self._segment is not None:
            self._link.unsubscribe(topics.segment(self._fleet, self._inbox.blob.id, self._segment))
        if self._received_bytes:
            self._book(self._kind, self._received_bytes)
        self._inbox, self._segment, self._received_bytes = None, None, 0

    def put(self, blob_id: str, k: int, data: bytes) -> bytes | None:
        """Takes a chunk; returns the whole blob after the last one. Ignores chunks of other blobs and empty ones, which
        were cleared. Raises MessageError for bytes that are not the blob's."""
        inbox = self._inbox
        if inbox is None or inbox.blob.id != blob_id or not data:
            return None
        self._received_bytes += len(data)
        if inbox.put(k, data):
            self._backoff.reset()
        if inbox.complete:
            self.cancel()
            return inbox.take()
        if inbox.missing_segment() != self._segment:
            self._request_segment()
        return None

    def tick(self) -> None:
        """Requests the segment again after silence: the broker replays retained chunks to a new subscription."""
        if self._inbox is not None and self._link.connected and self._backoff.expired:
            self._backoff.repeat()
            if self._backoff.repeats >= MISSING:
                self._missing(self._kind, self._backoff.repeats)
            self._request_segment()

    def _request_segment(self) -> None:
        if self._inbox is None:
            raise MessageError("nothing is being fetched")
        if self._segment is not None:
            self._link.unsubscribe(topics.segment(self._fleet, self._inbox.blob.id, self._segment))
        self._segment = self._inbox.missing_segment()
        if self._segment is not None:
            self._link.subscribe(topics.segment(self._fleet, self._inbox.blob.id, self._segment), qos=0)
