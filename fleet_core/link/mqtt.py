"""A link to an MQTT broker: connects, reconnects with jitter and renews subscriptions, all inside ``poll``.

MQTT 5 is tried first, then at once 3.1.1 when the broker refuses it, hangs up or does not answer. An exception inside a
session ends the connection, with its text as the reason, and is logged with its traceback.
"""

from __future__ import annotations

import logging
import random
import selectors
import ssl
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from fleet_core.base.errors import ConfigError, LinkError
from fleet_core.link.byte_counters import ByteCounters
from fleet_core.link.host_names import is_loopback
from fleet_core.link.interface import Disconnected, Event, Will, check_filter, check_topic
from fleet_core.link.mqtt_connection import Address, Session, Settings, Subscription
from fleet_core.link.paho_client import describe

BACKOFF_FIRST_S = 0.2
BACKOFF_LAST_S = 30.0
STABLE_S = 10.0  # a connection that lasted this long resets the backoff
MAX_FAILURES_AFTER_ACCEPTED = 3  # after a shorter accepted connection the wait is at most 1.6 s
SUSPICIOUS = 2  # successive sessions on which a broker of MQTT 3.1.1 hung up, before the cause is guessed
IDLE_S = 1.0  # the longest wait between two checks of the keepalive
MAX_INCOMING_BYTES = 8 << 20
PACKET_OVERHEAD_BYTES = 16  # fixed header, lengths, identifier and empty properties of a PUBLISH, rounded up
TOO_LARGE = (
    "raise the broker's limit (mosquitto: max_packet_size); or make chunks smaller (link.chunk_bytes), manifests by "
    "fewer devices in a round (fleet.cohort) or larger chunks"
)
PORTS = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
WS_PATH = "/mqtt"

log = logging.getLogger(__name__)


class MqttLink:
    """A Link to the broker at ``url``.

    Args:
        url: as ``parse_url`` takes it.
        will: published by the broker when this link ends without ``close``.
        keepalive_s: silence after which the broker is pinged; poll at least that often.
        protocol: 5, 3 (which means 3.1.1), or None: 5 if the broker supports it.
        ca, cert, key: PEM files, for mqtts and wss only; ``cert`` and ``key`` together.
        max_queued: the most unacknowledged publishes.
        max_incoming_bytes: the largest packet; a larger one ends the connection.
        connect_timeout_s: for each of the TCP connection, the TLS handshake and the broker's CONNACK.

    Raises ConfigError for a URL or TLS files that cannot be used; network failures are events.
    """

    def __init__(
        self,
        url: str,
        *,
        client_id: str,
        will: Will | None = None,
        keepalive_s: int = 60,
        protocol: Literal[3, 5] | None = None,
        username: str | None = None,
        password: str | None = None,
        ca: Path | None = None,
        cert: Path | None = None,
        key: Path | None = None,
        max_queued: int = 2000,
        max_incoming_bytes: int = MAX_INCOMING_BYTES,
        connect_timeout_s: float = 5.0,
    ):
        address = parse_url(url)
        tls = _tls_context(address, ca, cert, key)
        self.counters = ByteCounters()
        self._url = url
        self._settings = Settings(
            address, client_id, will, keepalive_s, username, password, tls, max_incoming_bytes, connect_timeout_s
        )
        self._protocol = protocol
        self._version = protocol or 5
        self._max_queued = max_queued
        self._events: deque[Event] = deque()
        self._filters: dict[str, Subscription] = {}
        self._session: Session | None = None
        self._subscribed = False
        self._opened = False
        self._attempt_at_s = 0.0
        self._failures = 0
        self._unexplained = 0
        self._random = random.Random()

    @property
    def connected(self) -> bool:
        return self._session is not None and self._session.accepted and not self._session.ended

    @property
    def unacknowledged(self) -> int:
        return 0 if self._session is None else self._session.waiting

    def open(self) -> None:
        self._opened = True
        self._attempt_at_s = 0.0

    def poll(self, timeout_s: float, also: Sequence[int] = ()) -> list[Event]:
        until_s = time.monotonic() + timeout_s
        while True:
            self._work()
            left_s = until_s - time.monotonic()
            if self._events or left_s <= 0 or self._wait(left_s, also):
                events = list(self._events)
                self._events.clear()
                return events

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1) -> None:
        check_topic(topic)
        session = self._session
        if session is None or not self.connected:
            raise LinkError("is not connected", where=self._url, hint="wait for Connected")
        size_bytes = len(topic.encode()) + len(payload) + PACKET_OVERHEAD_BYTES
        if size_bytes > session.max_packet_bytes:
            raise LinkError(
                f"a message of {size_bytes} bytes is over the broker's limit",
                where=topic,
                expected=f"at most {session.max_packet_bytes} bytes",
                hint=TOO_LARGE,
            )
        if session.waiting >= self._max_queued:
            raise LinkError(f"{self._max_queued} publishes are unacknowledged", where=self._url, hint="poll first")
        session.publish(topic, payload, retain, qos)

    def subscribe(self, *filters: str, qos: int = 1, as_published: bool = False) -> None:
        for pattern in filters:
            check_filter(pattern)
        wanted = dict.fromkeys(filters, Subscription(qos, as_published))
        self._filters.update(wanted)
        if self._session is not None and self._subscribed:
            self._session.subscribe(wanted)

    def unsubscribe(self, *filters: str) -> None:
        known = [pattern for pattern in filters if self._filters.pop(pattern, None) is not None]
        if known and self._session is not None and self._subscribed:
            self._session.unsubscribe(known)

    def use_certificate(self, cert: Path, key: Path) -> None:
        """Uses another certificate from the next connection on. Raises ConfigError."""
        if self._settings.tls is not None:
            _load(self._settings.tls, cert, key)

    def trust(self, *, ca: Path | None = None, cert: Path | None = None, key: Path | None = None) -> None:
        """Uses these TLS files alone from the next connection on. Raises ConfigError."""
        if self._settings.tls is not None:
            self._settings = replace(self._settings, tls=_tls_context(self._settings.address, ca, cert, key))

    def close(self, *, flush_s: float = 5.0) -> None:
        until_s = time.monotonic() + flush_s
        while self.connected and self.unacknowledged and (left_s := until_s - time.monotonic()) > 0:
            self._wait(left_s, ())
            self._work()
        if self._session is not None and self.connected:
            self._session.disconnect()
        self.abort()

    def abort(self) -> None:
        """Ends as a crash would: nothing is flushed, no DISCONNECT is sent, and the broker publishes the will."""
        if self._session is not None:
            self._session.drop()
        self._session, self._opened = None, False
        self._events.clear()

    def _work(self) -> None:
        session = self._session
        if session is None:
            if self._opened and time.monotonic() >= self._attempt_at_s:
                self._connect()
            return
        try:
            session.work()
            if self.connected and not self._subscribed:
                self._subscribed = True
                session.subscribe(self._filters)
        except Exception as error:
            log.exception("the connection to %s ends because of an error in it", self._url)
            session.drop()
            self._lost(session, f"{type(error).__name__}: {error}")
        else:
            if session.ended:
                self._lost(session, session.reason)

    def _wait(self, timeout_s: float, also: Sequence[int]) -> bool:
        """Waits for the socket or for work that is due. True when one of ``also`` is readable."""
        sock = None if self._session is None else self._session.socket()
        with selectors.PollSelector() as selector:
            for descriptor in set(also):
                selector.register(descriptor, selectors.EVENT_READ)
            if self._session is not None and sock is not None:
                writing = selectors.EVENT_WRITE if self._session.wants_write else 0
                selector.register(sock, selectors.EVENT_READ | writing)
            ready = selector.select(min(timeout_s, self._due_in_s()))
        return any(key.fileobj in also for key, _ in ready)

    def _due_in_s(self) -> float:
        """Seconds until there is work that no socket signals."""
        if self._session is None:
            return max(0.0, self._attempt_at_s - time.monotonic()) if self._opened else IDLE_S
        if self._session.ended or not self._session.drained:
            return 0.0
        if not self._session.accepted:
            return max(0.01, min(IDLE_S, self._settings.connect_timeout_s - self._session.age_s))
        return IDLE_S

    def _connect(self) -> None:
        self._subscribed = False
        try:
            self._session = Session(self._settings, self._version, self.counters, self._events)
        except (OSError, ValueError) as error:
            self._schedule(describe(error))

    def _lost(self, session: Session, reason: str) -> None:
        self._session = None
        if self._protocol is None and self._version == 5 and session.version_refused:
            self._version, self._attempt_at_s = 3, 0.0
            return
        self._unexplained = self._unexplained + 1 if session.guessed_reason else 0
        if self._unexplained >= SUSPICIOUS:
            reason += f"; MQTT 3.1.1 gives no reason: {session.guessed_reason}"
        if session.accepted:
            stable = session.age_s >= STABLE_S
            self._failures = 0 if stable else min(self._failures, MAX_FAILURES_AFTER_ACCEPTED)
        self._schedule(reason)

    def _schedule(self, reason: str) -> None:
        """Reports the reason and schedules the next attempt: exponential backoff with full jitter, MQTT 5 first."""
        ceiling_s = min(BACKOFF_LAST_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 16))
        self._failures += 1
        self._version = self._protocol or 5
        self._attempt_at_s = time.monotonic() + self._random.uniform(0, ceiling_s)
        self._events.append(Disconnected(reason))


def parse_url(url: str) -> Address:
    """``mqtt://host[:port]`` (1883), ``mqtts://host[:port]`` (8883), or MQTT over WebSockets:
    ``ws://host[:port][/path]`` (80), ``wss://host[:port][/path]`` (443), the path ``/mqtt`` by default. Raises
    ConfigError for anything else."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
        path = parts.path if scheme in ("ws", "wss") else ""
        rest = "" if path else parts.path.strip("/")
        plain = not (rest or parts.query or parts.fragment or "@" in parts.netloc) and path.isprintable()
    except ValueError:
        scheme, host, port, plain, path = "", None, None, False, ""
    if scheme not in PORTS or not host or port == 0 or not plain:
        raise ConfigError(
            "is not the address of a broker",
            where=repr(url),
            expected="mqtt://host[:port] or mqtts://host[:port]; over WebSockets ws:// or wss://host[:port][/path]",
            hint="for example mqtt://127.0.0.1:1883; user name and password are separate options",
        )
    if scheme in ("ws", "wss"):
        path = path if path.strip("/") else WS_PATH
    return Address(host, port or PORTS[scheme], scheme in ("mqtts", "wss"), path)


def check_plain(url: str, allowed: bool) -> str:
    """``url`` itself. Raises ConfigError for plain MQTT that leaves this machine, unless it is ``allowed``."""
    address = parse_url(url)
    if not (address.tls or allowed or is_loopback(address.host)):
        raise ConfigError(
            "is plain MQTT that leaves this machine: anyone on the network can read and change it", where=url,
            expected="mqtts://host[:port]",
            hint="in a network that you trust, allow it: --plain, or plain = true beside the broker",
        )
    return url


def _tls_context(address: Address, ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if not address.tls:
        if ca or cert or key:
            raise ConfigError("certificates cannot be used with a plain connection", hint="use mqtts:// or wss://")
        return None
    if (cert is None) != (key is None):
        raise ConfigError("a client certificate needs its key, and a key its certificate", where=str(cert or key))
    try:
        context = ssl.create_default_context(cafile=ca)  # with a file, only its authorities are trusted
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if ca is not None:
            # On by default since Python 3.13: it refuses certificates that lack extensions of RFC 5280, as those of a
            # user's own broker do when made by mosquitto-tls(7). Whom to trust is still up to the file alone.
            context.verify_flags &= ~ssl.VerifyFlags.VERIFY_X509_STRICT
    except OSError as error:
        raise ConfigError(f"cannot be read as PEM: {error.strerror or error}", where=str(ca)) from error
    if cert is not None and key is not None:
        _load(context, cert, key)
    return context


def _load(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:
        raise ConfigError(f"cannot be read as PEM: {error.strerror or error}", where=f"{cert}, {key}") from error
