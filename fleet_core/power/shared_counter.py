"""One counter of joules, shared among the processes that ask, so that their sum never exceeds what it counted.

What a counter shows above idle is split by the processes' share of CPU time, what is idle evenly among them. Each
process reads at moments of its own, so shares taken from each one's own two readings could add up to more than the
counter counted. Therefore all settle through one small file under a lock: each advance of the counter is shared out
once, whoever saw it. A process that starts other metered processes needs no meter of its own: their CPU time would
count twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fleet_core.base import schema
from fleet_core.base.errors import PowerError
from fleet_core.power.meter import Interval
from fleet_core.power.sensors.cpu import machine_cpu_s, process_cpu_s, process_key

MAX_ACCOUNT_BYTES = 1 << 20


class Counter(Protocol):
    """Joules of the whole machine, as readings in µJ that only a counter itself can compare."""

    def read_uj(self) -> dict[str, int]: ...

    def advance_j(self, before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float: ...

    def unknown_s(self, before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float:
        """Seconds from one reading to the next that ``advance_j`` leaves out."""


@dataclass(frozen=True)
class Member:
    """A process that shares the counter: its CPU seconds when last settled; joules, and seconds of which the counter
    knows nothing, not yet handed to it."""

    cpu_s: float = field(metadata={"min": 0})
    active_j: float = field(default=0.0, metadata={"min": 0})
    idle_j: float = field(default=0.0, metadata={"min": 0})
    unknown_s: float = field(default=0.0, metadata={"min": 0})


@dataclass(frozen=True)
class Account:
    """The shared file: the counter, the machine's busy CPU seconds and the clock when last settled; the members."""

    energy_uj: Mapping[str, int]
    machine_cpu_s: float
    at_s: float
    members: Mapping[str, Member]


class Share:
    """One process's part of a counter.

    Args:
        name: of the counter; all who share it give the same.
        idle_w: watts of the idle machine, or None: all joules then go by CPU time.
        root: of the file system. pid: the process, this one if None; its children count as its own.
        clock: seconds, the same for all processes of the machine.

    Raises PowerError.
    """

    def __init__(
        self,
        counter: Counter,
        name: str,
        idle_w: float | None,
        *,
        root: Path = Path("/"),
        pid: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._counter, self._idle_w, self._root, self._clock = counter, idle_w, root, clock
        self._pid = pid or os.getpid()
        self._path = _account_folder(root) / f"{name}.json"
        self.interval()

    def interval(self) -> Interval:
        """Joules handed to this process since its last interval. Raises PowerError."""
        with _locked(self._path) as file:
            account = self._settled(_account(file.read()))
            key, cpu_s = process_key(self._root, self._pid), process_cpu_s(self._root, self._pid)
            if key is None or cpu_s is None:
                raise PowerError(f"process {self._pid} is not there", where=str(self._root / "proc"))
            mine = account.members.get(key, Member(cpu_s))
            members = {**account.members, key: Member(mine.cpu_s)}
            after = Account(account.energy_uj, account.machine_cpu_s, account.at_s, members)
            file.write(json.dumps(schema.plain(after)))
        return Interval(mine.active_j, None if self._idle_w is None else mine.idle_j, mine.unknown_s)

    def _settled(self, before: Account | None) -> Account:
        """The account brought up to now: the joules since ``before`` shared out among its members that still run."""
        now = Account(self._counter.read_uj(), machine_cpu_s(self._root), self._clock(), {})
        if before is None or before.at_s > now.at_s:  # the first to ask, or a machine that has started again
            return now
        running = {key: _cpu_of(self._root, key) for key in before.members}
        spent_s = {k: max(0.0, cpu_s - before.members[k].cpu_s) for k, cpu_s in running.items() if cpu_s is not None}
        counted_j = self._counter.advance_j(before.energy_uj, now.energy_uj)
        idle_j = min(counted_j, (self._idle_w or 0.0) * (now.at_s - before.at_s))
        unknown_s = self._counter.unknown_s(before.energy_uj, now.energy_uj)
        busy_s = max(now.machine_cpu_s - before.machine_cpu_s, sum(spent_s.values()))
        members = {
            key: Member(
                cpu_s=before.members[key].cpu_s + cpu_s,
                active_j=before.members[key].active_j + ((counted_j - idle_j) * cpu_s / busy_s if busy_s else 0.0),
                idle_j=before.members[key].idle_j + idle_j / len(spent_s),
                unknown_s=before.members[key].unknown_s + unknown_s,
            )
            for key, cpu_s in spent_s.items()
        }
        return Account(now.energy_uj, now.machine_cpu_s, now.at_s, members)


def _cpu_of(root: Path, key: str) -> float | None:
    """CPU seconds of a member; None when its process is gone, even if a new one has its number."""
    pid = key.partition(":")[0]
    if not pid.isdecimal() or process_key(root, int(pid)) != key:
        return None
    return process_cpu_s(root, int(pid))


def _account(text: str) -> Account | None:
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None  # new, or a writer was killed while it wrote: what was not handed out is lost, never doubled
    return schema.read(Account, data)[0]


def _account_folder(root: Path) -> Path:
    """A folder of this user's own, the same for all its processes."""
    folder = root / "tmp" / f"metafleet-power-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise PowerError(f"cannot be made: {error.strerror}", where=str(folder)) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PowerError("belongs to another user", where=str(folder), hint="remove it")
    return folder


class _Locked:
    """An open, locked file of text that is read and written whole."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def read(self) -> str:
        return os.pread(self._descriptor, MAX_ACCOUNT_BYTES, 0).decode(errors="replace")

    def write(self, text: str) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[_Locked]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PowerError(f"cannot be opened: {error.strerror}", where=str(path)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield _Locked(descriptor)
    except OSError as error:
        raise PowerError(f"cannot be written: {error.strerror}", where=str(path)) from error
    finally:
        os.close(descriptor)
