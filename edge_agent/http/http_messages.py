"""Parses requests and writes responses of HTTP/1.1 (RFC 9110, RFC 9112); no sockets here.

Deviations: a body needs a Content-Length, chunked bodies are refused; lines must end in CRLF.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 64

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rf"({_TOKEN}) ([!-~]+) HTTP/([0-9])\.([0-9])")
_HEADER = re.compile(rf"({_TOKEN}):([^\x00-\x08\x0a-\x1f\x7f]*)")
_AUTHORITY = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
_ONCE = ("host", "content-length", "transfer-encoding", "content-encoding", "inference-header-content-length")


class Refused(Exception):
    """A request that is answered with an HTTP error: its status, and why."""

    def __init__(self, status: int, why: str, headers: Mapping[str, str] | None = None):
        super().__init__(why)
        self.status, self.headers = status, dict(headers or {})


@dataclass(frozen=True)
class Head:
    """The request line and the headers. headers: by lower-case name. path: without the query."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    keep_alive: bool = True


@dataclass(frozen=True)
class Request:
    head: Head
    body: bytes | bytearray = b""


@dataclass(frozen=True)
class Response:
    """headers: in addition to those that every response has."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, *, close: bool, without_body: bool = False) -> bytes:
        """The bytes to send. without_body: for a HEAD request."""
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            time.strftime("Date: %a, %d %b %Y %H:%M:%S GMT", time.gmtime()),
            f"Content-Length: {len(self.body)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
            *(["Connection: close"] if close else []),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (b"" if without_body else self.body)


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    body = json.dumps(value, allow_nan=False).encode()
    return Response(status, body, {"Content-Type": "application/json", **(headers or {})})


def as_error(refused: Refused) -> Response:
    """The error object of the Open Inference Protocol."""
    return as_json({"error": str(refused)[:2000]}, refused.status, refused.headers)


def parse_head(data: bytes) -> Head:
    """data: everything before the empty line. Raises Refused."""
    first, *lines = data.decode("latin-1").split("\r\n")
    match = _REQUEST_LINE.fullmatch(first)
    if match is None:
        raise Refused(400, "the request line is malformed")
    method, target, major, minor = match.groups()
    if major != "1":
        raise Refused(505, f"HTTP/{major}.{minor} is not supported, expected HTTP/1.1")
    headers = _headers(lines)
    if minor != "0" and "host" not in headers:
        raise Refused(400, "the header 'Host' is missing")
    closes = minor == "0" or "close" in map(str.strip, headers.get("connection", "").lower().split(","))
    path = _AUTHORITY.sub("", target, count=1).partition("?")[0]
    return Head(method, path or "/", headers, keep_alive=not closes)


def _headers(lines: list[str]) -> dict[str, str]:
    if len(lines) > MAX_HEADERS:
        raise Refused(431, f"{len(lines)} headers are over the limit of {MAX_HEADERS}")
    headers: dict[str, str] = {}
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise Refused(400, "a header is malformed")
        name, value = match[1].lower(), match[2].strip(" \t")
        if name in headers and name in _ONCE:
            raise Refused(400, f"the header '{name}' comes twice")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def body_length(head: Head, limit: int) -> int:
    """The length of a request's body in bytes. Raises Refused for a body that will not be read."""
    headers = head.headers
    if "transfer-encoding" in headers:
        both = "content-length" in headers
        raise Refused(400 if both else 411, "a body needs a Content-Length, and no Transfer-Encoding")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Refused(415, "compressed bodies are not supported", {"Accept-Encoding": "identity"})
    if headers.get("expect", "100-continue").lower() != "100-continue":
        raise Refused(417, f"the expectation {headers['expect'][:80]} is not supported, only 100-continue")
    if "content-length" not in headers:
        if head.method in ("POST", "PUT", "PATCH"):
            raise Refused(411, "the header 'Content-Length' is missing")
        return 0
    if not re.fullmatch("[0-9]{1,18}", headers["content-length"]):
        raise Refused(400, "the header 'Content-Length' is not a number")
    length = int(headers["content-length"])
    if length > limit:
        raise Refused(413, f"{length} bytes are over the limit of {limit}")
    return length
