"""Notifies systemd that the agent is ready and, from time to time, that it is alive (``sd_notify(3)``).

systemd names its socket in NOTIFY_SOCKET, and the time that the agent may be silent in WATCHDOG_USEC; without them
nothing is sent. Both are removed from the environment, so that the trainer cannot notify in place of the agent.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, MutableMapping


class Watchdog:
    """environ: holds systemd's variables, which are removed. clock: in seconds."""

    def __init__(
        self, environ: MutableMapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")
        timeout_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", str(os.getpid()))
        enabled = timeout_us.isdigit() and pid == str(os.getpid())
        self._interval_s = int(timeout_us) / 4e6 if enabled else None  # a quarter of the timeout
        self._clock = clock
        self._last_s = -float("inf")

    def ready(self) -> None:
        self._notify("READY=1")

    def alive(self) -> None:
        """Called at every turn of the agent's loop; notifies four times per timeout."""
        now = self._clock()
        if self._interval_s is not None and now - self._last_s >= self._interval_s:
            self._last_s = now
            self._notify("WATCHDOG=1")

    def watching(self, stopped: Callable[[], bool]) -> Callable[[], bool]:
        """``stopped``, which the agent's loops call at every turn, with ``alive``."""
        def alive_and_stopped() -> bool:
            self.alive()
            return stopped()

        return alive_and_stopped

    def _notify(self, state: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            try:
                channel.sendto(state.encode(), address)
            except OSError:
                return  # the agent also works without its supervisor
