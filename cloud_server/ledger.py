"""The fleet's books: rounds, devices, updates, bytes, joules and judgements in one SQLite file.

One process writes (the aggregator); any number read at the same time (status, live view, report). The command line's
own writes are requests: ``ask`` leaves one and the aggregator ``settle``s it. A ``Ledger`` belongs to the thread that
opened it; another thread or process opens its own on the same path.

Every table is a frozen dataclass below and every row is one object of it: ``put`` writes rows, ``rows`` reads them.
Times are Unix seconds. A figure that was not taken is None, never 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import numbers
import sqlite3
import typing
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from fleet_core.errors import StateError
from fleet_core.power.meter import WORKING

VERSION = 2
APPLICATION = 0x4D464C47  # "MFLG" in the file's header: this SQLite file is a ledger
BUSY_TIMEOUT_S = 10.0
WITHOUT_SYNC = 1  # of PRAGMA synchronous: in a WAL, NORMAL waits for the disk at checkpoints only
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
}
"""What each version added to those before it."""

Confusion = tuple[tuple[int, ...], ...]
"""[N, N] counts: row = true class, column = answered class."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table ``table``; ``key`` names the columns that make it the same row."""

    table: ClassVar[str]
    key: ClassVar[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Round(Row):
    """members: enrolled devices when it opened. models_transmitted: models up and down, in whole models.

    status: open | closed | abandoned. model_id, judged_id: blobs that were published to train on and to judge.
    """

    table = "rounds"
    key = ("round",)
    round: int
    opened_at: float
    closed_at: float | None = None
    cohort: tuple[str, ...] = ()
    members: int = 0
    model_id: str = ""
    judged_id: str | None = None
    models_transmitted: float | None = None
    seconds: float | None = None
    loss: float | None = None
    status: str = "open"
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Device(Row):
    """cannot: why it cannot take part, or None. took_part: an update of it was counted. new: joined to be judged."""

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


@dataclass(frozen=True, kw_only=True)
class Invitation(Row):
    """A token as the aggregator knows it: no secret. public: its key's public half. spent_at: it was used, or its
    device was revoked."""

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
    """A certificate that was issued. serial: in hex. token: the id of the one that it was given for. public: the
    device's public key."""

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
    """An upload that was received whole. status: counted | refused | late, with the reason of the last two."""

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


@dataclass(frozen=True, kw_only=True)
class Traffic(Row):
    """Bytes of a device in a round. direction: up | down, seen from the device. kind: model | update | serve | graph,
    or link: what a connection's counters say that belongs to no single payload (``payload_bytes`` 0)."""

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
    """phase: train | adapt | serve | radio | other | idle. source: the meter, or where a model's constants are from."""

    table = "energy"
    key = ("round", "device", "phase")
    round: int
    device: str
    phase: str
    joules: float
    source: str
    measured: bool


@dataclass(frozen=True, kw_only=True)
class Flops(Row):
    """Floating-point operations of a device in a round."""

    table = "flops"
    key = ("round", "device")
    round: int
    device: str
    flops: float


@dataclass(frozen=True, kw_only=True)
class Judgement(Row):
    """How a device's answers fared on its own test samples. stage: before | fine_tuned | after personalization."""

    table = "judgements"
    key = ("round", "device", "stage")
    round: int
    device: str
    stage: str
    method: str
    confusion: Confusion
    accuracy: float
    macro_f1: float
    new: bool = False


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes up and down. missing: reports (one per device and round) that this sum lacks, None when it is whole."""

    up: int = field(metadata={"min": 0})
    down: int = field(metadata={"min": 0})
    missing: int | None = field(default=None, metadata={"min": 1})


@dataclass(frozen=True, kw_only=True)
class Volume:
    """The three counters, none an estimate of another; mqtt and wire are None where nobody reported them."""

    payload: Bytes
    mqtt: Bytes | None = None
    wire: Bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Joules:
    """value: J of the working phases (idle is the device's own and not in it). phases: J of each phase, idle too.

    source: what measured it or which constants modelled it. missing: counted updates whose device reported no joules.
    """

    value: float = field(metadata={"min": 0})
    source: str
    phases: Mapping[str, float] = field(default_factory=dict, metadata={"min": 0})
    missing: int | None = field(default=None, metadata={"min": 1})


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over the whole life of the fleet, rounds that were abandoned and joins after the last round included."""

    rounds: int
    volume: Volume | None
    payload_by_kind: Mapping[str, Bytes]
    energy: Joules | None
    flops: float | None


R = TypeVar("R", bound=Row)
NEW_LEDGER = "move the file aside and put a backup in its place, or make a new fleet with 'metafleet init'"


class Ledger:
    """The ledger at ``path``; made if absent, unless ``create`` is false.

    Raises StateError when the file is absent (``create`` false), is no ledger, is damaged or is of a newer version;
    it is left as it was.
    """

    def __init__(self, path: Path | str, *, create: bool = True):
        self.path = Path(path)
        if not create and not self.path.is_file():
            raise StateError("there is no ledger", where=str(path), hint="'metafleet init' makes a fleet with one")
        with self._errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            with self._errors():
                self._open()
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def check(self) -> None:
        """Reads the whole file. Raises StateError when it is damaged, which a query sees only where it looks."""
        found = self._query("PRAGMA quick_check(1)")[0][0]
        if found != "ok":
            raise StateError(f"is damaged: {' '.join(str(found).split())}", where=str(self.path), hint=NEW_LEDGER)

    @contextlib.contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[None]:
        """All writes inside happen together or not at all; within another transaction it joins that one.

        durable: on the disk when it returns. Without, a death of the process loses nothing, but a power cut may take
        it away again, whole; the next durable one puts it on the disk as well.
        """
        if self._db.in_transaction:
            yield
            return
        with self._errors():
            level = self._pragma("synchronous")
            self._db.execute(f"PRAGMA synchronous = {level if durable else min(level, WITHOUT_SYNC)}")
        try:
            with self._whole():
                yield
        finally:
            self._db.execute(f"PRAGMA synchronous = {level}")

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            with self._errors():
                self._db.execute("COMMIT")
        except BaseException:
            with self._errors():
                self._db.rollback()
            raise

    def put(self, *rows: Row) -> None:
        """Writes ``rows``, each in place of the one with the same key, all or none. Raises StateError."""
        with self.transaction():
            for row in rows:
                values = [_stored(getattr(row, f.name)) for f in dataclasses.fields(row)]
                self._query(_upsert(type(row)), values)

    def rows(self, kind: type[R], /, within: range | None = None, **equal: Any) -> list[R]:
        """The rows of a table in the order of its key, only those whose columns equal ``equal``.

        within: here and below, only what is of these rounds.
        """
        return list(self.each(kind, within, **equal))

    def each(self, kind: type[R], /, within: range | None = None, **equal: Any) -> Iterator[R]:
        """The same one by one, for tables that are better not held in memory as a whole; write nothing meanwhile."""
        columns = [f.name for f in dataclasses.fields(kind)]
        sql = (
            f"SELECT {', '.join(columns)} FROM {kind.table} WHERE {_of_rounds(within)} AND {_equal(kind, equal)}"
            f" ORDER BY {', '.join(kind.key)}"
        )
        readers = _readers(typing.cast("Hashable", kind))
        with self._errors():
            for row in self._db.execute(sql, list(equal.values())):
                yield kind(**{name: read(value) for name, read, value in zip(columns, readers, row, strict=True)})

    def newest(self, kind: type[Row], /, **equal: Any) -> int | None:
        """The last round of which there is such a row."""
        sql = f"SELECT round FROM {kind.table} WHERE {_equal(kind, equal)} ORDER BY round DESC LIMIT 1"
        found = self._query(sql, list(equal.values()))
        return int(found[0][0]) if found else None

    def rounds(self, status: str | None = None, within: range | None = None) -> list[Round]:
        return self.rows(Round, within, status=status) if status else self.rows(Round, within)

    def devices(self) -> list[Device]:
        return self.rows(Device)

    def device(self, name: str) -> Device | None:
        found = self.rows(Device, name=name)
        return found[0] if found else None

    def volume(self, by: str | None = None, within: range | None = None) -> dict[Any, Volume]:
        """Bytes summed over all rows (key None), or ``by`` "round", "device" or "kind". Scans the traffic table.

        A device that left no MQTT or wire figure for a round is one report missing from that sum.
        """
        key, inner = _grouping(by, ("round", "device", "kind"))
        parts = ", ".join(
            f"SUM(CASE direction WHEN '{way}' THEN {counter}_bytes END) AS {counter}_{way}"
            for counter in ("payload", "mqtt", "wire")
            for way in ("up", "down")
        )
        sums = ", ".join(
            f"SUM(IFNULL({c}_up, 0)), SUM(IFNULL({c}_down, 0)), SUM({c}_up IS NULL AND {c}_down IS NULL), COUNT(*)"
            for c in ("payload", "mqtt", "wire")
        )
        reports = f"SELECT {inner}, {parts} FROM traffic WHERE {_of_rounds(within)} GROUP BY {inner}"
        return {
            row[0]: Volume(payload=Bytes(up=row[1], down=row[2]), mqtt=_bytes(*row[5:9]), wire=_bytes(*row[9:13]))
            for row in self._query(f"SELECT {key}, {sums} FROM ({reports}) GROUP BY 1")
        }

    def joules(self, by: str | None = None, within: range | None = None) -> dict[Any, Joules]:
        """Joules summed over all rows (key None), or ``by`` "round" or "device"; no entry where nothing was metered."""
        key, _ = _grouping(by, ("round", "device"))
        phases: dict[Any, dict[str, float]] = {}
        sources: dict[Any, dict[str, None]] = {}
        for k, phase, source, measured, joules in self._query(
            f"SELECT {key}, phase, source, measured, SUM(joules) FROM energy WHERE {_of_rounds(within)}"
            " GROUP BY 1, phase, source, measured"
        ):
            phases.setdefault(k, {})[phase] = phases.get(k, {}).get(phase, 0.0) + joules
            sources.setdefault(k, {})[f"{'measured' if measured else 'modelled'}: {source}"] = None
        missing = dict(self._query(
            f"SELECT {key}, COUNT(*) FROM updates AS u WHERE {_of_rounds(within)} AND status = 'counted' AND NOT EXISTS"
            " (SELECT 1 FROM energy AS e WHERE e.round = u.round AND e.device = u.device) GROUP BY 1"
        ))
        return {
            k: Joules(
                value=sum(by_phase.get(phase, 0.0) for phase in WORKING),
                source="; ".join(sources[k]),
                phases=by_phase,
                missing=missing.get(k),
            )
            for k, by_phase in phases.items()
            if by_phase.keys() & set(WORKING)
        }

    def flops(self, within: range | None = None) -> dict[int, float]:
        """Floating-point operations by round."""
        return dict(self._query(f"SELECT round, SUM(flops) FROM flops WHERE {_of_rounds(within)} GROUP BY round"))

    def totals(self) -> Totals:
        flops = self.flops()
        return Totals(
            rounds=len(self.rounds("closed")),
            volume=self.volume().get(None),
            payload_by_kind={k: v.payload for k, v in self.volume("kind").items() if k != "link"},
            energy=self.joules().get(None),
            flops=sum(flops.values()) if flops else None,
        )

    def facts(self) -> dict[str, str]:
        """What is said once about the fleet: its name, method, seed, layout, …"""
        return dict(self._query("SELECT key, value FROM fleet ORDER BY key"))

    def fact(self, key: str) -> str | None:
        """One of them, or None."""
        found = self._query("SELECT value FROM fleet WHERE key = ?", (key,))
        return str(found[0][0]) if found else None

    def set_facts(self, **facts: str) -> None:
        """Writes ``facts`` beside or over those that are there."""
        with self.transaction():
            for key, value in facts.items():
                self._query("INSERT OR REPLACE INTO fleet VALUES (?, ?)", (key, value))

    def ask(self, key: str, value: str) -> None:
        """Leaves a request for the aggregator (pause, resume, revoke/NAME, …); a later one of the same key wins."""
        with self.transaction():
            self._query("INSERT OR REPLACE INTO control VALUES (?, ?)", (key, value))

    def asked(self) -> dict[str, str]:
        """The requests that wait."""
        return dict(self._query("SELECT key, value FROM control ORDER BY key"))

    def settle(self, key: str, value: str) -> None:
        """Takes a request away, unless it was replaced by another since it was read."""
        with self.transaction():
            self._query("DELETE FROM control WHERE key = ? AND value = ?", (key, value))

    def _open(self) -> None:
        version = self._pragma("user_version")
        if version > VERSION:
            raise StateError(
                f"was made by a newer metafleet: version {version}, this one reads up to {VERSION}",
                where=str(self.path), hint="update metafleet",
            )
        if version and self._pragma("application_id") != APPLICATION:
            raise StateError("is an SQLite file, but no ledger", where=str(self.path), hint=NEW_LEDGER)
        if not version and self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
            raise StateError("is an SQLite file, but no ledger", where=str(self.path), hint=NEW_LEDGER)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA foreign_keys = ON")
        with self.transaction():
            found = self._pragma("user_version")
            for added in range(found, VERSION):
                for statement in filter(str.strip, ADDED.get(added + 1, SCHEMA).split(";")):
                    self._db.execute(statement)
            if not found:
                self._db.execute(f"PRAGMA application_id = {APPLICATION}")
            if found < VERSION:
                self._db.execute(f"PRAGMA user_version = {VERSION}")

    def _pragma(self, name: str) -> int:
        return int(self._db.execute(f"PRAGMA {name}").fetchone()[0])

    def _query(self, sql: str, values: typing.Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._db.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a mistake of the caller, such as another thread's ledger, not of the file
        except sqlite3.IntegrityError as error:
            raise StateError(f"the row breaks a rule of the ledger: {error}", where=str(self.path)) from error
        except sqlite3.OperationalError as error:
            raise StateError(f"cannot be used: {error}", where=str(self.path),
                             hint="check free space and permissions, and that no other process holds it") from error
        except sqlite3.DatabaseError as error:
            raise StateError(f"is damaged or no ledger: {error}", where=str(self.path), hint=NEW_LEDGER) from error
        except OSError as error:
            raise StateError(f"cannot be used: {error.strerror or error}", where=str(self.path)) from error


def _upsert(kind: type[Row]) -> str:
    columns = [f.name for f in dataclasses.fields(kind)]
    changes = ", ".join(f"{c} = excluded.{c}" for c in columns if c not in kind.key)
    return (
        f"INSERT INTO {kind.table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        f" ON CONFLICT ({', '.join(kind.key)}) DO UPDATE SET {changes}"
    )


def _equal(kind: type[Row], equal: Mapping[str, Any]) -> str:
    """The condition that these columns have the values that are bound to it."""
    unknown = equal.keys() - {f.name for f in dataclasses.fields(kind)}
    if unknown:
        raise TypeError(f"{kind.__name__} has no column {', '.join(sorted(unknown))}")
    return " AND ".join(f"{name} IS ?" for name in equal) or "1"


def _of_rounds(within: range | None) -> str:
    return "1" if within is None else f"round BETWEEN {within.start} AND {within.stop - 1}"


@functools.cache
def _readers(kind: Any) -> tuple[Any, ...]:
    """How each column comes back: JSON as tuples and mappings, 0/1 as bool, all else as it is."""
    hints = typing.get_type_hints(kind)
    return tuple(_reader(hints[f.name]) for f in dataclasses.fields(kind))


def _reader(kind: Any) -> Any:
    return bool if kind is bool else _from_json if typing.get_origin(kind) in (tuple, Mapping) else _same


def _stored(value: Any) -> Any:
    """``value`` as SQLite keeps it: numbers of numpy's as Python's (SQLite would take their bytes), trees as JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, (tuple, list, Mapping)):
        return json.dumps(value, sort_keys=True, allow_nan=False)
    raise TypeError(f"a {type(value).__name__} has no place in the ledger")


def _from_json(text: str) -> Any:
    return _frozen(json.loads(text))


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _same(value: Any) -> Any:
    return value


def _grouping(by: str | None, allowed: tuple[str, ...]) -> tuple[str, str]:
    """(outer key, inner key) of a sum whose reports are one per round and device."""
    if by is not None and by not in allowed:
        raise ValueError(f"by must be one of {', '.join(allowed)}, not {by}")
    return by or "NULL", "round, device, kind" if by == "kind" else "round, device"


def _bytes(up: int, down: int, missing: int, reports: int) -> Bytes | None:
    return None if missing == reports else Bytes(up=up, down=down, missing=missing or None)
