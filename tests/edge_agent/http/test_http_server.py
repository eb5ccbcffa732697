"""The HTTP server with clients of every kind: patient, hurried, silent, malicious, and too many."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from edge_agent.http.client_limits import ADDRESSES, Budget, Limits, RequestRates
from edge_agent.http.http_messages import Refused, Request, Response
from edge_agent.http.http_server import Connection, HttpServer
from fleet_core.base.errors import LinkError
from tests.support.waiting import PATIENCE_S

SMALL = Limits(
    connections=3, body_bytes=1000, bodies_bytes=1500, head_s=PATIENCE_S, body_s=PATIENCE_S, send_s=PATIENCE_S,
    idle_s=PATIENCE_S, stop_s=PATIENCE_S,
)
"""Small limits, and time enough for a client on a busy machine."""
GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"


class Echo:
    """Answers with the request; ``/wait`` when the test allows it, ``/bug`` never."""

    def __init__(self) -> None:
        self.inside, self.free = threading.Semaphore(0), threading.Event()

    def __call__(self, request: Request) -> Response:
        if request.head.path == "/bug":
            raise ZeroDivisionError("a bug")
        if request.head.path == "/wait":
            self.inside.release()
            assert self.free.wait(PATIENCE_S)
        return Response(200, f"{request.head.method} {request.head.path} ".encode() + bytes(request.body))


class Raw:
    """A client that sends any bytes and reads whole responses."""

    def __init__(self, server: HttpServer):
        self.socket = socket.create_connection((server.host, server.port), timeout=PATIENCE_S)
        self.file = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def response(self) -> tuple[int, dict[str, str], bytes]:
        """Raises EOFError when the server has closed the connection."""
        line = self.file.readline()
        if not line:
            raise EOFError
        headers = {}
        while (header := self.file.readline().strip()):
            name, _, value = header.decode().partition(": ")
            headers[name.lower()] = value
        return int(line.split()[1]), headers, self.file.read(int(headers.get("content-length", 0)))

    def ended(self) -> bool:
        try:
            return self.file.read(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.file.close()
        self.socket.close()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def server(echo: Echo, lines: list[str]) -> Iterator[HttpServer]:
    running = HttpServer(echo, limits=SMALL, log=lines.append).start()
    yield running
    echo.free.set()
    running.stop()


@pytest.fixture
def hurried(echo: Echo, lines: list[str]) -> Iterator[Raw]:
    """A client of a server that waits only briefly for a request."""
    running = HttpServer(echo, limits=replace(SMALL, head_s=0.2, body_s=0.2), log=lines.append).start()
    raw = Raw(running)
    yield raw
    raw.close()
    running.stop()


@pytest.fixture
def client(server: HttpServer) -> Iterator[Callable[[], Raw]]:
    clients: list[Raw] = []

    def make() -> Raw:
        clients.append(Raw(server))
        return clients[-1]

    yield make
    for each in clients:
        each.close()


# Well behaved ---------------------------------------------------------------------------------------------------------


def test_one_connection_carries_many_requests(server: HttpServer) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE_S)
    for number in range(3):
        connection.request("POST", "/a", body=b"b" * number)
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"POST /a " + b"b" * number)
        assert response.getheader("Date")
    connection.request("GET", "/a", headers={"Connection": "close"})
    response = connection.getresponse()
    assert (response.read(), response.will_close) == (b"GET /a ", True)


def test_requests_that_come_at_once_are_answered_in_their_order(client: Callable[[], Raw]) -> None:
    raw = client()
    raw.send(b"\r\n\r\n" + GET + b"POST /y HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc" + GET)
    assert [raw.response()[2] for _ in range(3)] == [b"GET /x ", b"POST /y abc", b"GET /x "]


def test_a_head_has_the_length_of_the_body_and_no_body(client: Callable[[], Raw]) -> None:
    raw = client()
    raw.send(b"HEAD /x HTTP/1.1\r\nHost: h\r\n\r\n")
    assert raw.file.readline() == b"HTTP/1.1 200 OK\r\n"
    headers = [raw.file.readline() for _ in range(2)]
    assert headers[1] == b"Content-Length: 8\r\n"
    assert raw.file.readline() == b"\r\n"
    raw.send(GET)
    assert raw.response()[2] == b"GET /x "


def test_a_client_that_expects_100_continue_receives_it(client: Callable[[], Raw]) -> None:
    raw = client()
    raw.send(b"POST /x HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert raw.file.readline() == b"HTTP/1.1 100 Continue\r\n"
    assert raw.file.readline() == b"\r\n"
    raw.send(b"ab")
    assert raw.response()[2] == b"POST /x ab"


def test_a_client_that_expects_100_continue_for_too_much_is_refused_before_it_sends(client: Callable[[], Raw]) -> None:
    raw = client()
    raw.send(b"POST /x HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 1001\r\n\r\n")
    assert raw.response()[0] == 413
    assert raw.ended()


def test_an_old_client_gets_its_answer_and_the_end(client: Callable[[], Raw]) -> None:
    raw = client()
    raw.send(b"GET /x HTTP/1.0\r\n\r\n")
    status, headers, body = raw.response()
    assert (status, headers["connection"], body) == (200, "close", b"GET /x ")
    assert raw.ended()


def test_a_bug_is_an_error_and_the_others_are_served(client: Callable[[], Raw], lines: list[str]) -> None:
    raw = client()
    raw.send(b"GET /bug HTTP/1.1\r\nHost: h\r\n\r\n" + GET)
    status, _, body = raw.response()
    assert (status, b"ZeroDivision" in body) == (500, False)
    assert lines == ["http: GET /bug: ZeroDivisionError: a bug"]
    assert raw.response()[0] == 200


# Not so ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sent", "status"), [
    (b"nonsense\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/3.0\r\nHost: h\r\n\r\n", 505),
    (b"GET / HTTP/1.1\r\nHost: h\r\nA: " + b"a" * 17_000, 431),
    (b"GET / HTTP/1.1\r\nHost: h\r\nA: " + b"a" * 17_000 + b"\r\n\r\n", 431),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nHost: h\r\n\r\n", 411),
    (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1001\r\n\r\n" + b"a" * 1001, 413),
    (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
])
def test_a_malformed_request_is_refused_and_the_connection_ends(
    client: Callable[[], Raw], sent: bytes, status: int
) -> None:
    raw = client()
    raw.send(sent)
    found, headers, body = raw.response()
    assert (found, headers["connection"]) == (status, "close")
    assert body.startswith(b'{"error": ')
    assert raw.ended()


@pytest.mark.parametrize("begun", [b"G", GET[:-1], b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nab"])
def test_an_incomplete_request_times_out(hurried: Raw, begun: bytes) -> None:
    hurried.send(begun)
    assert hurried.response()[0] == 408
    assert hurried.ended()


def test_a_request_that_arrives_byte_by_byte_times_out_too(hurried: Raw) -> None:
    """The limit is for the whole head: a byte now and then does not prolong it."""
    given_up = threading.Event()

    def trickle() -> None:
        while not given_up.wait(0.02):
            try:
                hurried.send(b"a")
            except OSError:
                return

    sender = threading.Thread(target=trickle)
    sender.start()
    assert hurried.response()[0] == 408
    given_up.set()
    sender.join()


def test_a_silent_connection_ends(echo: Echo) -> None:
    server = HttpServer(echo, limits=replace(SMALL, idle_s=0.05)).start()
    raw = Raw(server)
    assert raw.ended()
    raw.close()
    server.stop()


def test_a_connection_too_many_is_turned_away_and_room_is_made_again(client: Callable[[], Raw], echo: Echo) -> None:
    held = [client() for _ in range(SMALL.connections)]
    for raw in held:
        raw.send(b"GET /wait HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert echo.inside.acquire(timeout=PATIENCE_S)
    late = client()
    assert late.response()[0] == 503
    assert late.ended()
    echo.free.set()
    for raw in held:
        assert raw.response()[0] == 200
        assert raw.ended()
    again = client()
    again.send(GET)
    assert again.response()[0] == 200


def test_slow_and_silent_clients_lock_nobody_out(client: Callable[[], Raw], echo: Echo) -> None:
    busy = client()
    busy.send(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n")
    assert echo.inside.acquire(timeout=PATIENCE_S)
    slow = [client() for _ in range(5 * SMALL.connections)]
    for raw in slow[::2]:
        with contextlib.suppress(OSError):  # it has lost its place
            raw.send(b"GET /x HTT")
    patient = client()
    patient.send(GET)
    assert patient.response()[0] == 200
    assert slow[0].ended()
    echo.free.set()
    assert busy.response()[0] == 200


def test_bodies_together_are_bounded(client: Callable[[], Raw], echo: Echo) -> None:
    first, second = client(), client()
    post = b"POST /wait HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n" + b"a" * 1000
    first.send(post)
    assert echo.inside.acquire(timeout=PATIENCE_S)
    second.send(post)
    status, headers, _ = second.response()
    assert (status, headers["retry-after"]) == (503, "1")
    echo.free.set()
    assert first.response()[0] == 200
    first.send(post)
    assert first.response()[0] == 200  # what was taken is given back


@pytest.mark.parametrize("seed", range(8))
def test_any_bytes_are_answered_or_refused_and_the_others_are_served(
    client: Callable[[], Raw], lines: list[str], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    noise = [rng.bytes(int(rng.integers(1, 400))) for _ in range(3)]
    raw = client()
    raw.send(b"".join([GET[: 24 * (seed % 2)], *noise, b"\r\n\r\n", noise[0]]))
    raw.socket.shutdown(socket.SHUT_WR)
    said = raw.file.read()
    assert not said or said.startswith(b"HTTP/1.1 ")
    after = client()
    after.send(GET)
    assert after.response()[0] == 200
    assert lines == []


def test_a_client_that_disconnects_during_its_request_does_no_harm(
    client: Callable[[], Raw], lines: list[str]
) -> None:
    for begun in (b"GET", b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 500\r\n\r\nab"):
        client().send(begun)
    raw = client()
    raw.send(GET)
    assert raw.response()[0] == 200
    assert lines == []


# The end --------------------------------------------------------------------------------------------------------------


def test_a_server_that_stops_finishes_requests_in_progress_and_accepts_no_more(echo: Echo) -> None:
    server = HttpServer(echo, limits=SMALL).start()
    busy, idle = Raw(server), Raw(server)
    idle.send(GET)
    assert idle.response()[0] == 200
    busy.send(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n")
    assert echo.inside.acquire(timeout=PATIENCE_S)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    assert idle.ended()
    assert stopping.is_alive()
    echo.free.set()
    status, headers, body = busy.response()
    assert (status, headers["connection"], body) == (200, "close", b"GET /wait ")
    stopping.join(PATIENCE_S)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((server.host, server.port), timeout=PATIENCE_S)
    busy.close()
    idle.close()


def test_a_connection_whose_response_ends_while_the_server_stops_waits_for_no_further_request(echo: Echo) -> None:
    stopping = threading.Event()
    stopping.set()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        peer, _ = listener.accept()
        limits, rates = replace(SMALL, idle_s=PATIENCE_S), RequestRates(1.0)
        connection = Connection(peer, echo, limits, Budget(1), rates, print, stopping)
        serving = threading.Thread(target=connection.serve, daemon=True)
        serving.start()
        serving.join(PATIENCE_S / 10)
        assert not serving.is_alive()
        connection.close()
        assert client.recv(1) == b""


def test_a_server_that_stops_does_not_wait_forever(echo: Echo) -> None:
    server = HttpServer(echo, limits=replace(SMALL, stop_s=0.05)).start()
    busy = Raw(server)
    busy.send(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n")
    assert echo.inside.acquire(timeout=PATIENCE_S)
    server.stop()
    assert busy.ended()
    echo.free.set()
    busy.close()


def test_a_port_that_is_in_use_is_an_error(server: HttpServer, echo: Echo) -> None:
    with pytest.raises(LinkError, match="cannot listen"):
        HttpServer(echo, port=server.port)
    with pytest.raises(LinkError, match="cannot listen"):
        HttpServer(echo, "no.such.host.invalid")


def test_it_listens_on_loopback_only_by_default(server: HttpServer) -> None:
    assert server.host == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.port}"


def test_a_client_that_asks_too_often_is_told_to_wait_and_the_others_are_not() -> None:
    now = [0.0]
    rates = RequestRates(2.0, clock=lambda: now[0])
    for _ in range(10):
        rates.take("a")
    with pytest.raises(Refused, match="more than 2 requests a second") as refused:
        rates.take("a")
    assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "1")
    rates.take("b")
    now[0] = 0.5
    rates.take("a")
    with pytest.raises(Refused):
        rates.take("a")
    now[0] = 100.0
    for _ in range(10):
        rates.take("a")
    with pytest.raises(Refused):
        rates.take("a")


def test_the_clients_that_were_silent_for_longest_are_forgotten() -> None:
    rates = RequestRates(0.1, clock=lambda: 0.0)
    for number in range(ADDRESSES + 1):
        rates.take(str(number))
    rates.take("0")
    with pytest.raises(Refused):
        rates.take(str(ADDRESSES))


def test_a_request_too_many_is_answered_with_its_status(echo: Echo, lines: list[str]) -> None:
    server = HttpServer(echo, limits=Limits(requests_per_s=0.2), log=lines.append).start()
    try:
        with contextlib.closing(http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE_S)) as client:
            said = []
            for _ in range(2):
                client.request("GET", "/x")
                answer = client.getresponse()
                said.append((answer.status, answer.read()))
        assert said[0][0] == 200
        assert said[1][0] == 429
        assert b"requests a second" in said[1][1]
    finally:
        server.stop()
