"""Counts the bytes of a link: MQTT bytes at the socket, and wire bytes from the kernel.

Wire bytes come from Linux's ``TCP_INFO`` (kernel ≥ 4.19), also under TLS: TCP payload including retransmissions, plus
one IP and TCP header per segment. So do the bytes that this end sent again (``tcpi_bytes_retrans``, TCP payload); only
the broker's kernel knows what the broker sent again. On other systems both are None.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_TCP_INFO_BYTES = 256
_BYTES_RECEIVED_AT = 128  # u64; segs_out and segs_in are the u32 at 136 and 140
_BYTES_SENT_AT = 200  # u64, and the bytes sent again in the u64 at 208
_NEEDED_BYTES = 216
_SYN_OPTIONS_BYTES = 8  # what a SYN carries beyond the options of later segments


@dataclass(frozen=True)
class Traffic:
    """Bytes since the link was created. wire_sent, wire_received, retransmitted: None when the system does not count
    them. connected_s: seconds with a TCP connection; None before the first."""

    mqtt_sent: int
    mqtt_received: int
    wire_sent: int | None
    wire_received: int | None
    retransmitted: int | None = None
    connected_s: float | None = None

    def __sub__(self, before: Traffic) -> Traffic:
        """The bytes between ``before`` and this snapshot."""
        return Traffic(
            self.mqtt_sent - before.mqtt_sent,
            self.mqtt_received - before.mqtt_received,
            _difference(self.wire_sent, before.wire_sent),
            _difference(self.wire_received, before.wire_received),
            _difference(self.retransmitted, before.retransmitted),
            None if self.connected_s is None else self.connected_s - (before.connected_s or 0.0),
        )


class ByteCounters:
    """Counts bytes of one link over all its connections. Whoever sends or receives adds to ``mqtt_sent`` and
    ``mqtt_received``. ``snapshot`` may be called in any thread."""

    def __init__(self, *, wire: bool = True, clock: Callable[[], float] = time.monotonic):
        self.mqtt_sent = 0
        self.mqtt_received = 0
        self._socket: socket.socket | None = None
        self._wire: Wire | None = (0, 0, 0) if wire and sys.platform == "linux" else None
        self._clock, self._opened_at = clock, 0.0
        self._connected_s: float | None = None
        self._lock = threading.Lock()

    def opened(self, sock: socket.socket) -> None:
        """Starts counting a connection on ``sock``."""
        with self._lock:
            self._socket, self._opened_at = sock, self._clock()

    def closed(self, sock: socket.socket) -> None:
        """Ends counting the connection that ``opened`` began. Call it before ``sock`` is closed."""
        with self._lock:
            if self._socket is not None:
                self._wire = _sum(self._wire, wire_bytes(sock))
                self._connected_s = self._connected()
                self._socket = None

    def snapshot(self) -> Traffic:
        """The current counts, including the open connection."""
        with self._lock:
            wire = self._wire if self._socket is None else _sum(self._wire, wire_bytes(self._socket))
            sent, received, again = wire or (None, None, None)
            return Traffic(self.mqtt_sent, self.mqtt_received, sent, received, again, self._connected())

    def _connected(self) -> float | None:
        if self._socket is None:
            return self._connected_s
        return (self._connected_s or 0.0) + self._clock() - self._opened_at


Wire = tuple[int, int, int]


def wire_bytes(sock: socket.socket) -> Wire | None:
    """(sent, received, sent again) bytes of a TCP connection, the first two with IP and TCP headers; None when the
    kernel does not tell."""
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    if len(info) < _NEEDED_BYTES:
        return None
    received, segments_out, segments_in = struct.unpack_from("=QII", info, _BYTES_RECEIVED_AT)
    sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT_AT)
    timestamps = info[5] & 1
    header = (40 if sock.family == socket.AF_INET6 else 20) + 20 + 12 * timestamps
    up, down = (count + segments * header for count, segments in ((sent, segments_out), (received, segments_in)))
    return up + _SYN_OPTIONS_BYTES, down + _SYN_OPTIONS_BYTES, again


def _sum(a: Wire | None, b: Wire | None) -> Wire | None:
    return None if a is None or b is None else (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def _difference(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before
