"""The board that this agent runs on: its profile, the settings of device.toml for it, and the resulting limits."""

from __future__ import annotations

from pathlib import Path

from fleet_core.base.errors import ConfigError
from fleet_core.board import catalogue, limits, probe
from fleet_core.board import profile as profiles
from fleet_core.board.device_settings import Settings
from fleet_core.board.limits import Limits, Wish
from fleet_core.board.profile import Profile
from fleet_core.link.host_names import is_loopback
from fleet_core.power import radio
from fleet_core.power.radio import RadioModel


def profile_of(home: Path, settings: Settings) -> Profile | None:
    """The profile that device.toml names: a file, relative to ``home``, or a profile of the catalogue. Raises
    ConfigError."""
    name = settings.board.profile
    if name is None:
        return None
    return profiles.load(home / name) if name.endswith(".toml") else catalogue.load(name)


def named(name: str) -> Profile:
    """A profile of the catalogue, or a file that ends in .toml. Raises ConfigError."""
    return catalogue.load(name)


def board_of(home: Path, settings: Settings) -> str:
    """What this machine is, for people: its own model as in the device tree, else the title of its profile, else its
    architecture. Raises ConfigError."""
    found, profile = probe.machine(), profile_of(home, settings)
    return found.model or (profile.title if profile is not None else found.arch)


def providers_of(home: Path, settings: Settings) -> tuple[str, ...]:
    """The providers that may compute a backbone here, besides those that always may. Raises ConfigError."""
    profile = profile_of(home, settings)
    return () if profile is None else profile.compute.providers


def wish_of(settings: Settings) -> Wish:
    train = settings.train
    return Wish(train.enabled, train.max_parameters, train.max_batch, train.threads, train.engine)


def limits_of(home: Path, settings: Settings) -> Limits:
    """Raises ConfigError."""
    return limits.limits(profile_of(home, settings), probe.machine(), wish_of(settings))


def remarks(home: Path, settings: Settings) -> list[str]:
    """A line for each difference between this machine and the profile of device.toml. Raises ConfigError."""
    board = profile_of(home, settings)
    if board is None:
        return []
    found = limits.complaints(board, probe.machine(), wish_of(settings))
    return [f"{complaint.what}: {complaint.problem}" for complaint in found]


def sensor_of(settings: Settings) -> profiles.Power | None:
    """The power sensor of device.toml, which replaces the profile's, or None."""
    power = settings.power
    if power.sensor is None:
        return None
    return profiles.Power(power.sensor, power.chip, power.rails)


def watts_of(home: Path, settings: Settings) -> tuple[float, float] | None:
    """(idle, busy) watts that the user measured, or None. Raises ConfigError if only one of them is given."""
    power = settings.power
    if (power.idle_w is None) != (power.busy_w is None):
        raise ConfigError("power needs both idle_w and busy_w, or neither", where=str(home / "device.toml"),
                          hint="edge-agent energy calibrate --meter-watts IDLE BUSY")
    return None if power.idle_w is None or power.busy_w is None else (power.idle_w, power.busy_w)


def radio_of(home: Path, settings: Settings, root: Path = Path("/")) -> RadioModel:
    """The model of the joules of bytes to the broker. Raises ConfigError."""
    from fleet_core.link.mqtt import parse_url  # loads paho, which most commands do not need

    if settings.radio.kind is None and is_loopback(parse_url(settings.device.broker).host):
        return RadioModel(absent="none: the broker is on this machine")
    kind = settings.radio.kind or radio.kind_of_link(root)
    return radio.radio_of(kind, profile_of(home, settings), settings.radio.j_per_byte)
