"""The fleet's books: rounds, devices, updates, bytes, joules and evaluations in one SQLite file.

One process writes (the aggregator); any number read at the same time (status, live view, report). The command line's
own writes are requests: ``ask`` leaves one and the aggregator ``settle``s it. A ``Ledger`` belongs to the thread that
opened it; another thread or process opens its own on the same path.

``put`` writes rows of the tables of ``ledger_tables``, ``rows`` reads them; ``volume``, ``joules`` and ``totals`` sum.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from cloud_server.records import ledger_tables as tables
from cloud_server.records.ledger_tables import ADDED, SCHEMA, VERSION, Device, Round, Row
from fleet_core.base.errors import StateError
from fleet_core.power.meter import WORKING

APPLICATION = 0x4D464C47  # "MFLG" in the file's header: this SQLite file is a ledger
BUSY_TIMEOUT_S = 10.0
WITHOUT_SYNC = 1  # of PRAGMA synchronous: in a WAL, NORMAL waits for the disk at checkpoints only

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

    def copy(self, to: Path) -> None:
        """All of it at one moment, as a file of its own, while others write. Raises StateError."""
        with self._errors(), contextlib.closing(sqlite3.connect(to)) as made:
            self._db.backup(made)

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
                self._query(tables.upsert(type(row)), tables.stored(row))

    def rows(self, kind: type[R], /, within: range | None = None, **equal: Any) -> list[R]:
        """The rows of a table in the order of its key, only those whose columns equal ``equal``.

        within: here and below, only what is of these rounds.
        """
        return list(self.each(kind, within, **equal))

    def each(self, kind: type[R], /, within: range | None = None, **equal: Any) -> Iterator[R]:
        """The same one by one, for tables that are better not held in memory as a whole; write nothing meanwhile."""
        sql = (
            f"SELECT {', '.join(tables.columns(kind))} FROM {kind.table}"
            f" WHERE {_of_rounds(within)} AND {tables.equal_to(kind, equal)} ORDER BY {', '.join(kind.key)}"
        )
        with self._errors():
            for values in self._db.execute(sql, list(equal.values())):
                yield tables.made(kind, values)

    def newest(self, kind: type[Row], /, **equal: Any) -> int | None:
        """The last round of which there is such a row."""
        sql = f"SELECT round FROM {kind.table} WHERE {tables.equal_to(kind, equal)} ORDER BY round DESC LIMIT 1"
        found = self._query(sql, list(equal.values()))
        return int(found[0][0]) if found else None

    def counted(self, device: str, number: int) -> str | None:
        """The id of the device's update that the round counted, or None."""
        found = self.rows(tables.Update, round=number, device=device, status="counted")
        return found[0].update_id if found else None

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

    def _query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
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


def asked_at(value: str) -> float:
    """When a request to enrol or to revoke was made, Unix seconds; 0 for others and for those of an older metafleet."""
    try:
        return float(value)
    except ValueError:
        return 0.0


def _of_rounds(within: range | None) -> str:
    return "1" if within is None else f"round BETWEEN {within.start} AND {within.stop - 1}"


def _grouping(by: str | None, allowed: tuple[str, ...]) -> tuple[str, str]:
    """(outer key, inner key) of a sum whose reports are one per round and device."""
    if by is not None and by not in allowed:
        raise ValueError(f"by must be one of {', '.join(allowed)}, not {by}")
    return by or "NULL", "round, device, kind" if by == "kind" else "round, device"


def _bytes(up: int, down: int, missing: int, reports: int) -> Bytes | None:
    return None if missing == reports else Bytes(up=up, down=down, missing=missing or None)
