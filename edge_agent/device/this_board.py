"""The board that this agent runs on: its profile, what device.toml says besides, and the limits that follow."""

from __future__ import annotations

from pathlib import Path

from fleet_core.base.errors import ConfigError
from fleet_core.board import catalogue, limits, probe
from fleet_core.board import profile as profiles
from fleet_core.board.device_settings import Settings
from fleet_core.board.limits import Limits, Wish
from fleet_core.board.profile import Profile


def profile_of(home: Path, settings: Settings) -> Profile | None:
    """The profile that device.toml names: a file, relative to ``home``, or a board that ships. Raises ConfigError."""
    name = settings.board.profile
    if name is None:
        return None
    return profiles.load(home / name) if name.endswith(".toml") else catalogue.load(name)


def named(name: str) -> Profile:
    """A board that ships, or a file that ends in .toml. Raises ConfigError."""
    return catalogue.load(name)


def wish_of(settings: Settings) -> Wish:
    train = settings.train
    return Wish(train.enabled, train.max_parameters, train.max_batch, train.threads)


def limits_of(home: Path, settings: Settings) -> Limits:
    """What the agent keeps to on this machine. Raises ConfigError."""
    return limits.limits(profile_of(home, settings), probe.machine(), wish_of(settings))


def remarks(home: Path, settings: Settings) -> list[str]:
    """What differs from the profile that device.toml names, a line each. Raises ConfigError."""
    board = profile_of(home, settings)
    if board is None:
        return []
    return [f"{one.what}: {one.problem}" for one in limits.complaints(board, probe.machine(), wish_of(settings))]


def sensor_of(settings: Settings) -> profiles.Power | None:
    """The sensor that device.toml chooses in place of the profile's, or None."""
    power = settings.power
    if power.sensor is None:
        return None
    return profiles.Power(power.sensor, power.chip, power.rails)


def watts_of(home: Path, settings: Settings) -> tuple[float, float] | None:
    """(idle, busy) as the user measured them. Raises ConfigError for one without the other."""
    power = settings.power
    if (power.idle_w is None) != (power.busy_w is None):
        raise ConfigError("power needs both idle_w and busy_w, or neither", where=str(home / "device.toml"),
                          hint="edge-agent energy calibrate --meter-watts IDLE BUSY")
    return None if power.idle_w is None or power.busy_w is None else (power.idle_w, power.busy_w)
