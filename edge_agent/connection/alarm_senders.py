"""Tells the user's programs when a sample is an alarm: ``[alarm]`` in device.toml. docs/anomaly.md

A message is a JSON object: fleet, device, time (Unix seconds), sample (the id of a stored sample, or null), score,
threshold, alarms (those since the last message, this one included) and round. A command gets it on its standard input,
an MQTT topic as a message that is not retained. Nothing waits for either: each has a thread, one message at a time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fleet_core.base import processes
from fleet_core.base.errors import ConfigError, FleetError
from fleet_core.board.device_settings import Settings
from fleet_core.link.interface import Connected, Denied, Disconnected, Link, check_topic
from fleet_core.protocol.device_messages import Answer

SEND_S = 30.0
POLL_S = 0.05  # an acknowledgement is no event
DENIED = "let this device write the topic, or name another: docs/anomaly.md#a-command-or-a-topic-on-an-alarm"

Message = Mapping[str, Any]


class Answering(Protocol):
    """What answers: gives each answer, and the sample's id or an empty text, to ``on_answer``."""

    on_answer: Callable[[Answer, str], None] | None


class AlarmSender:
    """Several threads may call it. send(message): returns why that failed, or an empty text. what: what is sent, for
    the log, which gets why it failed: once, until it succeeds or fails otherwise."""

    def __init__(
        self, settings: Settings, send: Callable[[Message], str], log: Callable[[str], None], *,
        what: str = "the command for alarms", clock: Callable[[], float] = time.time,
    ):
        self._alarm, self._send, self._log, self._what, self._clock = settings.alarm, send, log, what, clock
        self._of = {"fleet": settings.device.fleet, "device": settings.device.name}
        self._lock, self._thread = threading.Lock(), threading.Thread()
        self._alarms, self._sent_at, self._failed = 0, float("-inf"), ""

    def __call__(self, answer: Answer, sample: str = "") -> None:
        """Sends a message, with the highest score of the answer, if one of its samples is an alarm and the last message
        is sent and long enough ago. sample: its id, if it is stored."""
        if not any(answer.alarms):
            return
        with self._lock:
            self._alarms, now = self._alarms + sum(answer.alarms), self._clock()
            if self._thread.is_alive() or 0 <= now - self._sent_at < self._alarm.every_s:
                return
            message = {**self._of, "time": now, "sample": sample or None, "score": max(row[0] for row in answer.values),
                       "threshold": answer.threshold, "alarms": self._alarms, "round": answer.round}
            self._alarms, self._sent_at = 0, now
            self._thread = threading.Thread(target=self._run, args=(message,), name="alarm", daemon=True)
            self._thread.start()

    def join(self, timeout_s: float = 2.0) -> None:
        """Waits a little for a message under way."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self, message: Message) -> None:
        why = self._send(message)
        if why and why != self._failed:
            self._log(f"{self._what} failed: {why}")
        self._failed = why


def publish(open_link: Callable[[], Link], topic: str, message: Message, timeout_s: float = SEND_S) -> str:
    """Publishes over a connection of its own, which ends afterwards. Returns why that failed, or an empty text."""
    try:
        link = open_link()
    except FleetError as error:
        return str(error)
    why, sent, until_s = "the broker does not answer", False, time.monotonic() + timeout_s
    link.open()
    try:
        while (left_s := until_s - time.monotonic()) > 0:
            for event in link.poll(min(left_s, POLL_S)):
                if isinstance(event, Connected):
                    link.publish(topic, json.dumps(message).encode())
                    sent = True
                elif isinstance(event, Disconnected):
                    why, sent = event.reason, False
                elif isinstance(event, Denied):
                    return _denied(event.topic, event.reason)
            if sent and link.connected and not link.unacknowledged:
                return ""
    except FleetError as error:
        return str(error)
    finally:
        link.close()
    return why


def _denied(topic: str, reason: str) -> str:
    return f"the broker refuses {topic}: {reason} ({DENIED})"


class OverAgentsLink:
    """Publishes over the agent's own connection: a broker that takes the client id from the certificate would end it
    for a second one. ``send`` may be called in another thread; the agent calls the rest in its own."""

    def __init__(self, topic: str, timeout_s: float = SEND_S):
        self._topic, self._timeout_s = topic, timeout_s
        self._waiting, self._published = b"", False
        self._outcome, self._done = "", threading.Event()

    def send(self, message: Message) -> str:
        """Blocks until the broker has the message, or for ``timeout_s``; one at a time. Returns why it failed, or an
        empty text: also when the message is on its way behind others, such as the chunks of an update."""
        self._outcome, self._published = "", False
        self._done.clear()
        self._waiting = json.dumps(message).encode()
        if not self._done.wait(self._timeout_s) and not self._published:
            self._outcome = "the broker does not answer"
        self._waiting = b""
        return self._outcome

    def tick(self, link: Link) -> None:
        """Publishes the message that waits; a connection that broke before the broker had it gets it again."""
        waiting = self._waiting
        if not waiting or not link.connected:
            self._published = False
        elif not self._published:
            try:
                link.publish(self._topic, waiting)
                self._published = True
            except FleetError as error:
                self._end(str(error))
        elif not link.unacknowledged:
            self._end("")

    def denied(self, topic: str, reason: str) -> bool:
        """Whether the broker refused this message."""
        if topic != self._topic:
            return False
        self._end(_denied(topic, reason))
        return True

    def close(self) -> None:
        """A message that was handed to the link goes out when that is closed."""
        self._end("" if self._published else "the agent stops")

    def _end(self, outcome: str) -> None:
        self._outcome, self._waiting = outcome, b""
        self._done.set()


def over_agents_link(settings: Settings) -> OverAgentsLink | None:
    """None unless alarms are published at the fleet's broker with the agent's own login."""
    alarm = settings.alarm
    return OverAgentsLink(alarm.topic) if alarm.topic and not (alarm.broker or alarm.username) else None


@contextmanager
def hearing_alarms(
    home: Path, settings: Settings, service: Answering, log: Callable[[str], None],
    over: OverAgentsLink | None = None,
) -> Iterator[None]:
    """While the context lasts, the command and the topic hear of alarms in what ``service`` answers, if device.toml
    names them. over: the agent's own connection; without it messages get one of their own. Raises ConfigError,
    LinkError for settings that cannot be used."""
    alarm, senders = settings.alarm, list[AlarmSender]()
    if alarm.command:
        told = partial(processes.told, alarm.command, timeout_s=SEND_S, folder=home)
        senders.append(AlarmSender(settings, told, log))
    if (alarm.broker or alarm.username) and not alarm.topic:
        raise ConfigError("a broker for alarms and no topic", where="[alarm]", hint="add topic beside it")
    if alarm.topic:
        from edge_agent.connection.broker_login import link_to  # not loaded by a device that only answers

        check_topic(alarm.topic)
        if over is None:
            link_to(alarm, home, settings)  # raises now, and not at the first alarm
        own = partial(publish, lambda: link_to(alarm, home, settings), alarm.topic)
        senders.append(AlarmSender(settings, own if over is None else over.send, log, what="the message for alarms"))
    if not senders:
        yield
        return

    def heard(answer: Answer, sample: str) -> None:
        for sender in senders:
            sender(answer, sample)

    service.on_answer = heard
    try:
        yield
    finally:
        if over is not None:
            over.close()
        for sender in senders:
            sender.join()
