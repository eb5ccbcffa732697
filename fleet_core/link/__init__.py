"""The link to a broker: over MQTT with paho, or inside one process."""

from __future__ import annotations

from fleet_core.link.byte_counters import ByteCounters, Traffic
from fleet_core.link.interface import Connected, Denied, Disconnected, Event, Link, Message, Will, matches

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
