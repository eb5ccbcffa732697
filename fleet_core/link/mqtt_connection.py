"""One MQTT connection from CONNECT to its end. paho only encodes and decodes packets: no threads, no reconnecting.

paho's callbacks only append to ``events`` or set attributes. The socket is read and written in ``work``; ``publish``
also writes at once as much as the socket takes. A session is used once, so no state survives a reconnect.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import paho.mqtt.client as paho
from paho.mqtt.enums import MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from fleet_core.link.byte_counters import ByteCounters
from fleet_core.link.interface import Connected, Denied, Event, Message, Will
from fleet_core.link.paho_client import CountingClient, tcp_socket_of

WINDOW = 32  # publishes in flight; fewer if the broker's receive maximum is lower
PACKETS_AT_ONCE = 64  # read before events are returned
FILTERS_AT_ONCE = 8  # per SUBSCRIBE (limit of AWS IoT Core)
MAX_PACKET_BYTES = 268_435_455  # limit of MQTT itself
UNSUPPORTED_VERSION, KEEPALIVE_TIMEOUT = 0x84, 0x8D  # reason codes of MQTT 5; paho uses them for 3.1.1 too
SKIPPED_S = 10.0  # a publish this much older than an acknowledged one is given up
FAREWELL_S = 1.0  # for the broker to close the connection after DISCONNECT
NO_RETAINED = "no retained messages"


class Subscription(NamedTuple):
    """as_published: whether messages keep the mark that they are to be retained."""

    qos: int
    as_published: bool


class Address(NamedTuple):
    """Where a broker listens. path: of MQTT over WebSockets, empty for MQTT over TCP."""

    host: str
    port: int
    tls: bool
    path: str = ""


@dataclass(frozen=True)
class Settings:
    """The settings that all connections of one link share."""

    address: Address
    client_id: str
    will: Will | None
    keepalive_s: int
    username: str | None
    password: str | None
    tls: ssl.SSLContext | None
    max_incoming_bytes: int
    connect_timeout_s: float


@dataclass(frozen=True)
class _Outgoing:
    topic: str
    payload: bytes
    retain: bool
    qos: int
    sent_at_s: float = 0.0


class Session:
    """One connection. Creating it raises OSError or ValueError when the broker cannot be reached; later failures set
    ``ended``. accepted: true from CONNACK on. events: the link's queue."""

    def __init__(self, settings: Settings, version: int, counters: ByteCounters, events: deque[Event]):
        self.accepted = False
        self.began_s = time.monotonic()
        self.max_packet_bytes = MAX_PACKET_BYTES
        self._settings, self._version, self._counters, self._events = settings, version, counters, events
        self._window = WINDOW
        self._queue: deque[_Outgoing] = deque()
        self._in_flight: dict[int, _Outgoing] = {}
        self._subscribing: dict[int, Sequence[str]] = {}
        self._refusal: ReasonCode | None = None
        self._reason: str | None = None
        self._unanswered = False
        self._took_retained = False
        self._client = self._make_client()
        self._connect()

    @property
    def ended(self) -> bool:
        return self._client.socket() is None

    @property
    def waiting(self) -> int:
        """Publishes not yet acknowledged."""
        return len(self._queue) + len(self._in_flight)

    @property
    def drained(self) -> bool:
        """Whether the last ``work`` read everything that had arrived."""
        return self._client.drained

    @property
    def wants_write(self) -> bool:
        return self._client.want_write()

    @property
    def version_refused(self) -> bool:
        """Whether the broker may not support this version: it said so, hung up, or did not answer."""
        if self._refusal is not None:
            return bool(self._refusal.value == UNSUPPORTED_VERSION)
        return not self.accepted and (self._client.hung_up or self._unanswered)

    @property
    def reason(self) -> str:
        """Why the session ended."""
        if self._refusal is not None:
            return f"the broker refused the connection: {self._refusal}"
        return self._reason or self._client.failure or "the connection was lost"

    @property
    def guessed_reason(self) -> str:
        """Why a broker of MQTT 3.1.1, which gives no reasons, may have hung up; empty without a guess."""
        if self._version == 5 or not self._client.hung_up or self._took_retained:
            return ""
        if not self.accepted:
            will = self._settings.will
            other = "perhaps it speaks something else at this port, takes no more clients"
            return f"{other}, or {NO_RETAINED} (the will is one)" if will is not None and will.retain else ""
        retained = [item for item in self._in_flight.values() if item.retain]
        if not retained:
            return ""
        largest = _largest(retained)
        return f"perhaps it takes none under {largest.topic}, none of {len(largest.payload)} bytes, or {NO_RETAINED}"

    @property
    def age_s(self) -> float:
        """Seconds since CONNECT."""
        return time.monotonic() - self.began_s

    def socket(self) -> socket.socket | None:
        return self._client.tcp_socket()

    def work(self) -> None:
        """Writes, reads and keeps alive, without waiting."""
        if self.wants_write:
            self._client.loop_write()
        for _ in range(PACKETS_AT_ONCE):
            if self.ended:
                return
            self._record_error(self._client.loop_read())
            if self._client.drained:
                break
        if self.ended:
            return
        self._client.loop_misc()  # its return value does not report every end of a connection; ``ended`` does
        self._send_or_time_out()

    def _send_or_time_out(self) -> None:
        if self.ended:
            return
        if self.accepted:
            self._send_queued()
        elif self.age_s > self._settings.connect_timeout_s:
            self._unanswered = True
            self._reason = f"no answer to CONNECT within {self._settings.connect_timeout_s:g} s"
            self.drop()

    def publish(self, topic: str, payload: bytes, retain: bool, qos: int) -> None:
        self._queue.append(_Outgoing(topic, payload, retain, qos))
        self._send_queued()

    def subscribe(self, filters: Mapping[str, Subscription]) -> None:
        items = [(pattern, self._options(wanted)) for pattern, wanted in filters.items()]
        for start in range(0, len(items), FILTERS_AT_ONCE):
            batch = items[start : start + FILTERS_AT_ONCE]
            _, identifier = self._client.subscribe(batch)
            if identifier is not None:
                self._subscribing[identifier] = [pattern for pattern, _ in batch]

    def _options(self, wanted: Subscription) -> Any:
        """The subscription's options in paho's form for the session's version."""
        if self._version == 5:
            return SubscribeOptions(qos=wanted.qos, retainAsPublished=wanted.as_published)
        return wanted.qos

    def unsubscribe(self, filters: list[str]) -> None:
        self._client.unsubscribe(filters)

    def drop(self) -> None:
        """Ends without DISCONNECT, so that the broker publishes the will."""
        self._client.drop()

    def disconnect(self) -> None:
        """Sends DISCONNECT and reads to the end. Unread bytes would reset the connection, so that the broker might
        publish the will."""
        sock = self.socket()
        if sock is None:
            return
        self._client.on_socket_close = None
        until_s = time.monotonic() + FAREWELL_S
        with socket.socket(fileno=os.dup(sock.fileno())) as rest:
            self._client.disconnect()
            while not self.ended and time.monotonic() < until_s:
                select.select([], [rest], [], FAREWELL_S / 10)
                self._client.loop_write()
            _read_to_end(rest, until_s)
            self._counters.closed(rest)
        self._client.drop()

    def _make_client(self) -> CountingClient:
        settings = self._settings
        version = MQTTProtocolVersion.MQTTv5 if self._version == 5 else MQTTProtocolVersion.MQTTv311
        client = CountingClient(
            self._counters, settings.max_incoming_bytes, client_id=settings.client_id, protocol=version,
            transport="websockets" if settings.address.path else "tcp",
        )
        if settings.address.path:
            client.ws_set_options(settings.address.path)
        client.connect_timeout = settings.connect_timeout_s
        client.max_inflight_messages = 0  # no limit: this class limits the window
        if settings.tls is not None:
            client.tls_set_context(settings.tls)
        if settings.username is not None:
            client.username_pw_set(settings.username, settings.password)
        if settings.will is not None:
            client.will_set(settings.will.topic, settings.will.payload, qos=1, retain=settings.will.retain)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        client.on_socket_open = self._on_socket_open
        client.on_socket_close = self._on_socket_close
        return client

    def _connect(self) -> None:
        """TCP, TLS and the CONNECT packet, always with clean start, and without properties, on which amqtt hangs."""
        options: dict[str, Any] = {"clean_start": True} if self._version == 5 else {}
        address = self._settings.address
        try:
            self._client.connect(address.host, address.port, self._settings.keepalive_s, **options)
        except BaseException:
            self._client.drop()
            raise
        self.began_s = time.monotonic()

    def _record_error(self, rc: MQTTErrorCode) -> None:
        if rc != MQTTErrorCode.MQTT_ERR_SUCCESS and self._reason is None and self._client.failure is None:
            self._reason = paho.error_string(rc)
            if rc == MQTTErrorCode.MQTT_ERR_PROTOCOL and self._in_flight:
                self._reason += self._largest_in_flight()

    def _largest_in_flight(self) -> str:
        """The likely cause of a broken connection: mosquitto refuses a publish over its ``message_size_limit`` with a
        reason code that MQTT does not allow there, and paho then ends the connection."""
        largest = _largest(self._in_flight.values())
        return f" {largest.topic} with {len(largest.payload)} bytes was in flight: perhaps over the broker's limit"

    def _send_queued(self) -> None:
        """Publishes while the window is open and the socket accepts data, so that paho buffers at most one packet."""
        while self._queue and not self.ended and len(self._in_flight) < self._window and not self.wants_write:
            item = self._queue[0]
            info = self._client.publish(item.topic, item.payload, item.qos, item.retain)
            if info.rc == MQTTErrorCode.MQTT_ERR_QUEUE_SIZE:  # the packet identifier is still in use
                return
            self._queue.popleft()
            if item.qos:
                self._in_flight[info.mid] = replace(item, sent_at_s=time.monotonic())

    # paho's callbacks

    def _on_connect(
        self, _client: paho.Client, _data: Any, _flags: Any, reason: ReasonCode, limits: Properties | None
    ) -> None:
        if reason.is_failure:
            self._refusal = reason
            return
        packet_bytes: int | None = getattr(limits, "MaximumPacketSize", None)
        receive_max: int | None = getattr(limits, "ReceiveMaximum", None)
        self.accepted = True
        self.max_packet_bytes = packet_bytes or MAX_PACKET_BYTES
        self._window = min(WINDOW, receive_max or WINDOW)
        self._events.append(Connected(self._version, packet_bytes, receive_max))

    def _on_disconnect(
        self, _client: paho.Client, _data: Any, flags: Any, reason: ReasonCode, _properties: Properties | None
    ) -> None:
        if flags.is_disconnect_packet_from_server:
            self._reason = f"the broker closed the connection: {reason}"
        elif reason.value == KEEPALIVE_TIMEOUT:
            self._reason = self._reason or "the broker is silent (keepalive timeout)"

    def _on_message(self, _client: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        self._events.append(Message(message.topic, bytes(message.payload), bool(message.retain)))

    def _on_publish(
        self, _client: paho.Client, _data: Any, identifier: int, reason: ReasonCode, _properties: Properties
    ) -> None:
        item = self._in_flight.pop(identifier, None)
        if item is None:
            return
        if reason.is_failure:
            self._events.append(Denied(item.topic, str(reason)))
        self._took_retained |= item.retain
        self._give_up_before(item.sent_at_s - SKIPPED_S)

    def _give_up_before(self, sent_at_s: float) -> None:
        """Acknowledgements arrive in order (MQTT 5.0, 4.6), so a publish that was skipped will never get one. mosquitto
        2.0.11 skips a few of thousands; without giving up they would fill the window."""
        for identifier, item in list(self._in_flight.items()):
            if item.sent_at_s >= sent_at_s:
                return
            del self._in_flight[identifier]
            self._events.append(Denied(item.topic, "never acknowledged"))

    def _on_subscribe(
        self, _client: paho.Client, _data: Any, identifier: int, reasons: list[ReasonCode], _properties: Properties
    ) -> None:
        for pattern, reason in zip(self._subscribing.pop(identifier, ()), reasons, strict=False):
            if reason.is_failure:
                self._events.append(Denied(pattern, str(reason)))

    def _on_socket_open(self, _client: paho.Client, _data: Any, sock: Any) -> None:
        tcp = tcp_socket_of(sock)
        if tcp is not None:
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._counters.opened(tcp)

    def _on_socket_close(self, _client: paho.Client, _data: Any, sock: Any) -> None:
        tcp = tcp_socket_of(sock)
        if tcp is not None:
            self._counters.closed(tcp)


def _largest(items: Iterable[_Outgoing]) -> _Outgoing:
    return max(items, key=lambda item: len(item.payload))


def _read_to_end(sock: socket.socket, until_s: float) -> None:
    """Discards received bytes until the peer closes the connection, at most until ``until_s``."""
    try:
        sock.shutdown(socket.SHUT_WR)
        while (left_s := until_s - time.monotonic()) > 0:
            sock.settimeout(left_s)
            if not sock.recv(65_536):
                return
    except OSError:
        return
