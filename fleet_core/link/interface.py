"""The link as its users see it: one object, no threads, no callbacks; everything that happened comes out of ``poll``.

A link promises less than MQTT seems to. A publish is acknowledged by the broker, not by its reader, and what was not
acknowledged when a connection ends is forgotten: end-to-end acknowledgements of the protocol decide what is sent again.
Subscriptions are remembered and renewed, so retained messages come again after every ``Connected``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fleet_core.base.errors import LinkError
from fleet_core.link.byte_counters import ByteCounters

MAX_TOPIC_BYTES = 65_535


@dataclass(frozen=True)
class Message:
    """What arrived on a subscription. ``retain`` is true when it was stored before the subscription was made."""

    topic: str
    payload: bytes
    retain: bool


@dataclass(frozen=True)
class Connected:
    """A session began. ``mqtt_version`` is 5, or 3 for 3.1.1; the limits are the broker's, None where it named none."""

    mqtt_version: int
    max_packet_bytes: int | None
    receive_max: int | None


@dataclass(frozen=True)
class Disconnected:
    """A session ended, or an attempt to begin one failed. The link tries again by itself."""

    reason: str


@dataclass(frozen=True)
class Denied:
    """The broker refused one subscription or publish. MQTT 3.1.1 cannot say so for a publish."""

    topic: str
    reason: str


Event = Message | Connected | Disconnected | Denied


@dataclass(frozen=True)
class Will:
    """What the broker publishes, at QoS 1, when this link dies without closing."""

    topic: str
    payload: bytes
    retain: bool = True


class Link(Protocol):
    @property
    def counters(self) -> ByteCounters: ...

    @property
    def connected(self) -> bool:
        """Whether a publish would be taken now."""

    @property
    def unacknowledged(self) -> int:
        """Publishes that were taken and not yet acknowledged by the broker."""

    def open(self) -> None:
        """Begin connecting. The outcome is an event, and so is every failed attempt."""

    def poll(self, timeout_s: float, also: Sequence[int] = ()) -> list[Event]:
        """Do all work that is due and return what happened, at the latest after ``timeout_s`` seconds.

        Returns early with the first events, or with none when one of the file descriptors ``also`` is readable.
        A connection attempt may hold it up for a few seconds more.
        """

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1) -> None:
        """Hand a message to the link. Raises LinkError when it is offline, full, or the broker's limit is passed."""

    def subscribe(self, *filters: str, qos: int = 1) -> None:
        """Ask for messages at ``qos`` or less, now and after every reconnect; what is retained comes (again)."""

    def unsubscribe(self, *filters: str) -> None:
        """Ask for them no more."""

    def close(self) -> None:
        """Send what waits (within bounded time) and leave in order: no will is published."""


def matches(pattern: str, topic: str) -> bool:
    """Whether ``topic`` falls under the filter ``pattern`` (MQTT 5.0, section 4.7)."""
    if topic.startswith("$") and pattern[:1] in ("+", "#"):
        return False
    wanted, levels = pattern.split("/"), topic.split("/")
    for position, level in enumerate(wanted):
        if level == "#":
            return True
        if position >= len(levels) or level not in ("+", levels[position]):
            return False
    return len(wanted) == len(levels)


def check_topic(topic: str) -> None:
    """Raises LinkError for a topic that no message can have."""
    if not _is_name(topic) or "+" in topic or "#" in topic:
        raise LinkError("is no topic", where=repr(topic[:80]), expected="levels without '+', '#' and NUL")


def check_filter(pattern: str) -> None:
    """Raises LinkError for a filter that no broker takes."""
    levels = pattern.split("/")
    alone = all(level in ("+", "#") or not ("+" in level or "#" in level) for level in levels)
    if not _is_name(pattern) or not alone or "#" in levels[:-1]:
        raise LinkError("is no topic filter", where=repr(pattern[:80]), expected="'+' as a level or '#' as the last")


def _is_name(text: str) -> bool:
    return bool(text) and "\0" not in text and len(text.encode("utf-8", "surrogatepass")) <= MAX_TOPIC_BYTES
