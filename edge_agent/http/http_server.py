"""An HTTP/1.1 server for one device: a thread per connection, and a limit on everything that a client can use.

There are limits on the connections and on each client's requests; on the size of a head, of a body, and of all bodies
together; on the time in which a head or a body must arrive, on the time without a request, and on the time to receive a
response. When all connections are taken, a new client replaces one of the address that has most of them: the one that
has been silent or slow for longest. With ``tls`` it speaks HTTPS.

``stop`` finishes the requests in progress and closes idle connections at once.
"""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable

from edge_agent.http.client_limits import Budget, Limits, RequestRates
from edge_agent.http.http_messages import (
    CONTINUE,
    MAX_HEAD_BYTES,
    Head,
    Refused,
    Request,
    Response,
    as_error,
    body_length,
    parse_head,
)
from fleet_core.base.errors import LinkError

RECEIVE_BYTES = 1 << 16
BACKLOG = 64
ACCEPT_S = 1.0
LINGER_S, LINGER_BYTES = 1.0, 1 << 20


class Ended(Exception):
    """The connection has ended: the client closed it or was silent for too long, or the server stops."""


class HttpServer:
    """answer: turns requests into responses, in several threads at the same time; an exception gives a 500 and a line
    in ``log``. host, port: where to listen; 0 for any free port, which ``port`` then holds. Raises LinkError if it
    cannot listen there. tls: for HTTPS."""

    def __init__(
        self, answer: Callable[[Request], Response], host: str = "127.0.0.1", port: int = 0, *,
        limits: Limits | None = None, tls: ssl.SSLContext | None = None, log: Callable[[str], None] = lambda line: None,
    ):
        self._answer, self._log, self._tls, self.limits = answer, log, tls, limits or Limits()
        self._listener = _listener(host, port)
        self._listener.settimeout(ACCEPT_S)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._bodies, self._rates = Budget(self.limits.bodies_bytes), RequestRates(self.limits.requests_per_s)
        self._changed = threading.Condition()
        self._connections: set[Connection] = set()
        self._stopping = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="http", daemon=True)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self._tls else ''}://{host}:{self.port}"

    def start(self) -> HttpServer:
        self._accepting.start()
        return self

    def stop(self) -> None:
        """Accepts no more requests, and waits up to ``stop_s`` for those in progress."""
        with self._changed:
            self._stopping.set()
            for connection in self._connections:
                connection.end_if_idle()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # on Linux this ends the waiting accept at once
        if self._accepting.ident is not None:
            self._accepting.join()
        self._listener.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, self.limits.stop_s)
            for connection in self._connections:
                connection.end()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._stopping.is_set():
                    return
                self._log(f"http: {error.strerror or error}")  # such as too many open files, which passes
                time.sleep(0.1)
                continue
            self._take(peer)

    def _take(self, peer: socket.socket) -> None:
        connection = Connection(
            peer, self._answer, self.limits, self._bodies, self._rates, self._log, self._stopping, self._tls
        )
        with self._changed:
            if len(self._connections) >= self.limits.connections:
                self._end_slowest()
            if len(self._connections) >= self.limits.connections or self._stopping.is_set():
                return connection.turn_away()
            self._connections.add(connection)
        try:
            threading.Thread(target=self._serve, args=(connection,), name="http connection", daemon=True).start()
        except RuntimeError as error:  # the system gives no more threads
            self._log(f"http: {error}")
            self._leave(connection)

    def _end_slowest(self) -> None:
        """Ends one connection of the address that has most of them: the one whose client has kept this device waiting
        for longest; none while all are being answered."""
        waiting = [one for one in self._connections if one.waits_since < math.inf]
        if waiting:
            of = Counter(one.address for one in waiting)
            slowest = min(waiting, key=lambda one: (-of[one.address], one.waits_since))
            self._connections.discard(slowest)
            slowest.end()

    def _serve(self, connection: Connection) -> None:
        try:
            connection.serve()
        finally:
            self._leave(connection)

    def _leave(self, connection: Connection) -> None:
        with self._changed:
            self._connections.discard(connection)
            self._changed.notify_all()
        connection.close()


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LinkError(f"cannot listen: {reason}", where=f"{host}:{port}", hint="another host or port") from error


def _address(peer: socket.socket) -> str:
    """The client's address; empty if it is gone already."""
    try:
        return str(peer.getpeername()[0])
    except (OSError, IndexError):
        return ""


class Connection:
    """One client's requests, one after the other."""

    def __init__(
        self, peer: socket.socket, answer: Callable[[Request], Response], limits: Limits, bodies: Budget,
        rates: RequestRates, log: Callable[[str], None], stopping: threading.Event, tls: ssl.SSLContext | None = None,
    ):
        self.address = _address(peer)
        self._tls = tls
        self._peer, self._answer, self._limits, self._bodies = peer, answer, limits, bodies
        self._rates, self._log, self._stopping = rates, log, stopping
        self._buffer = bytearray()
        self.waits_since = time.monotonic()
        """Since when the client has been taking an answer or sending a request; infinite while an answer is made."""
        self._busy = threading.Lock()  # held from a request's first byte to the end of its answer
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def serve(self) -> None:
        """Answers requests until either side closes the connection."""
        with contextlib.suppress(Ended, OSError):
            if self._tls is not None:
                self._peer = peer = self._tls.wrap_socket(self._peer, True, do_handshake_on_connect=False)
                peer.settimeout(self._limits.head_s)
                peer.do_handshake()
            more = True
            while more:
                if self._stopping.is_set():  # ``end_if_idle`` came while the last response was being sent
                    self._stop_receiving()
                self._await_request()
                with self._busy:
                    more = self._answer_one()

    def turn_away(self) -> None:
        """Sends a 503 without waiting, or with TLS nothing, and closes."""
        busy = as_error(Refused(503, "too many connections", {"Retry-After": "1"}))
        with contextlib.suppress(OSError):
            self._peer.settimeout(0)
            self._peer.send(b"" if self._tls else busy.encode(close=True))
        self.close()

    def end_if_idle(self) -> None:
        """Called from another thread: ends the wait for the next request. A request that has begun is still read."""
        if self._busy.acquire(blocking=False):
            self._stop_receiving()
            self._busy.release()

    def _stop_receiving(self) -> None:
        """Ends receiving; bytes that have arrived can still be read."""
        self._shutdown(socket.SHUT_RD)

    def end(self) -> None:
        """Called from another thread: ends the connection, whatever it waits for."""
        self._shutdown(socket.SHUT_RDWR)

    def _shutdown(self, how: int) -> None:
        """Shuts down the socket below TLS: TLS's own ``shutdown`` would let the connection go on in plain text."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._peer, how)

    def close(self) -> None:
        self._peer.close()

    # One request ------------------------------------------------------------------------------------------------------

    def _await_request(self) -> None:
        """Waits for the first byte; empty lines before a request are skipped (RFC 9112, 2.2)."""
        until = time.monotonic() + self._limits.idle_s
        while True:
            while self._buffer.startswith((b"\r", b"\n")):
                del self._buffer[:1]
            if self._buffer:
                return
            self._receive(until)

    def _answer_one(self) -> bool:
        """Reads a request and sends the response; False if the connection then ends."""
        try:
            head = self._read_head()
            self._rates.take(self.address)
            length = body_length(head, self._limits.body_bytes)
            self._bodies.take(length)
        except Refused as refused:
            return self._refuse(refused)
        try:
            body = self._read_body(head, length)
            self.waits_since = math.inf
            response = self._response(Request(head, body))
        except Refused as refused:
            return self._refuse(refused)
        finally:
            self._bodies.give(length)
        close = not head.keep_alive or self._stopping.is_set()
        self.waits_since = time.monotonic()
        self._send(response.encode(close=close, without_body=head.method == "HEAD"))
        return not close

    def _read_head(self) -> Head:
        """Raises Refused, and Ended if the connection ends."""
        until, searched = time.monotonic() + self._limits.head_s, 0
        while (end := self._buffer.find(b"\r\n\r\n", max(0, searched - 3))) < 0:
            searched = len(self._buffer)
            if searched > MAX_HEAD_BYTES:
                raise Refused(431, f"the headers are over the limit of {MAX_HEAD_BYTES} bytes")
            self._receive(until, "the headers")
        if end > MAX_HEAD_BYTES:
            raise Refused(431, f"the headers are over the limit of {MAX_HEAD_BYTES} bytes")
        data = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        return parse_head(data)

    def _read_body(self, head: Head, length: int) -> bytearray:
        """Raises Refused, and Ended if the connection ends."""
        until = time.monotonic() + self._limits.body_s
        if "expect" in head.headers and len(self._buffer) < length:
            self._send(CONTINUE)
        while len(self._buffer) < length:
            self._receive(until, "the body")
        body, self._buffer = self._buffer, self._buffer[length:]
        del body[length:]
        return body

    def _receive(self, until: float, what: str = "") -> None:
        """Appends more bytes to the buffer before the time ``until``. Raises Ended; after the time Refused if ``what``
        is being received."""
        left = until - time.monotonic()
        try:
            self._peer.settimeout(max(left, 0.001))
            data = self._peer.recv(RECEIVE_BYTES) if left > 0 else None
        except TimeoutError:
            data = None
        if data:
            self._buffer += data
        elif data is None and what:
            raise Refused(408, f"{what} did not arrive in time")
        else:
            raise Ended

    def _response(self, request: Request) -> Response:
        try:
            return self._answer(request)
        except Exception as error:  # an error in one request must not end the server
            self._log(f"http: {request.head.method} {request.head.path[:200]}: {type(error).__name__}: {error}")
            return as_error(Refused(500, "internal error; the log of the device has more"))

    def _refuse(self, refused: Refused) -> bool:
        """Sends the error and ends the connection, whose further bytes have no known meaning. Reads on for a while:
        closing at once would discard the error for a client that is still sending."""
        self._send(as_error(refused).encode(close=True))
        self._shutdown(socket.SHUT_WR)
        until, left = time.monotonic() + LINGER_S, LINGER_BYTES
        while left > 0:
            self._buffer.clear()
            self._receive(until)
            left -= len(self._buffer)
        return False

    def _send(self, data: bytes) -> None:
        self._peer.settimeout(self._limits.send_s)  # for all of it
        self._peer.sendall(data)
