"""One joule counter divided among processes, so that their sum never exceeds what the counter counted.

Joules above idle are divided by CPU time, idle joules equally. The processes read at different times, so shares
computed from each process's own readings could add up to more than the counter counted. Therefore all processes use one
small file under a lock: whoever reads the counter divides its advance once, for all. A process whose children have
meters must not have one itself, or their CPU time would count twice.
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
    """Joules of the whole machine. Only the counter itself can compare its readings."""

    def read_uj(self) -> dict[str, int]: ...

    def advance_j(self, before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float: ...

    def unknown_s(self, before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float:
        """Seconds between the readings that ``advance_j`` does not include."""


@dataclass(frozen=True)
class Member:
    """A process that shares the counter. cpu_s: its CPU seconds at the last update. The others: joules, and seconds
    without readings, that it has not fetched yet."""

    cpu_s: float = field(metadata={"min": 0})
    active_j: float = field(default=0.0, metadata={"min": 0})
    idle_j: float = field(default=0.0, metadata={"min": 0})
    unknown_s: float = field(default=0.0, metadata={"min": 0})


@dataclass(frozen=True)
class Account:
    """The shared file: the counter, the machine's busy CPU seconds and the clock at the last update; the members."""

    energy_uj: Mapping[str, int]
    machine_cpu_s: float
    at_s: float
    members: Mapping[str, Member]


class Share:
    """One process's share of a counter.

    Args:
        name: of the counter; the same in all processes.
        idle_w: watts of the idle machine. None: all joules are divided by CPU time.
        root: of the file system. pid: the process, by default this one; its children are included.
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

    def source_of(self, sensor: str) -> str:
        """A meter's ``source``: the sensor, and a note when idle draw is not separated."""
        return sensor if self._idle_w is not None else f"{sensor} (idle draw included)"

    @property
    def absent_terms(self) -> dict[str, str]:
        return {} if self._idle_w is not None else {"idle": "idle watts are unknown; the other phases include it"}

    def interval(self) -> Interval:
        """Joules of this process since its last interval. Raises PowerError."""
        with _locked(self._path) as file:
            account = self._updated(_account(file.read()))
            key, cpu_s = process_key(self._root, self._pid), process_cpu_s(self._root, self._pid)
            if key is None or cpu_s is None:
                raise PowerError(f"process {self._pid} does not exist", where=str(self._root / "proc"))
            own = account.members.get(key, Member(cpu_s))
            members = {**account.members, key: Member(own.cpu_s)}
            after = Account(account.energy_uj, account.machine_cpu_s, account.at_s, members)
            file.write(json.dumps(schema.plain(after)))
        return Interval(own.active_j, None if self._idle_w is None else own.idle_j, own.unknown_s)

    def _updated(self, before: Account | None) -> Account:
        """The account at this moment: the joules since ``before`` are divided among its members that still run."""
        now = Account(self._counter.read_uj(), machine_cpu_s(self._root), self._clock(), {})
        if before is None or before.at_s > now.at_s:  # the first call, or the machine was rebooted
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
    """CPU seconds of a member; None when its process has ended, even if another has its pid now."""
    pid = key.partition(":")[0]
    if not pid.isdecimal() or process_key(root, int(pid)) != key:
        return None
    return process_cpu_s(root, int(pid))


def _account(text: str) -> Account | None:
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None  # new, or its writer was killed: joules not fetched yet are lost, never counted twice
    return schema.read(Account, data)[0]


def _account_folder(root: Path) -> Path:
    """A folder for all processes of this user."""
    folder = root / "tmp" / f"metafleet-power-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise PowerError(f"cannot be created: {error.strerror}", where=str(folder)) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PowerError("belongs to another user", where=str(folder), hint="remove it")
    return folder


class _Locked:
    """An open and locked text file."""

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
