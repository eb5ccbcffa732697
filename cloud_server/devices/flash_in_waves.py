"""The devices of an inventory flashed in waves in a thread that shows its progress and can be stopped, for the console.

It does what ``metafleet flash --all INVENTORY.toml --waves N,N --most-failures N`` does.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from cloud_server.devices import flash_over_ssh
from cloud_server.devices.flash_over_ssh import Choices
from firmware_profiles.package import program
from firmware_profiles.ssh import inventory, side_by_side
from firmware_profiles.ssh.inventory import Entry
from firmware_profiles.ssh.side_by_side import Result, Show, Waves
from fleet_core.base.errors import ConfigError, FlashError, FleetError, StateError, shortened

FILE = "inventory.toml"
JOBS = 4
WAVES = "1,5,20"
"""The proposed waves: one device first."""

Recorded = Callable[[], AbstractContextManager[list[str]]]
"""Records an action before and after it; append the outcome to the list."""


class WaveFlash(Show):
    """One run at a time. folder: the fleet's. path: the inventory; None for ``inventory.toml`` in that folder.
    choices: None for the defaults of the command, and this fleet's devices alone."""

    def __init__(self, folder: Path, path: Path | None = None, choices: Choices | None = None):
        self._choices = choices or Choices(fleet=folder)
        self._path = path or folder / FILE
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._facts: dict[str, Any] = {}
        self._devices: dict[Entry, dict[str, Any]] = {}

    def offer(self) -> dict[str, Any]:
        """What can be flashed: the inventory, its devices, the proposed waves, and sentences about what this machine
        lacks."""
        missing, names = list(_missing()), list[str]()
        try:
            names = [entry.name for entry in inventory.load(self._path)]
        except FleetError as error:
            there = f"there is no {self._path}, which lists the devices with their addresses"
            why = error if self._path.exists() else there
            missing.append(f"{why}; 'metafleet console --inventory FILE' names another")
        return {"inventory": str(self._path), "devices": names, "missing": missing, "waves": WAVES,
                "going": self.going}

    @property
    def going(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, waves: str, most_failures: int, recorded: Recorded) -> str:
        """Begins, and returns a sentence about what happens next. waves: as in ``1,5,20``. most_failures: the largest
        number of failures after which another wave begins. Raises FleetError, before anything is done."""
        sizes = side_by_side.sizes_of(waves, "waves")
        if not sizes:
            raise ConfigError("no waves are given", where="waves", expected=WAVES)
        for sentence in _missing():
            raise StateError(sentence)
        entries = inventory.load(self._path)
        with self._lock:
            if self.going:
                raise StateError("devices are being flashed already", hint="wait until that has ended, or stop it")
            plan = Waves(sizes, most_failures)
            parts = list(plan.of(entries))
            self._stop.clear()
            self._facts = {"waves": waves, "most_failures": most_failures, "count": len(parts),
                           "began_at": time.time(), "devices": len(entries), "going": True}
            self._devices = {entry: {"name": entry.name, "wave": number, "state": "waiting", "stage": "", "far": ""}
                             for number, part in enumerate(parts, 1) for entry in part}
            begun: Future[None] = Future()
            self._thread = threading.Thread(target=self._run, args=(entries, plan, recorded, begun), name="flash")
            self._thread.start()
        begun.result()
        return f"wave 1 of {len(parts)} begins: {', '.join(shortened([entry.name for entry in parts[0]]))}"

    def stop(self) -> str:
        """Begins no further device. Those under way end at their next step and roll back by themselves."""
        if not self.going:
            raise StateError("no device is being flashed")
        with self._lock:
            self._facts["stopped"] = True
        self._stop.set()
        return "no further device begins; those under way end at their next step, and roll back if they are not back"

    def close(self) -> None:
        """Stops and waits for the end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def values(self) -> dict[str, dict[str, Any]]:
        """The run as JSON values: ``flash`` and, for each device, ``w/NUMBER``; empty before the first one."""
        with self._lock:
            facts = {"flash": dict(self._facts)} if self._facts else {}
            return {**facts, **{f"w/{n}": dict(one) for n, one in enumerate(self._devices.values())}}

    # In threads -------------------------------------------------------------------------------------------------------

    def _run(self, entries: tuple[Entry, ...], waves: Waves, recorded: Recorded, begun: Future[None]) -> None:
        outcome, text = "failed", "an error of the console ended it"
        try:
            with recorded() as said:
                begun.set_result(None)
                results = flash_over_ssh.flashed(entries, self._choices, JOBS, waves, show=self, stop=self._stop)
                text = "; ".join(_sentences(results, waves.most_failures, stopped="stopped" in self._facts))
                if any(result.error is not None for result in results):
                    raise FlashError(text)
                outcome = "done"
                said.append(text)
        except FleetError as error:
            text = str(error)
            if not begun.done():
                begun.set_exception(error)
        finally:
            with self._lock:
                self._facts |= {"going": False, "outcome": outcome, "text": text, "ended_at": time.time()}

    def update(self, entry: Entry, state: str, stage: str, progress: str) -> None:
        """As ``side_by_side.Show``."""
        with self._lock:
            self._devices[entry] |= {"state": state, "stage": stage, "far": progress}


def _missing() -> Iterator[str]:
    """What this machine lacks."""
    if shutil.which("ssh") is None:
        yield "there is no ssh on this machine: install OpenSSH's client (openssh-client)"
    try:
        program.uv()
    except ConfigError as error:
        yield str(error)


def _sentences(results: Sequence[Result], most_failures: int, *, stopped: bool) -> Iterator[str]:
    done = sum(result.error is None for result in results)
    failed = [result for result in results if result.begun and result.error is not None]
    waiting = sum(not result.begun for result in results)
    yield f"{done} of {len(results)} devices run it"
    if failed:
        reasons = [f"{result.entry.name}: {str(result.error).splitlines()[0]}" for result in failed]
        yield f"{len(failed)} failed: {', '.join(shortened(reasons))}"
    if waiting:
        why = "stopped" if stopped else f"halted, because more than {most_failures} had failed"
        yield f"{why}: {waiting} were not begun"
