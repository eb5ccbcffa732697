"""Offers one pending update and sends the chunks that the aggregator grants, until it says done or reject."""

from __future__ import annotations

from collections.abc import Callable

from edge_agent.home import Pending
from fleet_core import messages, topics
from fleet_core.errors import LinkError
from fleet_core.link.base import Link
from fleet_core.messages import Down

SILENCE_S = 5.0


class Uploader:
    """The upload under way, if any. The offer is repeated when the aggregator was silent for five seconds.

    ``book(bytes)`` is told of every chunk that was sent. What a link that fails does not take is granted again.
    """

    def __init__(
        self, fleet: str, device: str, link: Link, clock: Callable[[], float], book: Callable[[int], None]
    ):
        self._fleet, self._device, self._link, self._clock, self._book = fleet, device, link, clock, book
        self._pending: Pending | None = None
        self._heard = 0.0

    @property
    def active(self) -> bool:
        return self._pending is not None

    def offer(self, pending: Pending) -> None:
        self._pending = pending
        self._announce()

    def stop(self) -> None:
        self._pending = None

    def on_need(self, down: Down) -> None:
        """Sends the chunks that were granted. Raises MessageError for chunks that the update does not have, LinkError
        when the link ends meanwhile."""
        pending = self._pending
        if pending is None or (down.r, down.id) != (pending.round, pending.upload.id):
            return
        self._heard = self._clock()
        blob, sent_bytes = pending.upload.blob, 0
        try:
            for k in messages.numbers(down.miss, blob.n):
                part = pending.data[k * blob.chunk : (k + 1) * blob.chunk]
                self._link.publish(topics.upload(self._fleet, self._device, pending.round, k), part)
                sent_bytes += len(part)
        finally:
            if sent_bytes:
                self._book(sent_bytes)

    def tick(self) -> None:
        if self._pending is not None and self._clock() - self._heard > SILENCE_S:
            self._announce()

    def _announce(self) -> None:
        if self._pending is None or not self._link.connected:
            return
        self._heard = self._clock()
        topic = topics.upload(self._fleet, self._device, self._pending.round, "m")
        try:
            self._link.publish(topic, messages.encode(self._pending.upload))
        except LinkError:
            return  # full: offered again after the silence
