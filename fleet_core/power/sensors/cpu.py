"""CPU seconds of processes and of the whole machine, and memory of processes, from Linux's /proc (proc(5))."""

from __future__ import annotations

import os
from pathlib import Path

from fleet_core.base.errors import PowerError

TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; user includes guest
UTIME, STARTTIME = 11, 19  # positions after the command's name; utime is followed by stime, cutime, cstime


def machine_cpu_s(root: Path) -> float:
    """Busy CPU seconds of all processors since boot. Raises PowerError."""
    path = root / "proc/stat"
    try:
        fields = path.read_text(encoding="ascii").split("\n", 1)[0].split()
        return sum(int(fields[1 + i]) for i in BUSY_FIELDS) / TICKS_PER_S
    except (OSError, ValueError, IndexError) as error:
        raise PowerError(f"cannot be read: {error}", where=str(path), expected="the CPU times of proc(5)") from error


def process_cpu_s(root: Path, pid: int) -> float | None:
    """CPU seconds of a process, its ended children and its running descendants; None when it has ended."""
    own = _stat(root, pid)
    if own is None:
        return None
    ticks = sum(int(field) for field in own[UTIME : UTIME + 4])
    return ticks / TICKS_PER_S + sum(process_cpu_s(root, child) or 0.0 for child in _children(root, pid))


def process_peak_mib(root: Path, pid: int) -> float | None:
    """Peak resident memory (VmHWM) of a process plus those of its running descendants; None when it has ended."""
    try:
        text = (root / "proc" / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    own = next((int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM:")), None)
    if own is None:
        return None
    return own / 1024 + sum(process_peak_mib(root, child) or 0.0 for child in _children(root, pid))


def process_key(root: Path, pid: int) -> str | None:
    """The process's pid and start time, which no later process shares; None when it has ended."""
    own = _stat(root, pid)
    return None if own is None else f"{pid}:{own[STARTTIME]}"


def own_cpu_s() -> float:
    """CPU seconds of this process and its ended children, on any system."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _stat(root: Path, pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name, which may itself contain spaces and brackets."""
    try:
        text = (root / "proc" / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > STARTTIME else None


def _children(root: Path, pid: int) -> list[int]:
    found: list[int] = []
    for file in (root / "proc" / str(pid) / "task").glob("*/children"):
        try:
            found += [int(number) for number in file.read_text(encoding="ascii").split()]
        except (OSError, ValueError):
            continue  # the thread has ended
    return found
