"""What an image's root says of its system, read by debugfs at an offset: the Python, and whether it has 64 bits.

A package for another Python than the image has would be refused by the device, at its first start and unseen; so it is
refused here. Where there is no debugfs, or no ext4, nothing is known and nothing is refused.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from firmware_profiles.image.disk_partitions import Partition
from firmware_profiles.package.board_needs import Machine
from fleet_core.base.errors import FlashError
from fleet_core.board.profile import WHY_NOT_32_BIT, WIDE_HINT

FOLDERS = os.pathsep.join(["/usr/sbin", "/sbin", "/usr/local/sbin"])
NARROW, WIDE = "arm-linux-gnueabihf", ("aarch64-linux-gnu", "x86_64-linux-gnu")


@dataclass(frozen=True)
class System:
    """python: as ``3.13``, or None where it is not to be seen. narrow: a 32-bit system."""

    python: str | None = None
    narrow: bool = False


def of(image: Path, root: Partition | None) -> System:
    """The system in the partition ``root`` of an image."""
    debugfs = shutil.which("debugfs") or shutil.which("debugfs", path=FOLDERS)
    if debugfs is None or root is None:
        return System()

    def told(of: str) -> str:
        command = [debugfs, "-R", f"stat {of}", f"{image}?offset={root.start}"]
        return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout

    python = re.search(r'Fast link dest: "(?:\S*/)?python(3\.\d+)"', told("/usr/bin/python3"))
    wide = any("Type: directory" in told(f"/usr/lib/{name}") for name in WIDE)
    narrow = not wide and "Type: directory" in told(f"/usr/lib/{NARROW}")
    return System(python[1] if python else None, narrow)


def check(image: Path, root: Partition | None, machine: Machine) -> None:
    """Raises FlashError for an image of a system that the package is not for."""
    found = of(image, root)
    if found.narrow:
        raise FlashError(WHY_NOT_32_BIT, expected=f"a system for {machine.arch}", hint=WIDE_HINT)
    if found.python is not None and found.python != machine.python:
        raise FlashError(f"has Python {found.python}, the package is for {machine.python} ({machine.os})",
                         hint='another image, or os = "…" in the device file: metafleet profiles show ' + machine.board)
