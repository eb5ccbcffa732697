"""Flashes several devices at the same time, with a table of their progress on a terminal, or a line per step elsewhere.

A device that fails does not stop the others of its wave; further waves do not begin when too many have failed. No
progress is stored: a second run sees on each device what is done.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from fleet_core.base.errors import ConfigError, FlashError, FleetError

MARKS = {"waiting": ("·", "dim"), "going": ("…", "cyan"), "done": ("✓", "green"), "failed": ("✗", "red")}


@dataclass(frozen=True)
class Waves:
    """sizes: number of devices in each wave; the last is repeated until all are done; empty: one wave of all devices.
    most_failures: another wave begins only if at most this many devices have failed so far."""

    sizes: tuple[int, ...] = ()
    most_failures: int = 0

    def of(self, entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
        """The entries wave by wave."""
        sizes, begin = iter(self.sizes), 0
        size = len(entries)
        while begin < len(entries):
            size = next(sizes, size)
            yield entries[begin : begin + size]
            begin += size


ONE_WAVE = Waves()


def sizes_of(text: str, where: str) -> tuple[int, ...]:
    """``1,5,20`` as numbers, empty for no text. Raises ConfigError if it is no list of positive numbers."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and 0 < int(part) <= 1_000_000 for part in parts):
        raise ConfigError(f"'{text[:80]}' is not a list of waves", where=where, expected="numbers of devices: 1,5,20")
    return tuple(map(int, parts))


@dataclass(frozen=True)
class Result:
    """One device's outcome, or the error that ended its installation. begun: False where a halt came before it."""

    entry: Entry
    seconds: float
    outcome: Outcome | None = None
    error: FleetError | None = None
    begun: bool = True

    @property
    def plain(self) -> dict[str, object]:
        """The output of --json."""
        facts: dict[str, object] = {"device": self.entry.name, "to": self.entry.to, "seconds": round(self.seconds, 1)}
        if self.outcome is None:
            return {**facts, "ok": False, "error": str(self.error)}
        done = self.outcome
        return {**facts, "ok": True, "version": done.version, "previous": done.previous, "changed": done.changed,
                "sent_bytes": done.sent_bytes}


Work = Callable[[Entry, Tell], Outcome]


def flash_all(
    entries: Sequence[Entry], work: Work, show: Show, jobs: int, waves: Waves = ONE_WAVE,
    stop: threading.Event | None = None,
) -> list[Result]:
    """``work`` for every entry, ``jobs`` at the same time; results in the order of the entries. An entry that was not
    begun, because too many had failed, has an error that says so.

    An interrupt, setting ``stop``, or an error other than a FleetError ends the run: no further entry begins, and those
    under way end at their next step. A device that is not confirmed by then rolls back by itself.
    """
    pool, stop = ThreadPoolExecutor(max(1, min(jobs, len(entries)))), stop or threading.Event()
    try:
        with show:
            results: list[Result] = []
            for wave in waves.of(entries):
                failed = sum(result.error is not None for result in results)
                if stop.is_set() or (waves.sizes and failed > waves.most_failures):
                    why = "stopped" if stop.is_set() else f"{failed} failed in the waves before"
                    return [*results, *(_not_begun(entry, why, show) for entry in entries[len(results):])]
                tasks = [pool.submit(_flash, entry, work, show, stop) for entry in wave]
                results += [task.result() for task in tasks]
            return results
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _not_begun(entry: Entry, why: str, show: Show) -> Result:
    error = FlashError(f"not begun: {why}", where=entry.to, hint="fix that, then run the same command again")
    show.update(entry, "failed", error.what, "")
    return Result(entry, 0.0, error=error, begun=False)


def _flash(entry: Entry, work: Work, show: Show, stop: threading.Event) -> Result:
    start = time.monotonic()
    show.update(entry, "going", "connecting", "")

    def tell(stage: str, progress: str) -> None:
        if stop.is_set():
            raise FlashError("interrupted", where=entry.to, hint="run the same command again")
        show.update(entry, "going", stage, progress)

    try:
        outcome = work(entry, tell)
    except FleetError as error:
        show.update(entry, "failed", str(error).splitlines()[0], "")
        return Result(entry, time.monotonic() - start, error=error)
    show.update(entry, "done", str(outcome), "")
    return Result(entry, time.monotonic() - start, outcome)


class Show(Protocol):
    """Shows the progress of all devices. A context for what must be begun and ended."""

    def __enter__(self) -> object:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, entry: Entry, state: str, stage: str, progress: str) -> None:
        """state: a key of MARKS. progress: of the stage, or empty. Several threads call it."""


class Lines(Show):
    """Prints a line whenever a device begins another stage."""

    def __init__(self, entries: Sequence[Entry], out: TextIO | None = None):
        self._out, self._lock, self._last = out or sys.stderr, threading.Lock(), dict[Entry, str]()
        self._width = max((len(entry.name) for entry in entries), default=0)

    def update(self, entry: Entry, state: str, stage: str, progress: str) -> None:
        with self._lock:
            if self._last.get(entry) != stage:
                self._last[entry] = stage
                failed = "failed: " if state == "failed" else ""
                print(f"{entry.name:{self._width}}  {failed}{stage}", file=self._out, flush=True)


class LiveTable:
    """A live table with a row for each device, on a terminal."""

    def __init__(self, entries: Sequence[Entry], console: Console | None = None):
        self._entries, self._lock = entries, threading.Lock()
        self._rows: dict[Entry, tuple[str, str, str]] = {}
        self._live = Live(console=console or Console(stderr=True), refresh_per_second=4, get_renderable=self._table)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, entry: Entry, state: str, stage: str, progress: str) -> None:
        with self._lock:
            self._rows[entry] = state, stage, progress

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        with self._lock:
            for entry in self._entries:
                state, stage, progress = self._rows.get(entry, ("waiting", "", ""))
                mark, style = MARKS[state]
                text = Text(f"{stage}  {progress}".strip(), no_wrap=True, overflow="ellipsis")
                table.add_row(Text(mark, style), Text(entry.name), text)
        return table


def show_for(entries: Sequence[Entry]) -> Show:
    """A table on a terminal, lines elsewhere."""
    return LiveTable(entries) if sys.stderr.isatty() else Lines(entries)
