"""Chooses the meter of a process: a sensor if one can be read, else a model, else none (energy is *not measured*)."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

from fleet_core.base.errors import ConfigError, PowerError
from fleet_core.board import probe
from fleet_core.board.probe import Machine
from fleet_core.board.profile import Power, Profile
from fleet_core.power.energy_model import BoardModel, WattsModel, watts_spreads, whole_machine
from fleet_core.power.meter import Meter
from fleet_core.power.rapl import ZONES, Rapl
from fleet_core.power.sampled_meter import Sampled
from fleet_core.power.sensors import hwmon, ina3221, pmic
from fleet_core.power.sensors.interface import Sensor

log = logging.getLogger(__name__)
EMULATOR = "dummy-virt"
"""In the device tree of QEMU's virtual machines, whose seconds are not a board's."""


def choose_meter(
    board: Profile | None = None,
    meter_watts: tuple[float, float] | None = None,
    root: Path = Path("/"),
    power: Power | None = None,
    found: Machine | None = None,
) -> Meter | None:
    """The sensor if it can be read; else the model of the user's watts or of the board's cited ones; else None.

    board: decides the sensor. A board without a sensor is modelled: from CPU time if this machine is such a board, else
    from its work, because neither the CPU seconds nor the sensor of another machine are the board's. Without a board
    the sensor
        is RAPL.
    meter_watts: (idle, busy) of this machine, from the user; idle also separates a sensor's idle draw from its work.
    root: of the file system.
    power: the user's choice of a sensor instead of the board's.
    found: this machine, by default as ``probe`` finds it.

    Raises ConfigError for wrong watts. A sensor that cannot be read is logged with a hint.
    """
    _check(meter_watts)
    choice = power or (Power("rapl") if board is None else board.power)
    idle_w = meter_watts[0] if meter_watts else choice.idle_w if choice.source else None
    if choice.sensor != "none":
        meter = _sensor_meter(choice, idle_w, root, explicit=board is not None or power is not None)
        if meter is not None:
            return meter
    if meter_watts is not None:
        return WattsModel(*meter_watts, root=root)
    return None if board is None else _model(board, found or probe.machine(root), root)


def is_board(board: Profile, found: Machine) -> bool:
    """Whether the machine can be such a board, by architecture and number of processors."""
    return (
        found.arch == board.arch and board.cores in (None, found.cores) and EMULATOR not in (found.model or "")
    )


def sensor_of(power: Power, root: Path = Path("/")) -> Sensor:
    """The sensor that ``power`` names. Raises PowerError when it cannot be read, and for ``none`` and ``rapl``, which
    are not sensors of watts."""
    sensor = _sensor_of(power, root)
    sensor.read()
    return sensor


def _sensor_of(power: Power, root: Path) -> Sensor:
    if power.sensor == "pmic":
        return pmic.sensor(power.scale, power.offset_w, root, power.misses or "")
    if power.sensor == "ina3221":
        return ina3221.sensor(power.rails, root, power.misses or "")
    if power.sensor == "hwmon" and power.chip:
        return hwmon.find_meter(power.chip, power.rails, root, power.misses or "")
    raise PowerError(f"'{power.sensor}' is not a sensor of watts", expected="pmic, ina3221, or hwmon with a chip")


def _sensor_meter(power: Power, idle_w: float | None, root: Path, *, explicit: bool) -> Meter | None:
    """None when the sensor cannot be read, which is logged; except for RAPL that is absent and not ``explicit``."""
    if power.sensor == "rapl" and not (root / ZONES).is_dir() and not explicit:
        return None
    try:
        if power.sensor == "rapl":
            return Rapl(idle_w, root=root)
        return Sampled(sensor_of(power, root), idle_w, root=root)
    except PowerError as error:
        log.warning("energy is not measured with %s: %s", power.sensor.upper(), error)
        return None


def _model(board: Profile, found: Machine, root: Path) -> Meter | None:
    """None when no term of the board has a cited constant."""
    if is_board(board, found):
        power = whole_machine(board.power, os.cpu_count() or 1)
        if power.source and power.idle_w is not None and power.busy_w is not None:
            source = f"{board.name}: {power.source}"
            return WattsModel(power.idle_w, power.busy_w, source, spreads=watts_spreads(power), root=root)
    model = BoardModel(board)
    return None if {"compute", "idle"} <= set(model.absent_terms) else model


def _check(meter_watts: tuple[float, float] | None) -> None:
    if meter_watts is None:
        return
    idle_w, busy_w = meter_watts
    if not (math.isfinite(busy_w) and 0 <= idle_w <= busy_w):
        raise ConfigError(f"{idle_w:g} {busy_w:g}", where="--meter-watts", expected="watts, 0 ≤ IDLE ≤ BUSY")
