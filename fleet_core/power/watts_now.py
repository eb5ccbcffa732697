"""The present watts of this machine from each available source, and why the other sources are not available."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleet_core.base.errors import PowerError
from fleet_core.board import probe
from fleet_core.board.profile import Power, Profile
from fleet_core.power.choose_meter import is_board, sensor_of
from fleet_core.power.energy_model import BoardModel, whole_machine
from fleet_core.power.rapl import Packages
from fleet_core.power.sensors import hwmon
from fleet_core.power.sensors.cpu import machine_cpu_s
from fleet_core.power.sensors.interface import Reading

Clock = Callable[[], float]


@dataclass(frozen=True)
class Source:
    """misses: consumers that it does not measure. read: the average watts since the last call, or the present watts."""

    name: str
    measured: bool
    misses: str
    read: Callable[[], Reading]


@dataclass
class Readings:
    """The readings of one source."""

    source: Source
    at_s: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    rails: Mapping[str, float] = field(default_factory=dict)

    def take(self, now_s: float) -> None:
        """Raises PowerError."""
        reading = self.source.read()
        self.at_s.append(now_s)
        self.watts.append(reading.watts)
        self.rails = reading.rails

    @property
    def mean_w(self) -> float:
        """The average watts over time, by trapezoids."""
        pairs = zip(self.at_s, self.at_s[1:], self.watts, self.watts[1:], strict=False)
        joules = sum((after_s - before_s) * (a + b) / 2 for before_s, after_s, a, b in pairs)
        seconds = self.at_s[-1] - self.at_s[0]
        return joules / seconds if seconds > 0 else self.watts[-1]


@dataclass(frozen=True)
class Available:
    """absent: {source: why it is not available}. meters: all hwmon meters of the machine."""

    sources: tuple[Source, ...]
    absent: Mapping[str, str]
    meters: tuple[str, ...]


def sources(
    board: Profile | None, power: Power | None, meter_watts: tuple[float, float] | None, root: Path = Path("/"),
    clock: Clock = time.monotonic,
) -> Available:
    """The sensor of device.toml (``power``) or else of the board's profile; RAPL; and the model."""
    available: list[Source] = []
    absent: dict[str, str] = {}
    choice = power or (None if board is None else board.power)
    candidates: list[tuple[str, Callable[[], Source]]] = []
    if choice is not None and choice.sensor not in ("none", "rapl"):
        candidates.append((choice.sensor, lambda: _sensor(choice, root)))
    candidates += [("rapl", lambda: _rapl(root, clock)), ("model", lambda: _model(board, meter_watts, root, clock))]
    for name, open_source in candidates:
        try:
            available.append(open_source())
        except PowerError as error:
            absent[name] = str(error)
    return Available(tuple(available), absent, tuple(hwmon.list_meters(root)))


def _sensor(power: Power, root: Path) -> Source:
    sensor = sensor_of(power, root)
    read = sensor.read_all if isinstance(sensor, hwmon.Rails) else sensor.read
    return Source(sensor.source, True, sensor.misses, read)


def _rapl(root: Path, clock: Clock) -> Source:
    packages = Packages.detect(root)
    last = [(clock(), packages.read_uj())]

    def read() -> Reading:
        (before_s, before_uj), now = last[0], (clock(), packages.read_uj())
        last[0] = now
        seconds = now[0] - before_s
        return Reading(packages.advance_j(before_uj, now[1]) / seconds if seconds > 0 else 0.0)

    return Source(packages.source, True, "all but the processor package", read)


def _model(
    board: Profile | None, meter_watts: tuple[float, float] | None, root: Path, clock: Clock
) -> Source:
    """The user's watts, or on the board itself its cited watts, scaled by CPU load; else the board's cited idle
    draw."""
    if meter_watts is not None:
        return _busy(*meter_watts, root, clock)
    if board is None:
        raise PowerError("there is neither a profile nor measured watts",
                         hint="edge-agent energy calibrate --meter-watts IDLE BUSY")
    power, model = whole_machine(board.power, os.cpu_count() or 1), BoardModel(board)
    idle_w = power.idle_w
    if is_board(board, probe.machine(root)) and power.source and idle_w is not None and power.busy_w is not None:
        return _busy(idle_w, power.busy_w, root, clock, f"{board.name}: {power.source}")
    if "idle" in model.absent_terms or idle_w is None:
        raise PowerError(f"{board.name} has {model.absent_terms.get('idle', 'no idle watts')}",
                         hint="edge-agent energy calibrate --meter-watts IDLE BUSY")
    return Source(model.source, False, "all but the idle draw", lambda: Reading(idle_w))


def _busy(idle_w: float, busy_w: float, root: Path, clock: Clock, source: str = "--meter-watts") -> Source:
    each_w = (busy_w - idle_w) / (os.cpu_count() or 1)
    last = [(clock(), machine_cpu_s(root))]

    def read() -> Reading:
        (before_s, before_cpu_s), now = last[0], (clock(), machine_cpu_s(root))
        last[0] = now
        seconds, cpu_s = now[0] - before_s, max(0.0, now[1] - before_cpu_s)
        return Reading(idle_w + each_w * cpu_s / seconds if seconds > 0 else idle_w)

    return Source(f"model: {idle_w:g} W idle, {busy_w:g} W with all processors busy ({source})", False, "", read)
