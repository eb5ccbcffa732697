"""Which meter a process gets: a sensor where one can be read, else a model, else none, which means *not measured*."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from fleet_core.errors import ConfigError, PowerError
from fleet_core.power import profile as profiles
from fleet_core.power.meter import Meter
from fleet_core.power.model import BoardModel, WattsModel
from fleet_core.power.rapl import ZONES, Rapl

log = logging.getLogger(__name__)


def choose_meter(
    profile: Path | None = None, meter_watts: tuple[float, float] | None = None, root: Path = Path("/")
) -> Meter | None:
    """RAPL if it can be read; else the model of the user's watts or of the profile; else None, *not measured*.

    profile: a board's TOML file. A board that has no sensor of its own is modelled wherever it runs: the joules of
        another machine's sensor are not the board's.
    meter_watts: (idle, busy) of this machine, from the user; idle also tells a sensor's idle draw from its work.
    root: of the file system.

    Raises ConfigError for a profile or watts that are wrong. A sensor that refuses is logged with what would help.
    """
    _check(meter_watts)
    board = profiles.load(profile) if profile is not None else None
    if board is None or board.power.sensor == "rapl":
        sensor = _sensor(meter_watts[0] if meter_watts else _cited_idle_w(board), root)
        if sensor is not None:
            return sensor
    if meter_watts is not None:
        return WattsModel(*meter_watts, root=root)
    return _model(board) if board is not None else None


def _cited_idle_w(board: profiles.Profile | None) -> float | None:
    return board.power.idle_w if board is not None and board.power.source else None


def _sensor(idle_w: float | None, root: Path) -> Rapl | None:
    if not (root / ZONES).is_dir():
        return None
    try:
        return Rapl(idle_w, root=root)
    except PowerError as error:
        log.warning("energy is not measured by RAPL: %s", error)
        return None


def _model(board: profiles.Profile) -> BoardModel | None:
    """None when no term of the board has a cited constant."""
    model = BoardModel(board)
    return model if set(model.absent_terms) < {"compute", "idle", "radio"} else None


def _check(meter_watts: tuple[float, float] | None) -> None:
    if meter_watts is None:
        return
    idle_w, busy_w = meter_watts
    if not (math.isfinite(busy_w) and 0 <= idle_w <= busy_w):
        raise ConfigError(f"{idle_w:g} {busy_w:g} are no watts", where="--meter-watts", expected="0 ≤ IDLE ≤ BUSY")
