"""A private broker, a scripted broker, and links that record their events."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from cloud_server.broker.private_broker import Broker, start_broker
from fleet_core.link.interface import Event, Link, Message
from tests.support import waiting
from tests.support.waiting import PATIENCE_S

E = TypeVar("E")

CONNECT, CONNACK, PUBLISH, PUBACK, SUBSCRIBE, SUBACK = 0x10, 0x20, 0x30, 0x40, 0x80, 0x90
ACCEPTED_V5 = bytes([CONNACK, 3, 0, 0, 0])
ACCEPTED_V3 = bytes([CONNACK, 2, 0, 0])
NEEDS_MOSQUITTO = pytest.mark.needs("mosquitto")


@contextmanager
def private_broker(folder: Path, kind: str = "any") -> Iterator[Broker]:
    """A broker on a free loopback port. kind: ``mosquitto`` (mark the test NEEDS_MOSQUITTO), ``amqtt``, or ``any``:
    mosquitto where it is installed, else amqtt."""
    broker = start_broker(folder, embedded={"mosquitto": False, "amqtt": True}.get(kind))
    assert kind in ("any", broker.kind)
    try:
        yield broker
    finally:
        broker.stop()


class RecordingLink:
    """A link and all events that it has reported."""

    def __init__(self, link: Link):
        self.link = link
        self.events: list[Event] = []

    def pump(self, timeout_s: float = 0.01) -> None:
        self.events += self.link.poll(timeout_s)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def topics(self) -> list[str]:
        return [message.topic for message in self.of(Message)]


def until(condition: Callable[[], object], *watched: RecordingLink) -> None:
    """Poll the links until the condition holds; a failure shows their events."""

    def pump() -> None:
        for each in watched:
            each.pump()

    waiting.until(condition, pump, lambda: [each.events for each in watched])


_given: set[int] = set()


def free_port() -> int:
    """A port on which nothing listens; never one twice, because the system may give out a closed one again at once."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


def accepts_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
    except OSError:
        return False
    return True


def refuses_connections(port: int) -> bool:
    """True only for a refused connection. A broker that is stopping may still accept and then close or reset."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
    except ConnectionError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


class ScriptedBroker:
    """A listening socket; the test sends and receives the packets."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self.listener.getsockname()[1]}"

    def accept(self, watched: RecordingLink) -> Peer:
        """Accept the link's next connection, leaving its CONNECT unread. Events until then go to ``watched.events``."""
        self.listener.setblocking(False)
        accepted: list[socket.socket] = []

        def accept() -> None:
            watched.events += watched.link.poll(1, also=[self.listener.fileno()])
            with suppress(BlockingIOError):
                accepted.append(self.listener.accept()[0])

        waiting.until(lambda: accepted, accept, lambda: f"the link did not connect: {watched.events}")
        return Peer(accepted[0])


class Peer:
    """One accepted connection; reads and writes whole packets."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.sock.settimeout(PATIENCE_S)
        self.received_bytes = 0
        self.sent_bytes = 0

    def read(self) -> tuple[int, bytes]:
        """Return (first byte, body) of the next packet."""
        first, size, shift = self._take(1)[0], 0, 0
        while True:
            digit = self._take(1)[0]
            size |= (digit & 127) << shift
            shift += 7
            if not digit & 128:
                return first, self._take(size)

    def write(self, data: bytes) -> None:
        self.sock.sendall(data)
        self.sent_bytes += len(data)

    def close(self) -> None:
        self.sock.close()

    def _take(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.sock.recv(count - len(data))
            assert piece, "the link hung up"
            data += piece
        self.received_bytes += count
        return data


def publish_packet(topic: str, payload: bytes) -> bytes:
    """A QoS 0 PUBLISH in MQTT 5."""
    body = struct.pack("!H", len(topic)) + topic.encode() + b"\0" + payload
    size, length = len(body), b""
    while True:
        size, digit = divmod(size, 128)
        length += bytes([digit | (128 if size else 0)])
        if not size:
            return bytes([PUBLISH]) + length + body
