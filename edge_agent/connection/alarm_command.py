"""Runs the device's own program when a sample is an alarm: ``[alarm] command`` in device.toml. docs/anomaly.md

The program gets a JSON object on its standard input: fleet, device, time (Unix seconds), sample (the id of a stored
sample, or null), score, threshold, alarms (those since the last run, this one included) and round. Nothing waits for
it: it runs in a thread of its own, one at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fleet_core.base import processes
from fleet_core.board.device_settings import Settings
from fleet_core.protocol.device_messages import Answer

COMMAND_S = 30.0


class Answering(Protocol):
    """What answers: gives each answer, and the sample's id or an empty text, to ``on_answer``."""

    on_answer: Callable[[Answer, str], None] | None


class AlarmCommand:
    """home: the device's folder, in which the program runs. log: gets why it failed. Several threads may call it."""

    def __init__(
        self, home: Path, settings: Settings, log: Callable[[str], None], *, clock: Callable[[], float] = time.time,
        timeout_s: float = COMMAND_S,
    ):
        self._home, self._alarm, self._log, self._clock = home, settings.alarm, log, clock
        self._of = {"fleet": settings.device.fleet, "device": settings.device.name}
        self._timeout_s = timeout_s
        self._lock, self._thread = threading.Lock(), threading.Thread()
        self._alarms, self._ran_at = 0, float("-inf")

    def __call__(self, answer: Answer, sample: str = "") -> None:
        """Runs the program, with the highest score of the answer, if one of its samples is an alarm and the last run
        has ended and is long enough ago. sample: its id, if it is stored."""
        if not any(answer.alarms):
            return
        with self._lock:
            self._alarms, now = self._alarms + sum(answer.alarms), self._clock()
            if self._thread.is_alive() or 0 <= now - self._ran_at < self._alarm.every_s:
                return
            message = {**self._of, "time": now, "sample": sample or None, "score": max(row[0] for row in answer.values),
                       "threshold": answer.threshold, "alarms": self._alarms, "round": answer.round}
            self._alarms, self._ran_at = 0, now
            self._thread = threading.Thread(target=self._run, args=(message,), name="alarm", daemon=True)
            self._thread.start()

    def join(self, timeout_s: float = 2.0) -> None:
        """Waits a little for a program that runs."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self, message: dict[str, Any]) -> None:
        why = processes.told(self._alarm.command, message, self._timeout_s, self._home)
        if why:
            self._log(f"the command for alarms failed: {why}")


@contextmanager
def hearing_alarms(home: Path, settings: Settings, service: Answering, log: Callable[[str], None]) -> Iterator[None]:
    """While the context lasts, the command hears of alarms in what ``service`` answers, if there is a command."""
    if not settings.alarm.command:
        yield
        return
    service.on_answer = command = AlarmCommand(home, settings, log)
    try:
        yield
    finally:
        command.join()
