"""Joules of the processor packages from Intel's and AMD's RAPL counters, divided among the processes of the machine.

Linux powercap: ``/sys/class/powercap/intel-rapl:N/energy_uj`` in microjoules, wrapping at ``max_energy_range_uj``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fleet_core.base.error_bounds import Spread
from fleet_core.base.errors import PowerError
from fleet_core.power.meter import Interval
from fleet_core.power.sensors.interface import number_of, text_of
from fleet_core.power.shared_counter import Share

ZONES = "sys/class/powercap"
ZONE = re.compile(r"intel-rapl:\d+")  # a package; intel-rapl:0:1 is a part of one


@dataclass(frozen=True)
class Package:
    """One processor package. Its counter wraps to 0 after ``wrap_uj``."""

    folder: Path
    name: str
    wrap_uj: int

    def read_uj(self) -> int:
        return _microjoules(self.folder / "energy_uj")

    def advance_uj(self, before_uj: int, now_uj: int) -> int:
        """Microjoules between two readings, with at most one wrap."""
        return max(0, now_uj - before_uj if now_uj >= before_uj else now_uj + self.wrap_uj + 1 - before_uj)


@dataclass(frozen=True)
class Packages:
    """All packages of the machine as one counter."""

    all: tuple[Package, ...]

    @property
    def source(self) -> str:
        return f"RAPL {', '.join(package.name for package in self.all)}"

    @staticmethod
    def detect(root: Path) -> Packages:
        """Raises PowerError when there is no package, or none that this user may read."""
        detected = []
        for folder in sorted((root / ZONES).glob("intel-rapl:*")):
            # "psys", the whole platform, includes the packages and must not be added to them
            if ZONE.fullmatch(folder.name) and text_of(folder / "name").startswith("package"):
                wrap_uj = _microjoules(folder / "max_energy_range_uj")
                detected.append(Package(folder, text_of(folder / "name"), wrap_uj))
        if not detected:
            raise PowerError("has no processor package", where=str(root / ZONES), expected="RAPL counters")
        packages = Packages(tuple(detected))
        packages.read_uj()
        return packages

    def read_uj(self) -> dict[str, int]:
        """{package: counter}."""
        return {package.name: package.read_uj() for package in self.all}

    def advance_j(self, before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float:
        """Joules between two readings."""
        known = [p for p in self.all if p.name in before_uj and p.name in now_uj]
        return sum(p.advance_uj(before_uj[p.name], now_uj[p.name]) for p in known) / 1e6

    def unknown_s(self, before_uj: Mapping[str, int], now_uj: Mapping[str, int]) -> float:
        """0: the counters have no gaps."""
        return 0.0


class Rapl:
    """Meter of one process's share of the processor packages.

    Args:
        idle_w: watts of the idle packages, or None. Without it idle draw is divided like work, which ``source`` says.
        root: of the file system. pid, clock: as in ``Share``.

    Raises PowerError when there is no counter, or none that this user may read.
    """

    measured = True
    includes_radio = False
    spreads: Mapping[str, Spread] = MappingProxyType({})

    def __init__(
        self,
        idle_w: float | None = None,
        *,
        root: Path = Path("/"),
        pid: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._packages = Packages.detect(root)
        self._share = Share(self._packages, "rapl", idle_w, root=root, pid=pid, clock=clock)
        self.source = self._share.source_of(self._packages.source)
        board = {"board": "RAPL measures only the processor package"}
        self.absent_terms: Mapping[str, str] = {**self._share.absent_terms, **board}
        self._counted_j, self._last_uj = 0.0, self._packages.read_uj()

    def read_j(self) -> float:
        """Joules of all processes that the sensor has counted since this meter was opened. Raises PowerError."""
        before_uj, self._last_uj = self._last_uj, self._packages.read_uj()
        self._counted_j += self._packages.advance_j(before_uj, self._last_uj)
        return self._counted_j

    def interval(self) -> Interval:
        return self._share.interval()

    def compute_j(self, flops: float) -> None:
        """None: the counter includes it."""


def _microjoules(path: Path) -> int:
    value = number_of(path)
    if value < 0:
        raise PowerError(f"reads '{value}'", where=str(path), expected="microjoules, at least 0")
    return value
