"""Sends alerts: to a command, a webhook, or an MQTT topic.

A message is a JSON object: fleet, kind, state (alert | over), since, at (Unix seconds), text and devices (at most 20).
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cloud_server.integrations.alerts import LOOK_S, Alerts
from cloud_server.ledger.ledger import Ledger
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.fleet_settings import AlertsSection
from fleet_core import __version__
from fleet_core.base import processes
from fleet_core.base.errors import StateError

COMMAND_S, WEBHOOK_S = 30.0, 10.0
TRIES, BETWEEN_S = 3, 5.0
MOST_WAITING = 64

Message = Mapping[str, Any]


def post(url: str, message: Message) -> str:
    """Posts the message as JSON; returns why that failed, or an empty text."""
    headers = {"Content-Type": "application/json", "User-Agent": f"metafleet/{__version__}"}
    request = urllib.request.Request(url, json.dumps(message).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=WEBHOOK_S):
            return ""
    except (OSError, ValueError) as error:
        return f"webhook: {error}"  # without its address, which may hold a secret


def channels(section: AlertsSection) -> list[Callable[[Message], str]]:
    """The command and the webhook, if they are set; each returns why it failed, or an empty text."""
    found: list[Callable[[Message], str]] = []
    if section.command:
        found.append(lambda message: processes.told(section.command, message, COMMAND_S))
    return [*found, *([partial(post, section.webhook)] if section.webhook else [])]


class Sender:
    """Sends in a thread of its own, so that nothing waits for a command or a web server.

    A message that fails is tried twice more, then ``log`` says why. ``close`` waits a little for those under way.
    """

    def __init__(self, section: AlertsSection, log: Callable[[str], None], *, between_s: float = BETWEEN_S):
        self._channels, self._log, self._between_s = channels(section), log, between_s
        self._waiting: queue.Queue[Message | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __call__(self, message: Message) -> None:
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            self._log(f"an alert was not sent, {MOST_WAITING} are waiting: {message['text']}")

    def close(self, timeout_s: float = 2.0) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (message := self._waiting.get()) is not None:
            for channel in self._channels:
                self._send(channel, message)

    def _send(self, channel: Callable[[Message], str], message: Message) -> None:
        for left in reversed(range(TRIES)):
            why = channel(message)
            if not why:
                return
            if left:
                time.sleep(self._between_s)
        self._log(f"an alert was not sent: {why}")


def watch(
    fleet: Fleet, section: AlertsSection, stopped: Callable[[], bool], log: Callable[[str], None], *,
    beside: bool = False, told: Callable[[Message], None] = lambda message: None, look_s: float = LOOK_S,
) -> None:
    """Sends alerts until ``stopped``. beside: it runs in an aggregator; otherwise it sends only while no aggregator
    runs. told: called with every message. look_s: seconds between two checks."""
    found, send, looked_at = Alerts(fleet, section), Sender(section, log), -math.inf
    try:
        while not stopped():
            if time.monotonic() - looked_at >= look_s and (beside or not fleet.running()):
                looked_at = time.monotonic()
                with contextlib.suppress(StateError, OSError), Ledger(fleet.ledger_path, create=False) as ledger:
                    for message in found.look(ledger, time.time()):
                        log(f"alert: {message['text']}")
                        told(message)
                        send(message)
            time.sleep(min(0.2, look_s))
    finally:
        send.close()
