"""paho's MQTT client over TCP or WebSockets, with byte counts, a limit on what arrives, and readable network errors."""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from fleet_core.link.byte_counters import ByteCounters

READ_BYTES = 65_536  # read from the socket at once; paho asks for single bytes
DATE_ERRORS = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
ALERTS = {
    "ALERT_CERTIFICATE_REVOKED": "it is revoked",
    "ALERT_CERTIFICATE_EXPIRED": "it has expired",
    "ALERT_UNKNOWN_CA": "another authority signed it",
    "ALERT_CERTIFICATE_REQUIRED": "there is none",
}
"""OpenSSL's names of a broker's TLS alerts, without their prefixes, which differ between versions."""


class CountingClient(paho.Client):
    """Counts bytes, refuses packets over a limit, and records whether the socket is drained and why it failed.

    ``_sock_recv``, ``_sock_send`` and ``_sock_close`` are private methods of paho-mqtt < 3, ``_socket`` and
    ``_readbuffer`` private to its WebSocket; tests check that they exist.
    """

    def __init__(self, counters: ByteCounters, max_incoming_bytes: int, **options: Any):
        super().__init__(CallbackAPIVersion.VERSION2, reconnect_on_failure=False, **options)
        self.counters = counters
        self.max_incoming_bytes = max_incoming_bytes
        self.drained = False
        self.hung_up = False
        self.failure: str | None = None
        self._buffer = memoryview(b"")

    def _sock_recv(self, bufsize: int) -> bytes:
        if bufsize > self.max_incoming_bytes:
            self.failure = f"a packet of {bufsize} bytes is over the limit of {self.max_incoming_bytes}"
            raise ConnectionError(self.failure)
        self.drained = False
        if not self._buffer:
            self._buffer = memoryview(self._receive())
        data, self._buffer = bytes(self._buffer[:bufsize]), self._buffer[bufsize:]
        return data

    def _receive(self) -> bytes:
        try:
            data = super()._sock_recv(READ_BYTES)
        except BlockingIOError:
            self._check_frame()
            self.drained = not self._decrypted()
            raise
        except OSError as error:
            self.failure, self.hung_up = describe(error), isinstance(error, ConnectionResetError)
            raise
        if not data:
            self.failure, self.hung_up = "the broker closed the connection", True
        self.counters.mqtt_received += len(data)
        return data

    def _check_frame(self) -> None:
        """paho keeps a WebSocket frame until it is whole. Raises ConnectionError for one over the limit."""
        held = len(getattr(self.socket(), "_readbuffer", b""))
        if held > self.max_incoming_bytes + READ_BYTES:
            self.failure = f"a WebSocket frame of over {held} bytes is over the limit of {self.max_incoming_bytes}"
            raise ConnectionError(self.failure)

    def _decrypted(self) -> bool:
        """Whether a WebSocket over TLS holds bytes that no longer make the socket readable."""
        sock: Any = self.socket()
        return hasattr(sock, "_readbuffer") and bool(sock.pending())

    def tcp_socket(self) -> socket.socket | None:
        """The connection's socket, under WebSockets too; None without a connection."""
        return tcp_socket_of(self.socket())

    def _sock_send(self, buf: bytes | bytearray) -> int:
        try:
            sent = super()._sock_send(buf)
        except BlockingIOError:
            raise
        except OSError as error:
            self.hung_up = isinstance(error, (BrokenPipeError, ConnectionResetError))
            self.failure = describe(self._pending_alert() or error)
            raise
        self.counters.mqtt_sent += sent
        return sent

    def _pending_alert(self) -> OSError | None:
        """A broker that refuses a certificate sends a TLS alert and hangs up. When a write fails because of that, the
        alert may still be unread."""
        try:
            super()._sock_recv(1)
        except BlockingIOError:
            return None
        except OSError as error:
            return error if isinstance(error, ssl.SSLError) and _alert(error) else None
        return None

    def drop(self) -> None:
        """Closes the socket as a crash would: without DISCONNECT."""
        self._sock_close()


def tcp_socket_of(sock: Any) -> socket.socket | None:
    """The TCP socket under the one that paho gives to its callbacks, which may be a WebSocket."""
    found = getattr(sock, "_socket", sock)
    return found if isinstance(found, socket.socket) else None


def describe(error: BaseException) -> str:
    """A network error in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        about_date = error.verify_code in DATE_ERRORS
        clock = time.strftime("; this machine's clock says %Y-%m-%d", time.gmtime()) if about_date else ""
        return f"the broker's certificate is not trusted: {error.verify_message}{clock}"
    alert = _alert(error) if isinstance(error, ssl.SSLError) else ""
    if alert:
        return f"the broker does not accept this certificate: {alert}"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _alert(error: ssl.SSLError) -> str:
    """The broker's alert about the certificate in words; empty for any other error."""
    reason = error.reason or ""
    return next((text for word, text in ALERTS.items() if reason.endswith(word)), "")
