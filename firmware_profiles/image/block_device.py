"""Decides whether a block device may be overwritten: only a removable card that nothing uses.

Reads sysfs and procfs (Documentation/ABI/stable/sysfs-block, proc(5)); tests give folders in their place.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from fleet_core.base.errors import ConfigError

SYS, PROC = Path("/sys"), Path("/proc")


@dataclass(frozen=True)
class Card:
    """A whole device, or a plain file in place of one."""

    path: Path
    model: str
    size_bytes: int
    is_file: bool = False

    @property
    def shown(self) -> str:
        return f"{self.path}: {self.model}, {self.size_bytes / 1e9:.1f} GB"


def inspect(path: Path, *, rehearse: bool = False, sys: Path = SYS, proc: Path = PROC) -> Card:
    """The card at ``path``. Raises ConfigError with all reasons not to overwrite it.

    rehearse: accept a loop device or a plain file in place of a card.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot be found: {error.strerror}", where=str(path), hint=_hint(sys)) from error
    if rehearse and stat.S_ISREG(status.st_mode):
        return Card(path, "a plain file in place of a card", status.st_size, is_file=True)
    if not stat.S_ISBLK(status.st_mode):
        raise ConfigError("is not a block device", where=str(path), hint=_hint(sys))
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return of_number(path, number, rehearse=rehearse, sys=sys, proc=proc)


def of_number(path: Path, number: str, *, rehearse: bool = False, sys: Path = SYS, proc: Path = PROC) -> Card:
    """As ``inspect``, for the device with the number ``MAJOR:MINOR``."""
    device = (sys / "dev/block" / number).resolve()
    if not device.is_dir():
        raise ConfigError(f"the system does not know block device {number}", where=str(path), expected="Linux")
    reasons = _reasons_against(device, rehearse, proc)
    if reasons:
        raise ConfigError("; ".join(reasons), where=str(path), hint=_hint(sys))
    return Card(path, model(device), size_bytes(device))


def _reasons_against(device: Path, rehearse: bool, proc: Path) -> list[str]:
    """Reasons not to overwrite a device, the most informative first."""
    if (device / "partition").exists():
        return [f"is partition {_text(device / 'partition')} of {device.parent.name}, expected the whole device"]
    parts = [device, *(entry.parent for entry in sorted(device.glob("*/partition")))]
    numbers = {_text(part / "dev"): part.name for part in parts}
    reasons = [f"{numbers[number]} is mounted at {place}" for number, place in _mounts(proc) if number in numbers]
    swaps = _swaps(proc)
    reasons += [f"{part.name} is swap" for part in parts if part.name in swaps]
    for part in parts:
        holders = sorted(entry.name for entry in (part / "holders").glob("*"))
        if holders:
            reasons.append(f"{part.name} is held by {', '.join(holders)}")
    if _text(device / "ro") == "1":
        reasons.append("is read-only (is the card's slider at lock?)")
    if size_bytes(device) == 0:
        reasons.append("has no medium in it")
    if not (is_removable(device) or (rehearse and device.name.startswith("loop"))):
        reasons.append("is not removable: a disk of this computer, or one that reports to be one")
    return reasons


def is_removable(device: Path) -> bool:
    """A removable medium or an SD card: card slots report the card as not removable."""
    return _text(device / "removable") == "1" or _text(device / "device/type") == "SD"


def model(device: Path) -> str:
    """The device's name, for people."""
    words = [_text(device / "device" / name) for name in ("vendor", "model", "name")]
    if device.name.startswith("loop"):
        words = ["a loop device of", _text(device / "loop/backing_file")]
    return " ".join(" ".join(words).split()) or "a device without a name"


def size_bytes(device: Path) -> int:
    """sysfs counts units of 512 bytes, whatever the device's sector size is."""
    text = _text(device / "size")
    return int(text) * 512 if text.isdigit() else 0


def removable(sys: Path = SYS) -> list[Path]:
    """The devices in sysfs that may be cards."""
    return [path for path in sorted((sys / "block").glob("*")) if is_removable(path) and size_bytes(path)]


def _hint(sys: Path) -> str:
    cards = [f"/dev/{path.name} ({model(path)}, {size_bytes(path) / 1e9:.1f} GB)" for path in removable(sys)]
    return f"removable here: {', '.join(cards)}" if cards else "nothing removable is in this computer now"


def _mounts(proc: Path) -> list[tuple[str, str]]:
    """(device number, mount point) of all mounts (proc_pid_mountinfo(5))."""
    fields = [line.split() for line in _text(proc / "self/mountinfo").splitlines()]
    return [(parts[2], parts[4]) for parts in fields if len(parts) > 4]


def _swaps(proc: Path) -> set[str]:
    """Names below /dev of the swap devices."""
    lines = _text(proc / "swaps").splitlines()[1:]
    return {Path(os.path.realpath(line.split()[0])).name for line in lines if line.split()}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
