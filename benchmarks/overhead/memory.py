"""Memory of a device as if it were alone on its board, from ``/proc/PID/smaps``. Linux only.

A device is a process and its child processes (an agent and its trainer). Its memory is the anonymous memory of all of
them, and every page of a file that one of them has mapped: in full although processes of other devices map the same
file here, and once although two processes of this device map it. Of two processes that map the same part of a file the
larger resident size counts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

MIB = 1 << 20
HEAD = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ \S+ ([0-9a-f]+) (\S+) (\d+) ", re.MULTILINE)
SIZES = re.compile(rb"^(Rss|Anonymous|Swap): +(\d+) kB", re.MULTILINE)

Part = tuple[bytes, int, int]
"""Part of a file: its device, its inode, and the offset where a mapping of it begins."""


@dataclass(frozen=True)
class Pages:
    """Bytes of one process: its own memory, and resident pages of files."""

    anonymous: int
    files: Mapping[Part, int]

    @property
    def resident(self) -> int:
        return self.anonymous + sum(self.files.values())


def parse(smaps: bytes) -> Pages:
    """Parses a ``smaps``. Swapped pages count as memory; pages of a file that the process has written to are its
    own."""
    anonymous, files = 0, dict[Part, int]()
    heads = list(HEAD.finditer(smaps))
    for head, after in zip_longest(heads, heads[1:]):
        end = len(smaps) if after is None else after.start()
        sizes = {name: int(kib) << 10 for name, kib in SIZES.findall(smaps, head.end(), end)}
        own = sizes.get(b"Anonymous", 0)
        anonymous += own + sizes.get(b"Swap", 0)
        offset, device, inode = int(head[1], 16), head[2], int(head[3])
        if inode and sizes.get(b"Rss", 0) > own:
            part = (device, inode, offset)
            files[part] = files.get(part, 0) + sizes[b"Rss"] - own
    return Pages(anonymous, files)


def together(processes: Iterable[Pages]) -> int:
    """Bytes that the processes of one device hold: the anonymous memory of each, pages of files once."""
    anonymous, files = 0, dict[Part, int]()
    for pages in processes:
        anonymous += pages.anonymous
        for part, size in pages.files.items():
            files[part] = max(size, files.get(part, 0))
    return anonymous + sum(files.values())


def read(pid: int) -> Pages | None:
    """A process's memory now, or None if it is gone."""
    try:
        pages = parse(Path(f"/proc/{pid}/smaps").read_bytes())
    except OSError:
        return None
    return pages if pages.resident else None


def family(pid: int) -> list[int]:
    """A process and its descendants, whichever of its threads started them."""
    found = [pid]
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # ended meanwhile
            for child in (thread / "children").read_text().split():
                found += family(int(child))
    return found


def high_water(pid: int) -> int:
    """A process's peak resident bytes; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return 0
    found = re.search(rb"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def alone(pid: int) -> int:
    """Bytes that the device whose first process is ``pid`` holds now."""
    return together(filter(None, map(read, family(pid))))


@dataclass
class Watch:
    """Samples one of ``devices`` (ids of their first processes) after the other, so that sampling costs little.

    ``peak``: the most bytes seen on any device. A peak between two samples is missed; ``bound`` misses none: it adds
    the high-water marks of a device's processes, as if they came at one time, less what the processes shared when
    sampled.
    """

    devices: Sequence[int]
    every_s: float = 0.25
    peak: int = 0
    bound: int = 0
    looks: int = 0
    _due_s: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Samples the next device when that is due."""
        if time.monotonic() < self._due_s:
            return
        pid = self.devices[self.looks % len(self.devices)]
        self.looks += 1
        held = {each: pages for each in family(pid) if (pages := read(each)) is not None}
        union = together(held.values())
        shared = sum(pages.resident for pages in held.values()) - union
        self.peak = max(self.peak, union)
        self.bound = max(self.bound, sum(map(high_water, held)) - shared)
        self._due_s = time.monotonic() + self.every_s


def both(size_bytes: int) -> dict[str, float]:
    """A size in MiB (2^20) and in MB (10^6)."""
    return {"mib": round(size_bytes / MIB, 1), "mb": round(size_bytes / 1e6, 1)}
