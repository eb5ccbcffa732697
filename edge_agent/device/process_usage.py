"""CPU seconds and memory of the agent and its children, from Linux's /proc; absent on other systems."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from fleet_core.power.sensors.cpu import process_cpu_s, process_peak_mib


@dataclass(frozen=True)
class ProcessUsage:
    """cpu_s: since this process started, its children included. peak_mib: an upper limit, because the peaks of the
    processes are added and need not have been at the same time."""

    cpu_s: float | None = None
    peak_mib: float | None = None


def own_usage(root: Path = Path("/")) -> ProcessUsage:
    """Of this process and its children. The peak is the larger of two sums: with the children that run now, and with
    the largest child that has ended."""
    cpu_s, running_mib = process_cpu_s(root, os.getpid()), process_peak_mib(root, os.getpid())
    if cpu_s is None or running_mib is None:
        return ProcessUsage()
    own, ended = (resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return ProcessUsage(cpu_s, max(running_mib, own + ended))
