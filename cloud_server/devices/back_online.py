"""Waits over MQTT for a flashed device to come back: its retained presence shows a new start and the new version.

If no broker answers, the device is asked over the SSH connection that flashed it.
"""

from __future__ import annotations

import time
from typing import Protocol

from fleet_core.base.errors import MessageError
from fleet_core.link.interface import Denied, Disconnected, Event, Link, Message
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Presence

CONNECT_S = 5.0
RETAINED_S = 1.0  # the retained presence arrives right after the subscription
POLL_S = 0.5


class Watch(Protocol):
    """The same as ``firmware_profiles.ssh.remote_install.Watch``."""

    def before(self) -> None: ...

    def missing(self, version: str) -> str: ...

    def well(self) -> bool: ...


class MqttWatch:
    """link: not opened yet; ``close`` closes it. fallback: used if no broker answers on ``link``."""

    def __init__(self, fleet: str, device: str, link: Link, fallback: Watch):
        self._link, self._fallback = link, fallback
        self._topic = topics.presence(fleet, device)
        self._presence: Presence | None = None
        self._boot = ""
        self._connected: bool | None = None  # None: not tried yet
        self._problem = ""

    def before(self) -> None:
        if self._connect_once():
            self._poll(0)
            self._boot = "" if self._presence is None else self._presence.boot
        else:
            self._fallback.before()

    def missing(self, version: str) -> str:
        if not self._connected:
            missing = self._fallback.missing(version)
            return f"{missing} (no broker answers here: {self._problem})" if missing else ""
        self._poll(POLL_S)
        presence = self._presence
        if not self._link.connected:
            return f"the broker does not answer here: {self._problem}"
        if presence is None or presence.boot == self._boot:
            return "the broker has heard nothing from the device since its restart" + self._problem
        if presence.st != "on":
            return "the device has left the broker again"
        return "" if presence.ver == version else f"the device says that it is version {presence.ver or 'unknown'}"

    def well(self) -> bool:
        if not self._connect_once():
            return self._fallback.well()
        self._poll(0)
        return self._presence is not None and self._presence.st == "on"

    def close(self) -> None:
        if self._connected is not None:
            self._link.close()

    def _connect_once(self) -> bool:
        """Whether a broker answered; tried only at the first call."""
        if self._connected is None:
            self._link.subscribe(self._topic)
            self._link.open()
            until = time.monotonic() + CONNECT_S
            while not self._link.connected and time.monotonic() < until:
                self._poll(POLL_S)
            self._connected = self._link.connected
            until = time.monotonic() + RETAINED_S
            while self._connected and self._presence is None and time.monotonic() < until:
                self._poll(0.1)
        return self._connected

    def _poll(self, timeout_s: float) -> None:
        for event in self._link.poll(timeout_s):
            self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case Message(topic, payload) if topic == self._topic and payload:
                try:
                    self._presence = messages.decode(Presence, payload)
                except MessageError as error:
                    self._problem = f" ({error})"
            case Disconnected(reason):
                self._problem = reason
            case Denied(topic, reason):
                self._problem = f" ({topic} denied: {reason})"
