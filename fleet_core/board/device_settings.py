"""A device's settings, ``device.toml``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from fleet_core.base import config
from fleet_core.base.errors import ConfigError
from fleet_core.board import source_settings
from fleet_core.board.profile import SENSORS
from fleet_core.board.source_settings import BUTTONS, SOURCES, Button, Mqtt, Source
from fleet_core.link.broker_password import BrokerLogin

ENGINES = ("torch", "onnx")
NAME = r"[A-Za-z0-9_-]{1,64}"
FOLDER = "samples"
"""Where samples lie in files of their own, if no ``samples.npz`` is there."""


@dataclass(frozen=True)
class Identity:
    """name: of the device. fleet: its fleet's name. broker: as ``parse_url`` takes it. key: the fleet's public key, in
    hex. plain: allows mqtt:// to a broker on another machine."""

    name: str = field(metadata={"pattern": NAME})
    fleet: str = field(metadata={"pattern": NAME})
    key: str = field(metadata={"pattern": r"[0-9a-f]{64}"})
    broker: str = "mqtt://127.0.0.1:1883"
    plain: bool = False


@dataclass(frozen=True)
class Tls:
    """PEM files, relative to the device's home, for an mqtts:// broker. ca: the authority that signed the broker's
    certificate; None: those that the system trusts. certificate, key: identify this device to the broker. renew_after:
    Unix seconds after which the device asks the aggregator for a new certificate; None for a certificate that the fleet
    did not issue."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    renew_after: int | None = field(default=None, metadata={"min": 0, "max": 1 << 40})


@dataclass(frozen=True)
class Data:
    """samples: file or folder, relative to the device's home; if left out, ``samples.npz`` or the folder ``samples``.
    train_fraction: share of the recording's time used for training. support_seconds: use the first seconds of the
    recording instead of a share. stride: for a table of readings or sound, the readings between the starts of two
    windows; None: the fleet's stride."""

    samples: str = "samples.npz"
    train_fraction: float = field(default=0.6, metadata={"above": 0, "max": 0.99})
    support_seconds: float | None = field(default=None, metadata={"above": 0})
    stride: int | None = field(default=None, metadata={"min": 1, "max": 1_000_000})


@dataclass(frozen=True)
class Training:
    """The table ``train`` of device.toml. fleet.toml has another one, which says which arrays all devices train.

    enabled: train in rounds. engine: what computes the gradients: ``torch``; ``onnx``, the fleet's graph ``train``,
    without torch; ``auto``: onnx where torch is not installed or the board has less than 1 GB of memory. threads:
    number of threads of the trainer. max_parameters, max_batch: limits on model and batch that replace the board's.
    """

    enabled: bool = True
    engine: str = field(default="auto", metadata={"choices": ("auto", *ENGINES)})
    threads: int = field(default=1, metadata={"min": 1, "max": 256})
    max_parameters: int | None = field(default=None, metadata={"min": 1, "max": 10**12})
    max_batch: int | None = field(default=None, metadata={"min": 1})


@dataclass(frozen=True)
class Board:
    """profile: the name of a shipped board, or a file that ends in .toml, relative to the device's home."""

    profile: str | None = None


@dataclass(frozen=True)
class Power:
    """sensor, chip, rails: replace the profile's. idle_w, busy_w: watts of this machine, read from a meter."""

    sensor: str | None = field(default=None, metadata={"choices": SENSORS})
    chip: str | None = field(default=None, metadata={"max_length": 64})
    rails: tuple[str, ...] = field(default=(), metadata={"max_length": 32})
    idle_w: float | None = field(default=None, metadata={"min": 0})
    busy_w: float | None = field(default=None, metadata={"min": 0})


@dataclass(frozen=True)
class Radio:
    """kind: of the link to the broker; if left out, that of the interface with the default route. j_per_byte: joules of
    a byte sent or received, in place of the profile's and of the default for the kind."""

    kind: str | None = field(default=None, metadata={"choices": ("wifi", "lte", "ethernet")})
    j_per_byte: float | None = field(default=None, metadata={"min": 0, "max": 1})


WAYS = ("method", "proto", "head", "knn", "adapt", "none", "auto")


@dataclass(frozen=True)
class Personalize:
    """by: the personalizer: ``method`` (that of the fleet's method), ``proto`` (class means), ``head`` (a head fitted
    to embedded samples), ``knn`` (nearest samples), ``adapt`` (gradient steps), ``none``, or ``auto`` (a mixture of the
    personalizers without gradient steps). steps, rate: number and learning rate of gradient steps, replacing the
    method's; steps also for a fitted head. int8: use the quantized encoder, if the bundle has one. frequent: class
    means count how frequent a class is among the labelled samples, as ``auto`` always does."""

    by: str = field(default="method", metadata={"choices": WAYS})
    steps: int | None = field(default=None, metadata={"min": 1, "max": 10_000})
    rate: float | None = field(default=None, metadata={"above": 0, "max": 1000})
    int8: bool = False
    frequent: bool = field(default=False, metadata={"sparse": True})


@dataclass(frozen=True)
class Serve:
    """host, port: where HTTP requests are answered; port 0: not at all in ``edge-agent run``. names: further host names
    by which a client may reach it; see ``fleet_core.link.host_names``.

    Beyond this machine a client needs TLS and a token (``edge_agent.http.access``), unless ``open`` allows plain HTTP
    to everyone. token, certificate, key: files relative to the device's home; on this machine nothing is asked for
    unless they are set. requests_per_s: limit for one client's address, on average; if left out, no limit on this
    machine, and 50 beyond it.

    unknown: mark samples that are far from all known samples. unknown_quantile: the share of the device's own samples
    that should count as known. worse_by: a new model, another personalization or more labelled samples are rejected
    when the accuracy on the device's test samples falls by more than this.
    """

    host: str = field(default="127.0.0.1", metadata={"max_length": 255})
    port: int = field(default=0, metadata={"min": 0, "max": 65535})
    names: tuple[str, ...] = field(default=(), metadata={"max_length": 32})
    open: bool = False
    token: str | None = None
    certificate: str | None = None
    key: str | None = None
    requests_per_s: float | None = field(default=None, metadata={"above": 0})
    unknown: bool = False
    unknown_quantile: float = field(default=0.95, metadata={"above": 0, "max": 1})
    worse_by: float = field(default=0.1, metadata={"min": 0, "max": 1})


@dataclass(frozen=True)
class Metrics:
    """host, port: where ``edge-agent run`` answers Prometheus; port 0: not at all. names: as ``Serve.names``. token: a
    file relative to the device's home, with the token that a scraper has to show; made if it is missing."""

    host: str = field(default="127.0.0.1", metadata={"max_length": 255})
    port: int = field(default=0, metadata={"min": 0, "max": 65535})
    names: tuple[str, ...] = field(default=(), metadata={"max_length": 32})
    token: str | None = None


@dataclass(frozen=True)
class Unlabelled:
    """max_bytes: disk space for samples without a label. max_age_s: seconds after which such a sample is removed."""

    max_bytes: int = field(default=1 << 26, metadata={"min": 8192, "max": 1 << 40})
    max_age_s: float = field(default=604_800.0, metadata={"above": 0})


@dataclass(frozen=True)
class Alarm(Mqtt):
    """Of a fleet that detects anomalies. command: a program and its words, which runs in the device's home when a
    sample is an alarm; empty: none. topic: what MQTT topic a message is published to; empty: none. every_s: seconds
    from one run, and from one message, to the next, at least."""

    command: tuple[str, ...] = field(default=(), metadata={"max_length": 4096})
    every_s: float = field(default=60.0, metadata={"min": 0, "max": 86_400})
    topic: str = field(default="", kw_only=True, metadata={"max_length": 1024})


@dataclass(frozen=True)
class Demands:
    """How the fleet must protect this device's updates; it trains in no round that protects them less.

    secure_aggregation: the aggregator gets only sums. noise_multiplier: the least noise that the device itself adds, in
    multiples of the clip; 0: none.
    """

    secure_aggregation: bool = False
    noise_multiplier: float = field(default=0.0, metadata={"min": 0, "max": 1e9})

    def unmet(self, *, secure: bool, noise: float) -> str:
        """The unmet demand in words, or empty. secure: whether there is secure aggregation. noise: the multiplier in
        the mode ``local``, else 0."""
        if self.secure_aggregation and not secure:
            return "it demands secure aggregation"
        if noise < self.noise_multiplier:
            return f"it demands local noise of {self.noise_multiplier:g} times the clip, and adds {noise:g} here"
        return ""


@dataclass(frozen=True)
class Settings:
    """The contents of ``device.toml``."""

    device: Identity
    data: Data = field(default_factory=Data)
    train: Training = field(default_factory=Training)
    board: Board = field(default_factory=Board)
    power: Power = field(default_factory=Power)
    radio: Radio = field(default_factory=Radio)
    personalize: Personalize = field(default_factory=Personalize)
    serve: Serve = field(default_factory=Serve)
    metrics: Metrics = field(default_factory=Metrics)
    tls: Tls = field(default_factory=Tls)
    unlabelled: Unlabelled = field(default_factory=Unlabelled)
    alarm: Alarm = field(default=Alarm(), metadata={"sparse": True})
    privacy: Demands = field(default_factory=Demands)
    broker_login: BrokerLogin = field(default_factory=BrokerLogin)
    source: tuple[Source, ...] = field(default=(), metadata={"variants": SOURCES, "max_length": 32, "sparse": True})
    button: tuple[Button, ...] = field(default=(), metadata={"variants": BUTTONS, "max_length": 32, "sparse": True})

    def listening(self, host: str, port: int, *, open: bool = False) -> Settings:
        """These settings with another HTTP ``host`` and ``port``. open: allow plain HTTP to everyone there."""
        return replace(self, serve=replace(self.serve, host=host, port=port, open=open or self.serve.open))


def settings_of(home: Path, broker: str | None = None) -> Settings:
    """Reads ``device.toml`` in ``home``; ``broker`` replaces the file's. Raises ConfigError."""
    path = home / "device.toml"
    if not path.exists():
        hint = "metafleet devices enroll FLEET NAME --to HOME"
        raise ConfigError("there is no device here", where=str(path), hint=hint)
    settings = config.load(Settings, path)
    source_settings.check(settings.source, settings.button, str(path))
    if settings.data.samples == Data.samples and not (home / Data.samples).exists() and (home / FOLDER).is_dir():
        settings = replace(settings, data=replace(settings.data, samples=FOLDER))
    return settings if broker is None else replace(settings, device=replace(settings.device, broker=broker))
