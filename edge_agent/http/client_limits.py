"""What clients may use of a device's HTTP server: the limits, the bytes of all bodies together, each client's requests.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from edge_agent.http.http_messages import Refused

BURST_S = 5.0
"""A client that was silent may send this many seconds' requests at once."""
ADDRESSES = 1000


@dataclass(frozen=True)
class Limits:
    """connections: at the same time. body_bytes: of one request. bodies_bytes: of all requests in progress. head_s,
    body_s, send_s: for the whole head, body and response. idle_s: between requests. stop_s: for the requests in
    progress when the server stops. requests_per_s: of one client's address, on average."""

    connections: int = 64
    body_bytes: int = 16 << 20
    bodies_bytes: int = 32 << 20
    head_s: float = 10.0
    body_s: float = 30.0
    send_s: float = 30.0
    idle_s: float = 60.0
    stop_s: float = 10.0
    requests_per_s: float = math.inf


class Budget:
    """The bytes that the bodies of all connections may have together."""

    def __init__(self, size: int):
        self._left, self._lock = size, threading.Lock()

    def take(self, size: int) -> None:
        """Reserves ``size`` bytes. Raises Refused if fewer are left."""
        with self._lock:
            if size > self._left:
                raise Refused(503, "too many bytes are being received at the moment", {"Retry-After": "1"})
            self._left -= size

    def give(self, size: int) -> None:
        with self._lock:
            self._left += size


class RequestRates:
    """Counts each client's requests by a token bucket, which holds the requests of ``BURST_S``, and at least one.
    Beyond ``ADDRESSES`` clients it forgets those that have been silent for longest."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic):
        self._per_s, self._most = per_s, max(1.0, per_s * BURST_S)
        self._clock, self._lock = clock, threading.Lock()
        self._left: dict[str, tuple[float, float]] = {}  # address -> requests left, and when

    def take(self, address: str) -> None:
        """Counts a request. Raises Refused if it is one too many."""
        if self._per_s == math.inf:
            return
        with self._lock:
            now = self._clock()
            left, at = self._left.pop(address, (self._most, now))
            left = min(self._most, left + (now - at) * self._per_s)
            enough = left >= 1
            self._left[address] = left - enough, now
            while len(self._left) > ADDRESSES:
                del self._left[next(iter(self._left))]
        if not enough:
            wait_s = math.ceil((1 - left) / self._per_s)
            raise Refused(429, f"more than {self._per_s:g} requests a second", {"Retry-After": str(wait_s)})
