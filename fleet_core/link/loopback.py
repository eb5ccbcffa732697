"""A broker inside the process, so that a test can run a whole fleet, with failures, in one thread.

Like real brokers it drops acknowledged messages when a reader's queue is full, publishes wills when a client dies but
not when it closes, and sends retained messages on subscription.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from fleet_core.base.errors import LinkError
from fleet_core.link.byte_counters import ByteCounters
from fleet_core.link.interface import (
    Connected,
    Disconnected,
    Event,
    Message,
    Will,
    check_filter,
    check_topic,
    matches,
)

Faults = Callable[[str, Message], list[Message]]


class LoopbackBroker:
    """Routes messages between the links of one process.

    Args:
        faults: (receiving client id, message) → messages to deliver instead; called for every delivery. It can drop,
            duplicate, delay or reorder messages.
        max_queued_messages: per client; further messages are dropped.

    retained: topic → payload. dropped: number of messages dropped because of a full queue.
    """

    def __init__(self, *, faults: Faults | None = None, max_queued_messages: int = 1000):
        self.faults = faults
        self.retained: dict[str, bytes] = {}
        self.dropped = 0
        self.running = True
        self._max_queued = max_queued_messages
        self._links: dict[str, LoopbackLink] = {}

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Routes a message, as if a client had sent it."""
        if retain and payload:
            self.retained[topic] = payload
        elif retain:
            self.retained.pop(topic, None)
        for link in list(self._links.values()):
            if any(matches(pattern, topic) for pattern in link.filters):
                marked = retain and any(link.filters[p] for p in link.filters if matches(p, topic))
                self._deliver(link, Message(topic, payload, retain=marked))

    def kill(self, client_id: str) -> None:
        """Simulates the death of the client's process: its will is published; it reconnects only after ``open``."""
        self._links[client_id].opened = False
        self.drop(client_id)

    def drop(self, client_id: str, reason: str = "the connection was lost") -> None:
        """Simulates a lost connection: the client's will is published; its second poll reconnects."""
        link = self._links.pop(client_id)
        link.lost(reason)
        if link.will is not None:
            self.publish(link.will.topic, link.will.payload, retain=link.will.retain)

    def stop(self, *, forget_retained: bool = False) -> None:
        """Simulates the death of the broker: every link is disconnected, and no will is published."""
        self.running = False
        for link in self._links.values():
            link.lost("the broker closed the connection")
        self._links.clear()
        if forget_retained:
            self.retained.clear()

    def start(self) -> None:
        """Restarts the broker; links connect with their next poll."""
        self.running = True

    def join(self, link: LoopbackLink) -> None:
        """Connects a link. A session of the same client id is taken over, as MQTT requires."""
        if link.client_id in self._links:
            self.drop(link.client_id, "Session taken over")
        self._links[link.client_id] = link

    def leave(self, link: LoopbackLink) -> None:
        """Disconnects a link without publishing its will."""
        if self._links.get(link.client_id) is link:
            del self._links[link.client_id]

    def replay(self, link: LoopbackLink, filters: Sequence[str]) -> None:
        """Sends the retained messages that match ``filters``."""
        for topic, payload in list(self.retained.items()):
            if any(matches(pattern, topic) for pattern in filters):
                self._deliver(link, Message(topic, payload, retain=True))

    def _deliver(self, link: LoopbackLink, message: Message) -> None:
        for delivered in self.faults(link.client_id, message) if self.faults else [message]:
            if len(link.inbox) >= self._max_queued:
                self.dropped += 1
            else:
                link.inbox.append(delivered)
                link.counters.mqtt_received += len(delivered.topic.encode()) + len(delivered.payload)


class LoopbackLink:
    """A Link to a LoopbackBroker. ``poll`` never waits; MQTT bytes are topic plus payload; there are no wire bytes."""

    def __init__(self, broker: LoopbackBroker, client_id: str, will: Will | None = None, *, max_queued: int = 2000):
        self.client_id = client_id
        self.will = will
        self.counters = ByteCounters(wire=False)
        self.filters: dict[str, bool] = {}  # filter -> as_published
        self.inbox: deque[Event] = deque()
        self.opened = False
        self.connected = False
        self.unacknowledged = 0
        self._broker = broker
        self._max_queued = max_queued

    def open(self) -> None:
        self.opened = True
        if not self._broker.running:
            self.inbox.append(Disconnected("the broker does not answer"))

    def poll(self, timeout_s: float, also: Sequence[int] = ()) -> list[Event]:
        self.unacknowledged = 0
        if self.opened and not self.connected and not self.inbox and self._broker.running:
            self._connect()
        events = list(self.inbox)
        self.inbox.clear()
        return events

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1) -> None:
        check_topic(topic)
        if not self.connected:
            raise LinkError("is not connected", where=self.client_id, hint="wait for Connected")
        if self.unacknowledged >= self._max_queued:
            raise LinkError(f"{self._max_queued} publishes are unacknowledged", where=self.client_id, hint="poll first")
        self.unacknowledged += 1 if qos else 0
        self.counters.mqtt_sent += len(topic.encode()) + len(payload)
        self._broker.publish(topic, payload, retain=retain)

    def subscribe(self, *filters: str, qos: int = 1, as_published: bool = False) -> None:
        for pattern in filters:
            check_filter(pattern)
        self.filters.update(dict.fromkeys(filters, as_published))
        if self.connected:
            self._broker.replay(self, filters)

    def unsubscribe(self, *filters: str) -> None:
        for pattern in filters:
            self.filters.pop(pattern, None)

    def close(self) -> None:
        self._broker.leave(self)
        self.opened = self.connected = False
        self.inbox.clear()

    def lost(self, reason: str) -> None:
        """Called by the broker when it ends the session."""
        self.connected = False
        self.inbox.append(Disconnected(reason))

    def _connect(self) -> None:
        self._broker.join(self)
        self.connected = True
        self.inbox.append(Connected(mqtt_version=5, max_packet_bytes=None, receive_max=None))
        self._broker.replay(self, list(self.filters))
