"""Buttons: a press gives the last sample of a source its label.

A line of a GPIO chip is watched by ``gpiomon`` of libgpiod, version 1 or 2; or a message comes on an MQTT topic.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from edge_agent.sources.command import Program
from fleet_core.base.backoff import Backoff
from fleet_core.base.errors import FleetError, SourceError
from fleet_core.board.device_settings import Settings
from fleet_core.board.source_settings import Button, GpioButton, MqttButton

BOUNCE_S = 0.3
"""Presses within this time count as one."""
READ_S = 0.5
FIRST_S, LAST_S = 1.0, 300.0
END_S = 5.0
MAX_LABEL = 64
HINT = "apt install gpiod; gpioinfo lists chips and lines; the agent's user belongs to the group gpio"
Press = Callable[[str, str], None]
"""Called with the label, and the name of the source or an empty text."""


class Pressed(Protocol):
    """An open button."""

    def read(self, timeout_s: float) -> Sequence[str]:
        """The label of each press in this time. Raises SourceError."""

    def close(self) -> None: ...


class GpioPressed:
    """A line of a GPIO chip. gpiomon ends after each press, because it may hold back what it prints. Raises
    SourceError."""

    def __init__(self, button: GpioButton, home: Path, clock: Callable[[], float] = time.monotonic):
        self._label, self._home, self._clock = button.label, home, clock
        self._command, self._pressed_at = _gpiomon(button), float("-inf")
        self._program = Program(self._command, home, HINT)

    def read(self, timeout_s: float) -> Sequence[str]:
        if self._program.read(timeout_s) is not None:
            return ()
        self._program.close()
        self._program = Program(self._command, self._home, HINT)
        bounced, self._pressed_at = self._clock() - self._pressed_at < BOUNCE_S, self._clock()
        return () if bounced else (self._label,)

    def close(self) -> None:
        self._program.close()


class TopicPressed:
    """Messages on a topic; each is the label, if the button has none."""

    def __init__(self, button: MqttButton, home: Path, settings: Settings):
        from edge_agent.sources.topic import Topic

        self._label, self._topic = button.label, Topic(button, home, settings)

    def read(self, timeout_s: float) -> Sequence[str]:
        messages = [one for one in self._topic.read(timeout_s) if isinstance(one, bytes)]
        said = (one[: 4 * MAX_LABEL].decode("utf-8", "replace").strip()[:MAX_LABEL] for one in messages)
        return [label for one in said if (label := self._label or one)]

    def close(self) -> None:
        self._topic.close()


def open_button(button: Button, home: Path, settings: Settings) -> Pressed:
    """Raises FleetError, OSError."""
    if isinstance(button, GpioButton):
        return GpioPressed(button, home)
    if isinstance(button, MqttButton):
        return TopicPressed(button, home, settings)
    raise SourceError(f"there is no button of the kind '{button.kind}'")


def _gpiomon(button: GpioButton) -> tuple[str, ...]:
    """The command that ends at a press. Raises SourceError."""
    asked = ("gpiomon", "--version")
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=END_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourceError("gpiomon cannot be started", where=f"button of line {button.line}", hint=HINT) from error
    edge, bias = ("falling", "pull-up") if button.falling else ("rising", "pull-down")
    version = re.search(r"v(\d+)\.", said)
    if version is not None and version[1] == "1":
        return "gpiomon", "--num-events=1", f"--{edge}-edge", f"--bias={bias}", button.chip, str(button.line)
    return "gpiomon", "--num-events=1", f"--edges={edge}", f"--bias={bias}", f"--chip={button.chip}", str(button.line)


class Buttons:
    """All buttons of a device. press: called from the thread of a button."""

    def __init__(self, home: Path, settings: Settings, press: Press, log: Callable[[str], None]):
        self._home, self._settings, self._press, self._log = home, settings, press, log
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(n, one), name=f"button-{n}", daemon=True)
                         for n, one in enumerate(settings.button, 1)]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watches the buttons while the context lasts."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            for thread in self._threads:
                thread.join(END_S)

    def _watch(self, number: int, button: Button) -> None:
        backoff, said = Backoff(f"button-{number}", time.monotonic, FIRST_S, LAST_S), ""
        while not self._stopped.is_set():
            try:
                self._until_it_fails(button)
            except (FleetError, OSError) as error:
                why = str(error).replace("\n", "; ")
                if why != said:
                    self._log(f"button {number}: {why}; the agent tries again")
                said = why
                self._stopped.wait(backoff.wait_s)
                backoff.repeat()

    def _until_it_fails(self, button: Button) -> None:
        pressed = open_button(button, self._home, self._settings)
        try:
            while not self._stopped.is_set():
                for label in pressed.read(READ_S):
                    self._press(label, button.source)
        finally:
            pressed.close()
