"""Tells systemd that the agent is ready, and from time to time that it lives (``sd_notify(3)``).

Where nothing asks for it nothing is sent: systemd names its socket in NOTIFY_SOCKET, and how long the agent may be
silent in WATCHDOG_USEC. Both are taken out of the environment, so that the trainer does not speak for the agent.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, MutableMapping


class Watchdog:
    """``environ``: where systemd's two variables are looked for. ``clock``: in seconds."""

    def __init__(
        self, environ: MutableMapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")
        asked, of = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", str(os.getpid()))
        self._every_s = int(asked) / 4e6 if asked.isdigit() and of == str(os.getpid()) else None
        self._clock = clock
        self._last_s = -float("inf")

    def ready(self) -> None:
        """The agent works."""
        self._tell("READY=1")

    def alive(self) -> None:
        """To be called as often as the agent's loop turns; tells it four times as often as systemd asks for."""
        now = self._clock()
        if self._every_s is not None and now - self._last_s >= self._every_s:
            self._last_s = now
            self._tell("WATCHDOG=1")

    def watching(self, stopped: Callable[[], bool]) -> Callable[[], bool]:
        """``stopped``, which the agent's loops ask at every turn, and with it the sign of life."""
        def asked() -> bool:
            self.alive()
            return stopped()

        return asked

    def _tell(self, state: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            try:
                channel.sendto(state.encode(), address)
            except OSError:
                return  # a supervisor that went away is no reason to stop
