"""A device's file, ``device.toml``: who it is, where its broker is, where its samples are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from fleet_core.base import config
from fleet_core.base.errors import ConfigError
from fleet_core.board.profile import SENSORS

NAME = r"[A-Za-z0-9_-]{1,64}"


@dataclass(frozen=True)
class Identity:
    """name: of the device. fleet: that it belongs to. broker: mqtt(s)://host:port. key: the fleet's public key, in hex.
    plain: mqtt:// may leave this machine."""

    name: str = field(metadata={"pattern": NAME})
    fleet: str = field(metadata={"pattern": NAME})
    key: str = field(metadata={"pattern": r"[0-9a-f]{64}"})
    broker: str = "mqtt://127.0.0.1:1883"
    plain: bool = False


@dataclass(frozen=True)
class Tls:
    """PEM files, relative to the device's home, for an mqtts:// broker. ca: whose word is taken for the broker; none
    for those that the system trusts. certificate, key: by which the broker knows this device. renew_after: Unix seconds
    from which it asks the aggregator for the next ones; none for a certificate that is not the fleet's."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    renew_after: int | None = field(default=None, metadata={"min": 0, "max": 1 << 40})


@dataclass(frozen=True)
class Data:
    """samples: file or folder, relative to the device's home. train_fraction: share of its time to learn from.
    support_seconds: instead of a share, the first seconds of the recording. stride: of a file of readings, from the
    first of a window to that of the next; none for windows that do not overlap."""

    samples: str = "samples.npz"
    train_fraction: float = field(default=0.6, metadata={"above": 0, "max": 0.99})
    support_seconds: float | None = field(default=None, metadata={"above": 0})
    stride: int | None = field(default=None, metadata={"min": 1, "max": 1_000_000})


@dataclass(frozen=True)
class Training:
    """enabled: take part in rounds (needs torch). threads: of the trainer. max_parameters, max_batch: of the largest
    model and batch, in place of the board's limits."""

    enabled: bool = True
    threads: int = field(default=1, metadata={"min": 1, "max": 256})
    max_parameters: int | None = field(default=None, metadata={"min": 1, "max": 10**12})
    max_batch: int | None = field(default=None, metadata={"min": 1})


@dataclass(frozen=True)
class Board:
    """profile: a board that ships, by name, or a file that ends in .toml, relative to the device's home."""

    profile: str | None = None


@dataclass(frozen=True)
class Power:
    """sensor, chip, rails: in place of the profile's. idle_w, busy_w: a meter's readings for this machine, in watts."""

    sensor: str | None = field(default=None, metadata={"choices": SENSORS})
    chip: str | None = field(default=None, metadata={"max_length": 64})
    rails: tuple[str, ...] = field(default=(), metadata={"max_length": 32})
    idle_w: float | None = field(default=None, metadata={"min": 0})
    busy_w: float | None = field(default=None, metadata={"min": 0})


WAYS = ("method", "proto", "head", "knn", "adapt", "none")


@dataclass(frozen=True)
class Personalize:
    """by: what makes answers the device's own: what the fleet's method says, class means, a head fitted here on
    embedded samples, the nearest samples, gradient steps, or nothing. steps, rate: of gradient steps (steps also of a
    fitted head), in place of the method's. int8: embed by the quantized encoder, where a bundle brought one."""

    by: str = field(default="method", metadata={"choices": WAYS})
    steps: int | None = field(default=None, metadata={"min": 1, "max": 10_000})
    rate: float | None = field(default=None, metadata={"above": 0, "max": 1000})
    int8: bool = False


@dataclass(frozen=True)
class Serve:
    """host, port: of answers over plain HTTP, for loopback or a network that is trusted; port 0 for none in
    ``edge-agent run``.

    unknown: tell samples that are far from all that the device knows; unknown_quantile: the share of its own samples
    that is to stay known. worse_by: what answers the device's held-back samples worse by more than this accuracy does
    not take the place of what answered before: a new model, another personalization, or more labelled samples.
    """

    host: str = field(default="127.0.0.1", metadata={"max_length": 255})
    port: int = field(default=0, metadata={"min": 0, "max": 65535})
    unknown: bool = False
    unknown_quantile: float = field(default=0.95, metadata={"above": 0, "max": 1})
    worse_by: float = field(default=0.1, metadata={"min": 0, "max": 1})


@dataclass(frozen=True)
class Settings:
    """The whole file."""

    device: Identity
    data: Data = field(default_factory=Data)
    train: Training = field(default_factory=Training)
    board: Board = field(default_factory=Board)
    power: Power = field(default_factory=Power)
    personalize: Personalize = field(default_factory=Personalize)
    serve: Serve = field(default_factory=Serve)
    tls: Tls = field(default_factory=Tls)

    def listening(self, host: str, port: int) -> Settings:
        """The same, with answers over HTTP at ``host`` and ``port``."""
        return replace(self, serve=replace(self.serve, host=host, port=port))


def settings_of(home: Path, broker: str | None = None) -> Settings:
    """``device.toml`` in ``home``; ``broker`` in place of the file's. Raises ConfigError."""
    path = home / "device.toml"
    if not path.exists():
        hint = "metafleet devices enroll FLEET NAME --to HOME"
        raise ConfigError("there is no device here", where=str(path), hint=hint)
    settings = config.load(Settings, path)
    return settings if broker is None else replace(settings, device=replace(settings.device, broker=broker))
