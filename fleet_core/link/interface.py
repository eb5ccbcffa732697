"""The interface of a link: one object without threads or callbacks; ``poll`` returns all events.

The broker acknowledges a publish, not its reader, and publishes that are unacknowledged when a connection ends are
dropped. The protocol's own end-to-end acknowledgements decide what is sent again. A link renews its subscriptions after
every reconnect, so retained messages arrive again after every ``Connected``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleet_core.base.errors import LinkError
from fleet_core.link.byte_counters import ByteCounters

MAX_TOPIC_BYTES = 65_535


@dataclass(frozen=True)
class Message:
    """A message on a subscription. retain: whether it was stored before the subscription was made; on a subscription
    with ``as_published`` also whether its publisher asked the broker to store it."""

    topic: str
    payload: bytes
    retain: bool


@dataclass(frozen=True)
class Connected:
    """A session began. mqtt_version: 5, or 3 for 3.1.1. The limits are the broker's; None when it named none."""

    mqtt_version: int
    max_packet_bytes: int | None
    receive_max: int | None


@dataclass(frozen=True)
class Disconnected:
    """A session ended, or an attempt to connect failed. The link retries by itself."""

    reason: str


@dataclass(frozen=True)
class Denied:
    """The broker refused a subscription or a publish. MQTT 3.1.1 cannot refuse a publish."""

    topic: str
    reason: str


Event = Message | Connected | Disconnected | Denied


@dataclass(frozen=True)
class Will:
    """The message that the broker publishes, at QoS 1, when this link ends without ``close``."""

    topic: str
    payload: bytes
    retain: bool = True


class Link(Protocol):
    @property
    def counters(self) -> ByteCounters: ...

    @property
    def connected(self) -> bool:
        """Whether ``publish`` is possible now."""

    @property
    def unacknowledged(self) -> int:
        """Number of publishes that the broker has not acknowledged yet."""

    def open(self) -> None:
        """Starts connecting. The outcome and every failed attempt are events."""

    def poll(self, timeout_s: float, also: Sequence[int] = ()) -> list[Event]:
        """Does all work that is due and returns the events, after ``timeout_s`` seconds at the latest.

        Returns early with the first events, or with none when one of the file descriptors ``also`` is readable.
        A connection attempt may take a few seconds longer.
        """

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1) -> None:
        """Sends a message. Raises LinkError when the link is offline or full, or the message is over a limit of the
        broker."""

    def subscribe(self, *filters: str, qos: int = 1, as_published: bool = False) -> None:
        """Subscribes now and after every reconnect, at ``qos`` or less; retained messages arrive (again). as_published:
        messages keep the mark that they are to be retained (MQTT 5.0, section 3.8.3.1; 3.1.1 cannot)."""

    def unsubscribe(self, *filters: str) -> None:
        """Ends subscriptions."""

    def close(self) -> None:
        """Sends what is queued, within a bounded time, and disconnects; the broker does not publish the will."""


def send(
    link: Link, topic: str, payload: bytes, log: Callable[[str], None], *, retain: bool = False, qos: int = 1
) -> None:
    """Publishes a message that the protocol repeats if it is lost: does nothing while offline, and only logs an
    error."""
    if link.connected:
        try:
            link.publish(topic, payload, retain=retain, qos=qos)
        except LinkError as error:
            log(f"not sent: {error}")


def matches(pattern: str, topic: str) -> bool:
    """Whether ``topic`` matches the filter ``pattern`` (MQTT 5.0, section 4.7)."""
    if topic.startswith("$") and pattern[:1] in ("+", "#"):
        return False
    filter_levels, levels = pattern.split("/"), topic.split("/")
    for position, level in enumerate(filter_levels):
        if level == "#":
            return True
        if position >= len(levels) or level not in ("+", levels[position]):
            return False
    return len(filter_levels) == len(levels)


def check_topic(topic: str) -> None:
    """Raises LinkError for an invalid topic."""
    if not _is_name(topic) or "+" in topic or "#" in topic:
        raise LinkError("is not a topic", where=repr(topic[:80]), expected="levels without '+', '#' and NUL")


def check_filter(pattern: str) -> None:
    """Raises LinkError for an invalid topic filter."""
    levels = pattern.split("/")
    wildcards_alone = all(level in ("+", "#") or not ("+" in level or "#" in level) for level in levels)
    if not _is_name(pattern) or not wildcards_alone or "#" in levels[:-1]:
        raise LinkError("is not a topic filter", where=repr(pattern[:80]),
                        expected="'+' as a whole level, or '#' as the last level")


def _is_name(text: str) -> bool:
    return bool(text) and "\0" not in text and len(text.encode("utf-8", "surrogatepass")) <= MAX_TOPIC_BYTES
