"""Several devices at once: one line each, that follows on a terminal; a plain line for each step elsewhere.

One that fails stops no other. Nothing is written down of what is done: each device says itself that it has the version,
so that running it again skips what is done.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from firmware_profiles.ssh.inventory import Entry
from firmware_profiles.ssh.remote_install import Outcome, Tell
from fleet_core.base.errors import FlashError, FleetError

MARKS = {"waiting": ("·", "dim"), "going": ("…", "cyan"), "done": ("✓", "green"), "failed": ("✗", "red")}


@dataclass(frozen=True)
class Result:
    """What became of one device: an outcome, or the error that ended it."""

    entry: Entry
    seconds: float
    outcome: Outcome | None = None
    error: FleetError | None = None

    @property
    def plain(self) -> dict[str, object]:
        """For --json."""
        told: dict[str, object] = {"device": self.entry.name, "to": self.entry.to, "seconds": round(self.seconds, 1)}
        if self.outcome is None:
            return {**told, "ok": False, "error": str(self.error)}
        done = self.outcome
        return {**told, "ok": True, "version": done.version, "previous": done.previous, "changed": done.changed,
                "sent_bytes": done.sent_bytes}


Work = Callable[[Entry, Tell], Outcome]


def flash_all(entries: Sequence[Entry], work: Work, show: Show, jobs: int) -> list[Result]:
    """``work`` for every entry, ``jobs`` at a time; results in the entries' order.

    An error that is no FleetError, and an interrupt, end all: what has not begun does not begin, and the others end at
    their next step. What is not confirmed by then returns by itself.
    """
    pool, stop = ThreadPoolExecutor(max(1, min(jobs, len(entries)))), threading.Event()
    try:
        with show:
            begun = [pool.submit(_one, entry, work, show, stop) for entry in entries]
            return [task.result() for task in begun]
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _one(entry: Entry, work: Work, show: Show, stop: threading.Event) -> Result:
    start = time.monotonic()
    show.told(entry, "going", "connecting", "")

    def tell(stage: str, far: str) -> None:
        if stop.is_set():
            raise FlashError("interrupted", where=entry.to, hint="run the same command again")
        show.told(entry, "going", stage, far)

    try:
        outcome = work(entry, tell)
    except FleetError as error:
        show.told(entry, "failed", _first(str(error)), "")
        return Result(entry, time.monotonic() - start, error=error)
    show.told(entry, "done", str(outcome), "")
    return Result(entry, time.monotonic() - start, outcome)


def _first(text: str) -> str:
    return text.splitlines()[0]


class Show(Protocol):
    """Where people see it."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def told(self, entry: Entry, state: str, stage: str, far: str) -> None:
        """state: a key of MARKS. far: how far the stage is, or empty. Called by many threads."""


class Lines:
    """A plain line whenever a device begins another stage."""

    def __init__(self, entries: Sequence[Entry], out: TextIO | None = None):
        self._out, self._lock, self._last = out or sys.stderr, threading.Lock(), dict[Entry, str]()
        self._width = max((len(entry.name) for entry in entries), default=0)

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def told(self, entry: Entry, state: str, stage: str, far: str) -> None:
        with self._lock:
            if self._last.get(entry) != stage:
                self._last[entry] = stage
                failed = "failed: " if state == "failed" else ""
                print(f"{entry.name:{self._width}}  {failed}{stage}", file=self._out, flush=True)


class Following:
    """A table with a line for each device, on a terminal."""

    def __init__(self, entries: Sequence[Entry], console: Console | None = None):
        self._entries, self._lock = entries, threading.Lock()
        self._told: dict[Entry, tuple[str, str, str]] = {}
        self._live = Live(console=console or Console(stderr=True), refresh_per_second=4, get_renderable=self._table)

    def __enter__(self) -> Following:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def told(self, entry: Entry, state: str, stage: str, far: str) -> None:
        with self._lock:
            self._told[entry] = state, stage, far

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        with self._lock:
            for entry in self._entries:
                state, stage, far = self._told.get(entry, ("waiting", "", ""))
                mark, style = MARKS[state]
                said = Text(f"{stage}  {far}".strip(), no_wrap=True, overflow="ellipsis")
                table.add_row(Text(mark, style), Text(entry.name), said)
        return table


def show_for(entries: Sequence[Entry]) -> Show:
    """A table on a terminal, lines elsewhere."""
    return Following(entries) if sys.stderr.isatty() else Lines(entries)
