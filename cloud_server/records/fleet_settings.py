"""The settings of a fleet: the tables and keys of ``fleet.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.link.broker_password import BrokerLogin
from fleet_core.model.choose_codec import AUTO
from fleet_core.model.layout import Backbone, InputSpec
from fleet_core.model.select_arrays import TrainSection
from fleet_core.privacy.settings import PrivacySection
from fleet_core.robust.settings import RobustSection
from fleet_core.tasks.task import VARIANTS, Task

NAME = r"[A-Za-z0-9_-]{1,64}"
SERVE_MIN_CHANGE = 0.001
ABOVE_0 = {"above": 0, "max": 1e18}


@dataclass(frozen=True)
class FleetSection:
    """The table ``fleet``. ``about`` is the comment above the key in a new fleet.toml."""

    name: str = field(metadata={"pattern": NAME, "words": "1 to 64 letters, digits, '-' or '_'",
                                "about": "The fleet's name in every topic; devices know it, so it stays."})
    method: str = field(default="pfldyn-proto", metadata={
        "choices": METHODS, "about": "What is learned and how; 'metafleet methods' lists what there is."})
    rounds: int = field(default=30, metadata={"min": 1, "max": 1_000_000, "about":
        "Rounds of training in all. To go on after the last one: raise this and start the server again."})
    cohort: int = field(default=0, metadata={"min": 0, "max": 1_000_000, "about":
        "Devices that are asked to train in a round, drawn anew for each round; 0: all that are on."})
    min_devices: int = field(default=1, metadata={"min": 1, "max": 1_000_000, "about":
        "A round begins when this many devices are on and can train."})
    quorum: float = field(default=0.5, metadata={"above": 0, "max": 1, "about":
        "A round closes only with updates of at least this share of the devices that it asked."})
    deadline_s: float = field(default=120.0, metadata={"above": 0, "max": 1e6, "about":
        "Seconds that a round waits for devices that are on and have not delivered; with all updates it closes at once."
    })
    first_wait_s: float = field(default=30.0, metadata={"min": 0, "max": 1e6, "about":
        "Seconds that round 1 waits for enrolled devices that are not on yet; 0: it does not wait."})
    serve_every: int = field(default=10, metadata={"min": 1, "max": 1_000_000, "about":
        "Devices get a new model to answer with after every this many rounds, and after the last one."})
    serve_min_change: float = field(default=SERVE_MIN_CHANGE, metadata={"min": 0, "max": 1, "about":
        "They get it only if its weights changed by this share of their norm; 0: if a bit differs."})
    enrolment: str = field(default="open", metadata={"choices": ("open", "listed"), "about":
        "open: every device that reaches the broker joins; listed: only those of 'metafleet devices enroll'."})
    seed: int = field(default=0, metadata={"min": 0, "max": 2**53, "about":
        "Seed of the first weights and of the draw of cohorts."})


@dataclass(frozen=True)
class ModelSection:
    """name: a named model or ``package.module:build``. classes: names in the order of the labels; they never change.
    backbone: computes the model's input from raw samples; None for a model that takes raw samples. task: what the model
    answers if it is not one of ``classes``, which are then empty."""

    name: str = field(metadata={"max_length": 200})
    input: InputSpec
    classes: tuple[str, ...] = field(metadata={"max_length": 10_000})
    options: Mapping[str, Any] = field(default_factory=dict)
    backbone: Backbone | None = field(default=None, metadata={"sparse": True})
    task: Task | None = field(default=None, metadata={"sparse": True, "variants": VARIANTS})

    @property
    def sample(self) -> InputSpec:
        """The form of a raw sample, as users send it."""
        return self.input if self.backbone is None else self.backbone.input

    @property
    def outputs(self) -> tuple[str, ...] | None:
        """Names of the targets, as readers of samples take them; None for samples without targets."""
        return None if self.task is None else self.task.columns or None


@dataclass(frozen=True)
class LinkSection:
    """broker: as ``parse_url`` takes it; None for a private broker. enrolment: mqtts://host:port of the enrolment port;
    None for the port after the broker's. ca: PEM file, beside fleet.toml, of the authority that signs the broker's
    certificate; None for the fleet's own, ``system`` for those that the system trusts. plain: allow mqtt:// and ws://
    beyond this machine. chunk_bytes: maximum payload of one publish. max_update_norm: norm above which an update is
    refused; None for the adaptive bound (``fleet_core.robust.norm_bound``)."""

    broker: str | None = None
    enrolment: str | None = None
    ca: str | None = None
    plain: bool = False
    up: str = field(default="int8", metadata={"choices": (*CODECS, AUTO), "about":
        "How updates travel to the server: int8 (a byte a value), fp32 (exact), auto (by round); "
        "'metafleet codecs' lists all."})
    down: str = field(default="int8", metadata={"choices": (*CODECS, AUTO), "about":
        "How models travel to the devices: the same choice."})
    chunk_bytes: int = field(default=61440, metadata={"min": 1024, "max": (8 << 20) - 4096})
    skip_below: float = field(default=0.0, metadata={"min": 0, "max": 1, "about":
        "An update whose norm is below this share of the last rounds' mean is not sent (0.2, say); 0: all are."})
    max_update_norm: float | None = field(default=None, metadata={"above": 0})


@dataclass(frozen=True)
class Amounts:
    """Limits; None for no limit. bytes: bytes up and down together, from the largest counter that is reported (wire,
    MQTT or payload). joules: energy of the work, without idle time. money: in the currency of tariff.toml, without
    monthly fee and included volume."""

    bytes: float | None = field(default=None, metadata=ABOVE_0)
    joules: float | None = field(default=None, metadata=ABOVE_0)
    money: float | None = field(default=None, metadata=ABOVE_0)


@dataclass(frozen=True)
class BudgetSection(Amounts):
    """The fleet's limits: once a limit is reached, no further round opens. target_accuracy: the run ends at this mean
    accuracy of the devices that train. patience: the run ends after this many evaluations in a row without a gain of
    more than ``min_gain`` over the best. device_day: limits of one device per day (UTC); a device that reaches a limit
    is not asked again until the next day."""

    target_accuracy: float | None = field(default=None, metadata={"above": 0, "max": 1})
    patience: int | None = field(default=None, metadata={"min": 1, "max": 1_000_000})
    min_gain: float = field(default=0.002, metadata={"min": 0, "max": 1})
    device_day: Amounts = field(default_factory=Amounts)


@dataclass(frozen=True)
class AlertsSection:
    """Where alerts are sent, and when an alert is raised (``integrations.alerts``).

    command: a program and its arguments. webhook: URL. mqtt: also publish to the fleet's broker, under ``alert/``.
    lost_after_s: a device that took part has been off for longer than this. disk_mib: less room than this is left.
    certificate_days: a certificate expires within this number of days. accuracy_drop: accuracy is this far below the
    best earlier round. pause_s: least time between two messages of a kind. repeat_s: time after which an alert is sent
    again."""

    command: tuple[str, ...] = field(default=(), metadata={"max_length": 4096})
    webhook: str | None = field(default=None, metadata={"max_length": 2000})
    mqtt: bool = False
    lost_after_s: float = field(default=900.0, metadata={"min": 0, "max": 1e8})
    disk_mib: float = field(default=500.0, metadata={"min": 0, "max": 1e9})
    certificate_days: float = field(default=7.0, metadata={"min": 0, "max": 36_500})
    accuracy_drop: float = field(default=0.05, metadata={"above": 0, "max": 1})
    pause_s: float = field(default=300.0, metadata={"min": 0, "max": 1e8})
    repeat_s: float = field(default=86_400.0, metadata={"min": 60, "max": 1e8})


@dataclass(frozen=True)
class KeepSection:
    """How much history stays in a fleet's folder. rounds: ``ledger.fold_rounds`` folds earlier ones. audit_files: of
    ``identity.audit_files``."""

    rounds: int = field(default=1000, metadata={"min": 0, "max": 1_000_000, "about":
        "Rounds that are kept one by one, at least 50; earlier ones are folded into sums. 0: all are kept."})
    audit_files: int = field(default=8, metadata={"min": 0, "max": 1_000_000, "about":
        "Full files of the audit log that are kept, 4 MiB each; older ones are deleted. 0: all are kept."})


@dataclass(frozen=True)
class FleetRobustSection(RobustSection):
    """``[robust]`` with the settings that a simulation does not have."""

    quarantine: bool = field(default=False, metadata={"about":
        "true: a device that had most of its last ten updates refused is not asked until 'metafleet devices release'."})
    roll_back: float = field(default=0.0, metadata={"min": 0, "max": 1, "about":
        "Training goes back when half of the devices lose more accuracy than this, as 0.1; 0: by hand only."})


@dataclass(frozen=True)
class FleetConfig:
    """The contents of fleet.toml. hyper: the method's hyper-parameters; unknown names are refused. budget: None for no
    limits. alerts: None for no alerts."""

    fleet: FleetSection
    model: ModelSection
    link: LinkSection = field(default_factory=LinkSection)
    broker_login: BrokerLogin = field(default_factory=BrokerLogin, metadata={"sparse": True})
    train: TrainSection = field(default_factory=TrainSection)
    robust: FleetRobustSection = field(default_factory=FleetRobustSection)
    privacy: PrivacySection = field(default_factory=PrivacySection)
    hyper: Mapping[str, Any] = field(default_factory=dict)
    keep: KeepSection = field(default_factory=KeepSection)
    budget: BudgetSection | None = None
    alerts: AlertsSection | None = None


NOTES = {
    f"{section}.{key.name}": str(key.metadata["about"])
    for section, kind in (("fleet", FleetSection), ("link", LinkSection), ("train", TrainSection),
                          ("robust", FleetRobustSection), ("privacy", PrivacySection), ("keep", KeepSection))
    for key in fields(kind)
    if "about" in key.metadata
}
"""Comments for the keys of fleet.toml that users may want to change."""
