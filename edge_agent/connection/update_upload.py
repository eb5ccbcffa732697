"""Offers one pending update and sends the chunks that the aggregator grants, until ``done`` or ``reject``.

A small update goes with its first offer, if the aggregator allows that. If the offer is lost, the update is offered
alone and sent in chunks, which the aggregator grants when it can take them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fleet_core.base.backoff import Backoff
from fleet_core.base.errors import LinkError, StateError
from fleet_core.link.interface import Link
from fleet_core.protocol import chunks, messages, topics
from fleet_core.protocol.device_messages import Down
from fleet_core.protocol.round_messages import WHOLE, UploadManifest, with_its_bytes

SILENCE_S, MOST_SILENCE_S = 2.0, 60.0
QUEUED_S = 60.0  # after "not yet", the time in which the aggregator should grant chunks
UNANSWERED = 3  # offers without an answer before ``unanswered`` is called


class Offer(Protocol):
    """An update to offer; ``chunk`` reads its bytes when they are sent."""

    @property
    def round(self) -> int: ...

    @property
    def upload(self) -> UploadManifest: ...

    def chunk(self, k: int) -> bytes: ...


class Uploader:
    """The current upload, if any. The aggregator answers every offer at once; without an answer the offer is repeated
    after 2 s, 4 s, and so on.

    ``book(bytes)`` is called for the bytes sent, ``unanswered(round)`` after three offers without an answer. The
    aggregator grants again what a failing link has lost.
    """

    def __init__(
        self, fleet: str, device: str, link: Link, clock: Callable[[], float], book: Callable[[int], None], *,
        unanswered: Callable[[int], None] = lambda round_number: None,
    ):
        self._fleet, self._device, self._link, self._clock, self._book = fleet, device, link, clock, book
        self._unanswered, self.packed = unanswered, messages.PLAIN
        self._backoff = Backoff(device, clock, SILENCE_S, MOST_SILENCE_S)
        self._pending: Offer | None = None
        self._queued_at: float | None = None
        self._sent_whole = ""  # id of the last update that went with its offer

    @property
    def active(self) -> bool:
        return self._pending is not None

    def offer(self, pending: Offer, whole: int = 0) -> bool:
        """whole: bytes of the largest update that may go with its offer (``UploadRules``). Returns whether it did."""
        self._pending, self._queued_at = pending, None
        self._backoff.reset()
        blob = pending.upload.blob
        if blob.n == 1 and blob.size <= whole and self._sent_whole != blob.id and self._send_whole(pending):
            self._sent_whole = blob.id
            return True
        self._send_offer()
        return False

    def stop(self) -> None:
        self._pending = None

    def on_need(self, down: Down) -> None:
        """Sends the granted chunks. Raises MessageError for chunks that the update does not have, LinkError if the link
        ends meanwhile."""
        pending = self._pending
        if pending is None or (down.r, down.id) != (pending.round, pending.upload.id):
            return
        self._backoff.reset()
        self._queued_at = None if down.miss else self._clock()
        blob, sent_bytes = pending.upload.blob, 0
        try:
            for k in chunks.from_ranges(down.miss, blob.n):
                part = pending.chunk(k)
                self._link.publish(topics.upload(self._fleet, self._device, pending.round, k), part, qos=0)
                sent_bytes += len(part)
        finally:
            if sent_bytes:
                self._book(sent_bytes)

    def tick(self) -> None:
        if self._pending is not None and self._is_offer_due():
            self._backoff.repeat()
            if self._backoff.repeats == UNANSWERED:
                self._unanswered(self._pending.round)
            self._send_offer()

    def _is_offer_due(self) -> bool:
        if self._queued_at is not None and self._clock() - self._queued_at < QUEUED_S:
            return False
        return self._backoff.expired

    def _send_offer(self) -> None:
        if self._pending is not None:
            self._publish(self._pending, "m", messages.encode(self._pending.upload, packed=self.packed))

    def _send_whole(self, pending: Offer) -> bool:
        try:
            data = pending.chunk(0)
        except StateError:
            return False  # read again when it is asked for
        if not self._publish(pending, WHOLE, with_its_bytes(pending.upload, data, packed=self.packed), qos=0):
            return False
        self._book(len(data))
        return True

    def _publish(self, pending: Offer, part: str, message: bytes, *, qos: int = 1) -> bool:
        if not self._link.connected:
            return False
        try:
            self._link.publish(topics.upload(self._fleet, self._device, pending.round, part), message, qos=qos)
        except LinkError:
            return False  # the link is full: offered again later
        return True
