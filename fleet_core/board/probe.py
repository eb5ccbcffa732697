"""Reads what the present machine has; None for what the system does not report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import struct
from dataclasses import dataclass, field
from pathlib import Path

from fleet_core.board.profile import PACKAGES

DEVICE_TREE_MODEL = "proc/device-tree/model"
MEMORY = "proc/meminfo"


@dataclass(frozen=True)
class Machine:
    """arch: as printed by ``uname -m``. bits: of this Python, which may be 32 with a 64-bit kernel. memory_mib: memory
    of the system, which is less than the nominal size. model: the board's own name. packages: installed {name:
    version}. """

    arch: str
    bits: int
    cores: int
    memory_mib: int | None = None
    glibc: str | None = None
    python: str = ""
    system: str = "Linux"
    model: str | None = None
    packages: dict[str, str] = field(default_factory=dict)


def machine(root: Path = Path("/")) -> Machine:
    """Describes this machine. root: of the file system."""
    libc, version = platform.libc_ver()
    return Machine(
        arch=platform.machine(), bits=8 * struct.calcsize("P"), cores=cores(), memory_mib=_memory_mib(root),
        glibc=version if libc == "glibc" and version else None, python=platform.python_version(),
        system=platform.system(), model=_model(root),
        packages={name: found for name in PACKAGES if (found := _version(name)) is not None},
    )


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_mib(root: Path) -> int | None:
    try:
        for line in (root / MEMORY).read_text(encoding="ascii").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) >> 10
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    except (ValueError, OSError):
        return None


def _model(root: Path) -> str | None:
    """The model in the device tree, whose text ends with a zero byte."""
    try:
        return (root / DEVICE_TREE_MODEL).read_bytes()[:200].rstrip(b"\0").decode("utf-8", "replace").strip() or None
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
