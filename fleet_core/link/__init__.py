"""The link to a broker: what the protocol asks of MQTT, over paho or inside one process."""

from __future__ import annotations

from fleet_core.link.base import Connected, Denied, Disconnected, Event, Link, Message, Will, matches
from fleet_core.link.counters import ByteCounters, Traffic

__all__ = [
    "ByteCounters",
    "Connected",
    "Denied",
    "Disconnected",
    "Event",
    "Link",
    "Message",
    "Traffic",
    "Will",
    "matches",
]
