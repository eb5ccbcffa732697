"""Readings that come in messages on an MQTT topic, of the fleet's broker or another one."""

from __future__ import annotations

from pathlib import Path

from edge_agent.connection.broker_login import link_to, tls_files
from edge_agent.sources.interface import MAX_MESSAGE_BYTES, Item, Lost, Pace
from edge_agent.sources.text_lines import TextLines
from fleet_core.base.errors import ConfigError, SourceError
from fleet_core.board.device_settings import Settings
from fleet_core.board.source_settings import Mqtt, MqttSource
from fleet_core.link.interface import Denied, Disconnected, Message

PACKET_BYTES = MAX_MESSAGE_BYTES + 70_000
ANOTHER = "another broker: broker = \"mqtt://HOST\""
DENIED = f"let this device read the topic, or name {ANOTHER}"


class Topic:
    """The messages on a topic. Raises ConfigError for settings that cannot be used, LinkError for a wrong topic."""

    def __init__(self, about: Mqtt, home: Path, settings: Settings):
        if not about.broker and "cert" in tls_files(home, settings):
            raise ConfigError(
                f"the topic {about.topic} is to be read at the fleet's broker, where this device has one connection: "
                "the agent's", where="device.toml", expected=ANOTHER, hint="docs/sources.md#mqtt",
            )
        self._url = about.broker or settings.device.broker
        self._link = link_to(about, home, settings, PACKET_BYTES)
        self._link.subscribe(about.topic)
        self._link.open()

    def read(self, timeout_s: float) -> list[bytes | Lost]:
        """What has arrived, with ``Lost`` where the connection broke. Raises SourceError if the broker refuses."""
        found: list[bytes | Lost] = []
        for event in self._link.poll(timeout_s):
            if isinstance(event, Message) and not event.retain:
                found.append(event.payload)
            elif isinstance(event, Disconnected):
                found.append(Lost(f"{self._url}: {event.reason}"))
            elif isinstance(event, Denied):
                raise SourceError(f"the broker refuses: {event.reason}", where=f"{self._url} {event.topic}",
                                  hint=DENIED)
        return found

    def close(self) -> None:
        self._link.close()


class TopicFeed:
    """Readings of messages: one each, or a line each of several lines. Retained messages are not read."""

    def __init__(self, source: MqttSource, home: Path, settings: Settings):
        self._topic, self._text, self._pace = Topic(source, home, settings), TextLines(source.columns), Pace()

    def read(self, timeout_s: float) -> list[Item] | None:
        found: list[Item] = []
        for one in self._topic.read(timeout_s):
            if isinstance(one, Lost):
                found.append(one)
            else:
                self._pace.came(len(one))
                found += self._text.message(one)
        return found

    def close(self) -> None:
        self._topic.close()
