"""A board's data file, as far as energy is concerned: TOML whose every constant names its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fleet_core import config
from fleet_core.errors import ConfigError

SENSORS = ("none", "rapl")
TEXT = 500


@dataclass(frozen=True)
class Power:
    """Watts of the whole board, at its input; sensor: what it can measure itself with."""

    sensor: str = field(default="none", metadata={"choices": SENSORS})
    idle_w: float | None = field(default=None, metadata={"min": 0, "max": 100_000})
    busy_w: float | None = field(default=None, metadata={"min": 0, "max": 100_000})
    source: str | None = field(default=None, metadata={"max_length": TEXT})


@dataclass(frozen=True)
class Compute:
    """effective_flop_per_s: reached in training small models, with all cores busy."""

    effective_flop_per_s: float | None = field(default=None, metadata={"above": 0, "max": 1e18})
    source: str | None = field(default=None, metadata={"max_length": TEXT})


@dataclass(frozen=True)
class Radio:
    """j_per_byte: of a byte sent or received, above idle."""

    j_per_byte: float | None = field(default=None, metadata={"min": 0, "max": 1})
    source: str | None = field(default=None, metadata={"max_length": TEXT})


@dataclass(frozen=True)
class Profile:
    """One board. name: as on the command line. arch: as ``uname -m`` says. cores: where they are known."""

    name: str = field(metadata={"pattern": r"[a-z0-9][a-z0-9.\-]{0,63}"})
    title: str = field(metadata={"max_length": 200})
    arch: str = field(metadata={"choices": ("aarch64", "x86_64")})
    cores: int | None = field(default=None, metadata={"min": 1, "max": 4096})
    power: Power = field(default_factory=Power)
    compute: Compute = field(default_factory=Compute)
    radio: Radio = field(default_factory=Radio)


def load(path: Path) -> Profile:
    """The profile in a file. Raises ConfigError that lists every mistake as ``file:line: key: problem``."""
    profile = config.load(Profile, path)
    idle_w, busy_w = profile.power.idle_w, profile.power.busy_w
    if idle_w is not None and busy_w is not None and busy_w < idle_w:
        raise ConfigError(f"power.busy_w: {busy_w:g} is below idle_w, {idle_w:g}", where=str(path))
    return profile
