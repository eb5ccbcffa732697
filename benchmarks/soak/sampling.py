"""Measures a running fleet: memory and descriptors of processes, retained messages, sizes of files. Linux alone."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from fleet_core.link.interface import Message
from fleet_core.link.mqtt import MqttLink

QUIET_S, MOST_S = 0.2, 5.0


def memory(pid: int) -> int:
    """Resident bytes of a process and its children; 0 for one that has ended."""
    return sum(_resident(one) for one in family(pid))


def descriptors(pid: int) -> int:
    """Open files of a process and its children."""
    return sum(_open_files(one) for one in family(pid))


def family(pid: int) -> list[int]:
    """The process and those that it started."""
    found = [pid]
    for one in found:
        try:
            children = Path(f"/proc/{one}/task/{one}/children").read_text().split()
        except OSError:
            continue
        found += map(int, children)
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _open_files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def size(folder: Path, pattern: str = "**/*", *, without: str = "") -> int:
    """Bytes of the files, without those of a name; those that vanish meanwhile count nothing."""
    total = 0
    for path in folder.glob(pattern):
        try:
            total += path.stat().st_size if path.name != without and path.is_file() else 0
        except OSError:
            continue
    return total


def retained(url: str) -> Mapping[str, int]:
    """{"topics", "bytes"} of the broker's retained messages, as a new client gets them."""
    link, found = MqttLink(url, client_id=f"soak-{secrets.token_hex(4)}"), dict[str, int]()
    link.subscribe("#")
    link.open()
    try:
        begun_s = heard_s = time.monotonic()
        while (now_s := time.monotonic()) - begun_s < MOST_S and (not link.connected or now_s - heard_s < QUIET_S):
            for event in link.poll(0.05):
                heard_s = time.monotonic()
                if isinstance(event, Message) and event.retain:
                    found[event.topic] = len(event.payload)
    finally:
        link.close()
    return {"topics": len(found), "bytes": sum(found.values())}
