"""The ledger's tables: the SQLite schema, and a frozen dataclass for each table.

Times are Unix seconds. A figure that was not measured is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from cloud_server.ledger import folded_tables

VERSION = 14
STAGES = ("before", "fine_tuned", "after")

SCHEMA = """
CREATE TABLE fleet (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE control (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY, opened_at REAL NOT NULL, closed_at REAL, cohort TEXT NOT NULL, members INTEGER NOT NULL,
    model_id TEXT NOT NULL, judged_id TEXT, models_transmitted REAL, seconds REAL, loss REAL,
    status TEXT NOT NULL CHECK (status IN ('open', 'closed', 'abandoned')), note TEXT NOT NULL);
CREATE TABLE devices (
    name TEXT PRIMARY KEY, status TEXT NOT NULL CHECK (status IN ('enrolled', 'revoked')),
    enrolled_round INTEGER NOT NULL, first_seen REAL, last_seen REAL,
    state TEXT NOT NULL CHECK (state IN ('on', 'off')), phase TEXT NOT NULL, version TEXT NOT NULL,
    capabilities TEXT NOT NULL, cannot TEXT, took_part INTEGER NOT NULL, new INTEGER NOT NULL);
CREATE TABLE updates (
    round INTEGER NOT NULL REFERENCES rounds, device TEXT NOT NULL REFERENCES devices, update_id TEXT NOT NULL,
    samples INTEGER, loss REAL, payload_bytes INTEGER NOT NULL, chunks INTEGER NOT NULL, received_at REAL NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('counted', 'refused', 'late')), reason TEXT NOT NULL,
    PRIMARY KEY (round, device, update_id));
CREATE TABLE traffic (
    round INTEGER NOT NULL, device TEXT NOT NULL REFERENCES devices,
    direction TEXT NOT NULL CHECK (direction IN ('up', 'down')),
    kind TEXT NOT NULL CHECK (kind IN ('model', 'update', 'serve', 'graph', 'link')),
    payload_bytes INTEGER NOT NULL, mqtt_bytes INTEGER, wire_bytes INTEGER,
    PRIMARY KEY (round, device, direction, kind));
CREATE TABLE energy (
    round INTEGER NOT NULL, device TEXT NOT NULL REFERENCES devices,
    phase TEXT NOT NULL CHECK (phase IN ('train', 'adapt', 'serve', 'radio', 'other', 'idle')),
    joules REAL NOT NULL CHECK (joules >= 0), source TEXT NOT NULL, measured INTEGER NOT NULL,
    PRIMARY KEY (round, device, phase));
CREATE TABLE flops (
    round INTEGER NOT NULL, device TEXT NOT NULL REFERENCES devices, flops REAL NOT NULL,
    PRIMARY KEY (round, device));
CREATE TABLE judgements (
    round INTEGER NOT NULL, device TEXT NOT NULL REFERENCES devices,
    stage TEXT NOT NULL CHECK (stage IN ('before', 'fine_tuned', 'after')), method TEXT NOT NULL,
    confusion TEXT NOT NULL, accuracy REAL NOT NULL, macro_f1 REAL NOT NULL, new INTEGER NOT NULL,
    PRIMARY KEY (round, device, stage));
"""

ADDED = {
    2: """
CREATE TABLE invitations (
    id TEXT PRIMARY KEY, device TEXT NOT NULL, public TEXT NOT NULL, made_at REAL NOT NULL, expires_at REAL NOT NULL,
    spent_at REAL);
CREATE TABLE certificates (
    serial TEXT PRIMARY KEY, device TEXT NOT NULL, token TEXT NOT NULL, public TEXT NOT NULL, certificate TEXT NOT NULL,
    issued_at REAL NOT NULL, expires_at REAL NOT NULL, revoked_at REAL);
""",
    3: "ALTER TABLE devices ADD COLUMN revoked_at REAL;",
    4: """
CREATE TABLE alone (
    round INTEGER NOT NULL, device TEXT NOT NULL REFERENCES devices, frequent INTEGER NOT NULL, method TEXT NOT NULL,
    confusion TEXT NOT NULL, PRIMARY KEY (round, device));
""",
    5: "ALTER TABLE judgements RENAME TO evaluations; ALTER TABLE rounds RENAME COLUMN judged_id TO served_id;",
    6: """
ALTER TABLE energy ADD COLUMN low REAL;
ALTER TABLE energy ADD COLUMN high REAL;
CREATE TABLE absent_energy (
    device TEXT NOT NULL REFERENCES devices, reason TEXT NOT NULL, PRIMARY KEY (device, reason));
CREATE TABLE usage (
    round INTEGER NOT NULL, device TEXT NOT NULL REFERENCES devices, cpu_s REAL, peak_mib REAL, connected_s REAL,
    retransmitted_bytes INTEGER, PRIMARY KEY (round, device));
CREATE TABLE codecs (
    round INTEGER NOT NULL REFERENCES rounds, way TEXT NOT NULL CHECK (way IN ('up', 'down')), codec TEXT NOT NULL,
    reason TEXT NOT NULL, left_out REAL, PRIMARY KEY (round, way));
""",
    7: "ALTER TABLE updates ADD COLUMN skipped INTEGER NOT NULL DEFAULT 0;",
    8: """
CREATE TABLE arrays (
    round INTEGER PRIMARY KEY REFERENCES rounds, frozen TEXT NOT NULL, reason TEXT NOT NULL, moves TEXT NOT NULL);
""",
    9: """
CREATE TABLE privacy (
    round INTEGER PRIMARY KEY REFERENCES rounds, mode TEXT NOT NULL, clip REAL NOT NULL, noise REAL NOT NULL,
    delta REAL NOT NULL, epsilon REAL NOT NULL, spent REAL NOT NULL, most INTEGER NOT NULL);
""",
    10: folded_tables.SCHEMA,
    11: "ALTER TABLE privacy ADD COLUMN asked TEXT NOT NULL DEFAULT '[]';",
    12: """
CREATE TABLE task_evaluations (
    round INTEGER NOT NULL, device TEXT NOT NULL REFERENCES devices,
    stage TEXT NOT NULL CHECK (stage IN ('before', 'fine_tuned', 'after')), method TEXT NOT NULL,
    task TEXT NOT NULL, outputs TEXT NOT NULL, samples INTEGER NOT NULL, sums TEXT NOT NULL, new INTEGER NOT NULL,
    PRIMARY KEY (round, device, stage));
""",
    13: "ALTER TABLE evaluations ADD COLUMN gaps TEXT NOT NULL DEFAULT '[]';",
    14: """
CREATE INDEX IF NOT EXISTS evaluations_of_device ON evaluations (device, stage, round);
CREATE INDEX IF NOT EXISTS task_evaluations_of_device ON task_evaluations (device, stage, round);
CREATE INDEX IF NOT EXISTS alone_of_device ON alone (device, round);
CREATE INDEX IF NOT EXISTS certificates_of_device ON certificates (device);
CREATE INDEX IF NOT EXISTS certificates_of_token ON certificates (token);
CREATE INDEX IF NOT EXISTS invitations_of_device ON invitations (device);
""",
}
"""Version -> the statements that upgrade a ledger from the previous version."""

Confusion = tuple[tuple[int, ...], ...]
"""Counts [N, N]: row = true class, column = answered class."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table ``table``. key: the columns of the primary key."""

    table: ClassVar[str]
    key: ClassVar[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Round(Row):
    """members: number of enrolled devices when it opened. models_transmitted: up and down, in whole models.

    status: open | closed | abandoned. model_id, served_id: the published blobs to train on and to evaluate.
    """

    table = "rounds"
    key = ("round",)
    round: int
    opened_at: float
    closed_at: float | None = None
    cohort: tuple[str, ...] = ()
    members: int = 0
    model_id: str = ""
    served_id: str | None = None
    models_transmitted: float | None = None
    seconds: float | None = None
    loss: float | None = None
    status: str = "open"
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class RoundCodec(Row):
    """The codec of a round's updates or models. way: up | down. reason: of ``auto``, empty for a codec that is set.
    left_out: as ``choose_codec.Past.left``."""

    table = "codecs"
    key = ("round", "way")
    round: int
    way: str
    codec: str
    reason: str = ""
    left_out: float | None = None


@dataclass(frozen=True, kw_only=True)
class RoundArrays(Row):
    """A round that trains a part of the model, or whose arrays are chosen. frozen: "group/name" of the arrays that did
    not move. reason: of ``auto``, empty where patterns alone decide. moves: norm of the move of each array that was
    sent, once the round is closed."""

    table = "arrays"
    key = ("round",)
    round: int
    frozen: tuple[str, ...] = ()
    reason: str = ""
    moves: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RoundPrivacy(Row):
    """A round with private updates, from its opening on. mode, clip, noise, delta: as ``PrivacySection``. epsilon: of
    this round alone, for a device that was asked. spent: total after this round, of the device that has spent most.
    most: the largest number of rounds in which a device was asked. asked: the devices that it asked, also those that
    others have replaced since; empty in rows of older versions."""

    table = "privacy"
    key = ("round",)
    round: int
    mode: str
    clip: float
    noise: float
    delta: float
    epsilon: float
    spent: float
    most: int
    asked: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Device(Row):
    """cannot: why it cannot take part, or None. took_part: whether an update of it was counted. new: it joined only to
    be evaluated. revoked_at: None also for a device that was revoked before ledgers stored the time."""

    table = "devices"
    key = ("name",)
    name: str
    status: str = "enrolled"
    enrolled_round: int = 0
    first_seen: float | None = None
    last_seen: float | None = None
    state: str = "off"
    phase: str = ""
    version: str = ""
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    cannot: str | None = None
    took_part: bool = False
    new: bool = False
    revoked_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Invitation(Row):
    """A token, without its secret. public: its public key. spent_at: when it was used or its device was revoked."""

    table = "invitations"
    key = ("id",)
    id: str
    device: str
    public: str
    made_at: float
    expires_at: float
    spent_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Certificate(Row):
    """An issued certificate. serial: in hex. token: id of the token that it was issued for. public: the device's public
    key."""

    table = "certificates"
    key = ("serial",)
    serial: str
    device: str
    token: str
    public: str
    certificate: str
    issued_at: float
    expires_at: float
    revoked_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Update(Row):
    """A completely received update. status: counted | refused | late. reason: of the last two, and of a counted update
    of which a robust rule left little. skipped: the device sent a note that it is too small; counted as zero."""

    table = "updates"
    key = ("round", "device", "update_id")
    round: int
    device: str
    update_id: str
    received_at: float
    samples: int | None = None
    loss: float | None = None
    payload_bytes: int = 0
    chunks: int = 0
    status: str = "counted"
    reason: str = ""
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Traffic(Row):
    """Bytes of a device in a round. direction: up | down, as seen from the device. kind: model | update | serve |
    graph, or link for bytes of a connection that belong to no payload (``payload_bytes`` 0)."""

    table = "traffic"
    key = ("round", "device", "direction", "kind")
    round: int
    device: str
    direction: str
    kind: str
    payload_bytes: int = 0
    mqtt_bytes: int | None = None
    wire_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Energy(Row):
    """phase: train | adapt | serve | radio | other | idle. source: the meter, or the source of a model's constants.
    low, high: joules between which modelled ones lie; None if measured, or from a device that does not say."""

    table = "energy"
    key = ("round", "device", "phase")
    round: int
    device: str
    phase: str
    joules: float
    source: str
    measured: bool
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class AbsentEnergy(Row):
    """reason: "term: why" the device's joules do not include the term, by its last report."""

    table = "absent_energy"
    key = ("device", "reason")
    device: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Flops(Row):
    """Floating-point operations of a device in a round."""

    table = "flops"
    key = ("round", "device")
    round: int
    device: str
    flops: float


@dataclass(frozen=True, kw_only=True)
class Usage(Row):
    """What a device used in a round, if it reports it; as in ``device_messages.Report``. peak_mib: the peak so far."""

    table = "usage"
    key = ("round", "device")
    round: int
    device: str
    cpu_s: float | None = None
    peak_mib: float | None = None
    connected_s: float | None = None
    retransmitted_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation(Row):
    """Scores of a device's answers on its own test samples. stage: before | fine_tuned | after personalization. gaps:
    as ``calibration.gaps``; empty if the device does not report them."""

    table = "evaluations"
    key = ("round", "device", "stage")
    round: int
    device: str
    stage: str
    method: str
    confusion: Confusion
    accuracy: float
    macro_f1: float
    new: bool = False
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation(Row):
    """Answers of a device without classes to its own test samples. task: its kind. outputs: what is predicted. samples,
    sums: from which the task's measures follow, each sum with a number for each output. The rest as ``Evaluation``."""

    table = "task_evaluations"
    key = ("round", "device", "stage")
    round: int
    device: str
    stage: str
    method: str
    task: str
    outputs: tuple[str, ...]
    samples: int
    sums: Mapping[str, Any]
    new: bool = False


@dataclass(frozen=True, kw_only=True)
class Alone(Row):
    """What a device reaches without the fleet, on the test samples of that round's evaluations. frequent: the most
    frequent class of its own labelled samples. method, confusion: of a plain baseline, empty if there is none."""

    table = "alone"
    key = ("round", "device")
    round: int
    device: str
    frequent: int
    method: str = ""
    confusion: Confusion = ()
