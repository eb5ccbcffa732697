"""Sends the aggregator's presence, and messages to single devices."""

from __future__ import annotations

from collections.abc import Callable

from fleet_core import __version__
from fleet_core.link.interface import Link, send
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Down, ServerPresence


class ServerMessages:
    """Messages to devices use QoS 0, because a device asks again if a message is lost. The first message, ``heard``,
    uses QoS 1, so that an MQTT 5 broker reports if it denies them. sign(body): with the fleet's key. boot: identifies
    this start of the aggregator."""

    def __init__(
        self, fleet: str, link: Link, sign: Callable[[bytes], bytes], boot: str, log: Callable[[str], None]
    ):
        self._fleet, self._link, self._sign, self._boot, self._log = fleet, link, sign, boot, log

    def announce(self, state: str) -> None:
        """Publishes the retained presence. state: on | off."""
        presence = ServerPresence(st=state, boot=self._boot, ver=__version__, packed=True, dictionary=1)
        send(self._link, topics.server(self._fleet), messages.encode(presence), self._log, retain=True)

    def tell(self, device: str, message: Down) -> None:
        qos = 1 if message.t == "heard" else 0
        send(self._link, topics.down(self._fleet, device), messages.encode(message), self._log, qos=qos)

    def attest(self, device: str, message: Down) -> None:
        """Sends a signed message; a device commits or discards state, or ends, only on a signed one."""
        qos = 1 if message.t == "revoked" else 0
        data = messages.encode(message, packed=message.secure is not None)
        send(self._link, topics.down(self._fleet, device), self._sign(data), self._log, qos=qos)
