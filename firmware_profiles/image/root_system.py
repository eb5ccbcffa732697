"""The system in an image's root, read by debugfs: its Python, and whether it has 64 bits.

A device would refuse a package for another Python at its first start, where nobody sees it; so such a package is
refused here. Without debugfs or ext4 nothing is known and nothing refused.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from firmware_profiles.image.disk_partitions import Partition
from firmware_profiles.image.partition_files import which
from firmware_profiles.package.board_needs import Machine
from fleet_core.base.errors import FlashError
from fleet_core.board.profile import WHY_NOT_32_BIT, WIDE_HINT

NARROW, WIDE = "arm-linux-gnueabihf", ("aarch64-linux-gnu", "x86_64-linux-gnu")


@dataclass(frozen=True)
class System:
    """python: as ``3.13``, or None if unknown. narrow: a 32-bit system."""

    python: str | None = None
    narrow: bool = False


def of(image: Path, root: Partition | None) -> System:
    """The system in the partition ``root`` of an image."""
    debugfs = which("debugfs")
    if debugfs is None or root is None:
        return System()

    def stat(path: str) -> str:
        command = [debugfs, "-R", f"stat {path}", f"{image}?offset={root.start}"]
        return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout

    python = re.search(r'Fast link dest: "(?:\S*/)?python(3\.\d+)"', stat("/usr/bin/python3"))
    wide = any("Type: directory" in stat(f"/usr/lib/{name}") for name in WIDE)
    narrow = not wide and "Type: directory" in stat(f"/usr/lib/{NARROW}")
    return System(python[1] if python else None, narrow)


def check(image: Path, root: Partition | None, machine: Machine) -> None:
    """Raises FlashError if the package does not run on the image's system."""
    system = of(image, root)
    if system.narrow:
        raise FlashError(WHY_NOT_32_BIT, expected=f"a system for {machine.arch}", hint=WIDE_HINT)
    if system.python is not None and system.python != machine.python:
        raise FlashError(f"has Python {system.python}, the package is for {machine.python} ({machine.os})",
                         hint='another image, or os = "…" in the device file: metafleet profiles show ' + machine.board)
