"""Sees over MQTT whether a device is back after it was flashed: its retained presence, started anew, of the version.

Where no broker answers from here the device itself is asked, over the connection that flashed it.
"""

from __future__ import annotations

import time
from typing import Protocol

from fleet_core.base.errors import MessageError
from fleet_core.link.interface import Denied, Disconnected, Event, Link, Message
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Presence

REACH_S = 5.0
RETAINED_S = 1.0
LOOK_S = 0.5


class Watch(Protocol):
    """As ``firmware_profiles.ssh.remote_install.Watch``."""

    def before(self) -> None: ...

    def missing(self, version: str) -> str: ...

    def well(self) -> bool: ...


class OverMqtt:
    """link: not opened yet; ``close`` ends it. otherwise: asked where no broker answers on ``link``."""

    def __init__(self, fleet: str, device: str, link: Link, otherwise: Watch):
        self._link, self._otherwise = link, otherwise
        self._topic = topics.presence(fleet, device)
        self._presence: Presence | None = None
        self._boot = ""
        self._reached: bool | None = None
        self._trouble = ""

    def before(self) -> None:
        if self._reach():
            self._look(0)
            self._boot = "" if self._presence is None else self._presence.boot
        else:
            self._otherwise.before()

    def missing(self, version: str) -> str:
        if not self._reached:
            told = self._otherwise.missing(version)
            return f"{told} (no broker answers here: {self._trouble})" if told else ""
        self._look(LOOK_S)
        found = self._presence
        if not self._link.connected:
            return f"the broker does not answer here: {self._trouble}"
        if found is None or found.boot == self._boot:
            return "the device was not heard of on the broker since its restart" + self._trouble
        if found.st != "on":
            return "the device has left the broker again"
        return "" if found.ver == version else f"the device says that it is version {found.ver or 'unknown'}"

    def well(self) -> bool:
        if not self._reach():
            return self._otherwise.well()
        self._look(0)
        return self._presence is not None and self._presence.st == "on"

    def close(self) -> None:
        if self._reached is not None:
            self._link.close()

    def _reach(self) -> bool:
        """Whether a broker answers; asked once."""
        if self._reached is None:
            self._link.subscribe(self._topic)
            self._link.open()
            until = time.monotonic() + REACH_S
            while not self._link.connected and time.monotonic() < until:
                self._look(LOOK_S)
            self._reached = self._link.connected
            until = time.monotonic() + RETAINED_S  # what is retained comes right after the subscription
            while self._reached and self._presence is None and time.monotonic() < until:
                self._look(0.1)
        return self._reached

    def _look(self, timeout_s: float) -> None:
        for event in self._link.poll(timeout_s):
            self._on(event)

    def _on(self, event: Event) -> None:
        match event:
            case Message(topic, payload) if topic == self._topic and payload:
                try:
                    self._presence = messages.decode(Presence, payload)
                except MessageError as error:
                    self._trouble = f" ({error})"
            case Disconnected(reason):
                self._trouble = reason
            case Denied(topic, reason):
                self._trouble = f" ({topic} denied: {reason})"
