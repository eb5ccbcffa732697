"""Joules of the processor packages from Intel's and AMD's RAPL counters, shared among the processes of the machine.

Linux powercap: ``/sys/class/powercap/intel-rapl:N/energy_uj`` in microjoules, wrapping at ``max_energy_range_uj``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fleet_core.base.errors import PowerError
from fleet_core.power.meter import Interval
from fleet_core.power.shared_counter import Share

ZONES = "sys/class/powercap"
ZONE = re.compile(r"intel-rapl:\d+")  # a package; intel-rapl:0:1 is a part of one


@dataclass(frozen=True)
class Package:
    """One processor package. Its counter goes back to 0 after ``wrap_uj``."""

    folder: Path
    name: str
    wrap_uj: int

    def read_uj(self) -> int:
        return _whole(self.folder / "energy_uj")

    def advance_uj(self, before_uj: int, now_uj: int) -> int:
        """Microjoules from one reading to the next, over at most one wrap."""
        return max(0, now_uj - before_uj if now_uj >= before_uj else now_uj + self.wrap_uj + 1 - before_uj)


@dataclass(frozen=True)
class Packages:
    """All packages of the machine as one counter."""

    all: tuple[Package, ...]

    @staticmethod
    def found(root: Path) -> Packages:
        """Raises PowerError when there is no package, or none that this user may read."""
        found = []
        for folder in sorted((root / ZONES).glob("intel-rapl:*")):
            # beside the packages there may be "psys", the platform, which holds them: never add it to them
            if ZONE.fullmatch(folder.name) and _text(folder / "name").startswith("package"):
                found.append(Package(folder, _text(folder / "name"), _whole(folder / "max_energy_range_uj")))
        if not found:
            raise PowerError("has no processor package", where=str(root / ZONES), expected="RAPL counters")
        packages = Packages(tuple(found))
        packages.read_uj()
        return packages

    def read_uj(self) -> dict[str, int]:
        """{package: its counter}."""
        return {package.name: package.read_uj() for package in self.all}

    def advance_j(self, before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float:
        """Joules between two readings."""
        known = [p for p in self.all if p.name in before_uj and p.name in now_uj]
        return sum(p.advance_uj(before_uj[p.name], now_uj[p.name]) for p in known) / 1e6

    def unknown_s(self, before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float:
        """0: the counters count all the time."""
        return 0.0


class Rapl:
    """Meter of one process's share of the processor packages.

    Args:
        idle_w: watts of the idle packages; None where unknown: idle draw then cannot be told from work and is shared
            with it, which ``source`` says.
        root: of the file system. pid, clock: as in ``Share``.

    Raises PowerError where there is no counter, or none that may be read.
    """

    measured = True

    def __init__(
        self,
        idle_w: float | None = None,
        *,
        root: Path = Path("/"),
        pid: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._packages = Packages.found(root)
        self._share = Share(self._packages, "rapl", idle_w, root=root, pid=pid, clock=clock)
        names = ", ".join(package.name for package in self._packages.all)
        self.source = f"RAPL {names}" + ("" if idle_w is not None else " (idle draw not told apart)")
        self.absent_terms: Mapping[str, str] = {"radio": "RAPL sees the processor package alone"}
        if idle_w is None:
            self.absent_terms = {"idle": "no idle watts known; it is within the other phases", **self.absent_terms}
        self._counted_j, self._last_uj = 0.0, self._packages.read_uj()

    def read_j(self) -> float:
        """Joules that the sensor itself counted, for all processes, since this meter was opened. Raises PowerError."""
        before_uj, self._last_uj = self._last_uj, self._packages.read_uj()
        self._counted_j += self._packages.advance_j(before_uj, self._last_uj)
        return self._counted_j

    def interval(self) -> Interval:
        return self._share.interval()

    def compute_j(self, flops: float) -> None:
        """None: the counter holds it."""

    def radio_j(self, payload_bytes: int) -> None:
        """None: the counter does not see it."""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except PermissionError as error:
        raise PowerError(
            "may not be read by this user",
            where=str(path),
            hint=f"as root: chmod a+r {path} (until the next start), or give --meter-watts IDLE BUSY",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise PowerError(f"does not read: {error}", where=str(path)) from error


def _whole(path: Path) -> int:
    text = _text(path)
    if not re.fullmatch(r"[0-9]{1,20}", text):
        raise PowerError(f"reads '{text[:40]}'", where=str(path), expected="whole microjoules")
    return int(text)
