"""The ledger: rounds, devices, updates, bytes, joules and evaluations of a fleet in one SQLite file.

The aggregator writes; any number of processes read at the same time (status, live view, report). The command line
writes only requests: it adds one with ``request``, and the aggregator takes it away with ``remove_request``. A
``Ledger`` belongs to the thread that opened it; another thread or process opens the same path again.

``put`` writes rows of the tables in ``ledger_tables``, ``rows`` reads them, ``ledger_sums`` adds them up. Rows of
rounds that ``fold_rounds`` has folded are deleted; the sums still include them.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from cloud_server.ledger import ledger_statements as statements
from cloud_server.ledger import ledger_tables as tables
from cloud_server.ledger.fold_rounds import LedgerFolds
from cloud_server.ledger.ledger_sums import LedgerSums
from cloud_server.ledger.ledger_tables import ADDED, SCHEMA, VERSION, AbsentEnergy, Device, Round, Row
from fleet_core.base.errors import StateError

APPLICATION = 0x4D464C47  # SQLite's application_id, "MFLG": marks the file as a ledger
BUSY_TIMEOUT_S = 10.0
SYNCHRONOUS_NORMAL = 1  # with a WAL, NORMAL syncs the disk at checkpoints only

R = TypeVar("R", bound=Row)
NEW_LEDGER = "move the file aside and put a backup in its place, or make a new fleet with 'metafleet init'"


class Ledger(LedgerFolds, LedgerSums):
    """The ledger at ``path``, created if missing unless ``create`` is False.

    Raises StateError, and leaves the file unchanged, if it is missing (with ``create`` False), no ledger, damaged, or
    of a newer version.
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
        """Reads the whole file. Raises StateError if any part of it is damaged; a query notices only what it reads."""
        found = self._query("PRAGMA quick_check(1)")[0][0]
        if found != "ok":
            raise StateError(f"is damaged: {' '.join(str(found).split())}", where=str(self.path), hint=NEW_LEDGER)

    def copy(self, to: Path) -> None:
        """Writes a consistent copy to ``to`` while others may write. Raises StateError."""
        with self._errors(), contextlib.closing(sqlite3.connect(to)) as made:
            self._db.backup(made)

    @contextlib.contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[None]:
        """All writes inside happen together or not at all. A nested transaction joins the outer one.

        durable: synced to the disk on return. Otherwise a killed process loses nothing, but a power cut may undo the
        whole transaction until the next durable one.
        """
        if self._db.in_transaction:
            yield
            return
        with self._errors():
            level = self._pragma("synchronous")
            self._db.execute(f"PRAGMA synchronous = {level if durable else min(level, SYNCHRONOUS_NORMAL)}")
        try:
            with self._begin_commit():
                yield
        finally:
            self._db.execute(f"PRAGMA synchronous = {level}")

    @contextlib.contextmanager
    def _begin_commit(self) -> Iterator[None]:
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
        """Inserts ``rows`` or replaces those with the same key, all or none. Raises StateError."""
        with self.transaction():
            for row in rows:
                self._query(statements.upsert(type(row)), statements.stored(row))

    def rows(self, kind: type[R], /, within: range | None = None, **equal: Any) -> list[R]:
        """The rows of a table whose columns equal ``equal``, in the order of its key. within: only these rounds."""
        return list(self.each(kind, within, **equal))

    def each(self, kind: type[R], /, within: range | None = None, **equal: Any) -> Iterator[R]:
        """As ``rows``, row by row, for tables too large for memory. Do not write while iterating."""
        sql = (
            f"SELECT {', '.join(statements.columns(kind))} FROM {kind.table}"
            f" WHERE {statements.in_rounds(within)} AND {statements.equal_to(kind, equal)}"
            f" ORDER BY {', '.join(kind.key)}"
        )
        with self._errors():
            for values in self._db.execute(sql, list(equal.values())):
                yield statements.made(kind, values)

    def newest(self, kind: type[Row], /, **equal: Any) -> int | None:
        """The last round that has such a row; None without one."""
        sql = f"SELECT round FROM {kind.table} WHERE {statements.equal_to(kind, equal)} ORDER BY round DESC LIMIT 1"
        found = self._query(sql, list(equal.values()))
        return int(found[0][0]) if found else None

    def latest(self, kind: type[R], /, **equal: Any) -> Iterator[R]:
        """Each device's row of its last round, of each stage where the table has stages, if its columns equal
        ``equal``; in the order of device and stage."""
        sql = statements.latest(kind, equal)
        with self._errors():
            for values in self._db.execute(sql, list(equal.values())):
                yield statements.made(kind, values)

    def counted(self, device: str, number: int) -> str | None:
        """The id of the device's update that was counted in the round, or None; also None for an update of a folded
        round, unless it is the newest of these."""
        found = self.rows(tables.Update, round=number, device=device, status="counted")
        return found[0].update_id if found else self.last_folded(device, number)

    def rounds(self, status: str | None = None, within: range | None = None) -> list[Round]:
        return self.rows(Round, within, status=status) if status else self.rows(Round, within)

    def devices(self) -> list[Device]:
        return self.rows(Device)

    def device(self, name: str) -> Device | None:
        found = self.rows(Device, name=name)
        return found[0] if found else None

    def set_absent_energy(self, device: str, reasons: Sequence[str]) -> None:
        """Replaces the list of what a device's joules do not include."""
        if {row.reason for row in self.each(AbsentEnergy, device=device)} != set(reasons):
            with self.transaction():
                self._query(f"DELETE FROM {AbsentEnergy.table} WHERE device = ?", (device,))
                self.put(*(AbsentEnergy(device=device, reason=reason) for reason in reasons))

    def accuracies(self, within: range | None = None) -> Iterator[tuple[int, str, str, bool, float]]:
        """(round, device, stage, new, accuracy) of every evaluation, in the order of the rounds, without its counts. As
        ``each``, do not write while iterating."""
        columns = "round, device, stage, new, accuracy"
        sql = f"SELECT {columns} FROM evaluations WHERE {statements.in_rounds(within)} ORDER BY round"
        with self._errors():
            for number, device, stage, new, accuracy in self._db.execute(sql):
                yield number, device, stage, bool(new), accuracy

    def facts(self) -> dict[str, str]:
        """Key-value pairs about the fleet: name, method, seed, layout, …"""
        return dict(self._query("SELECT key, value FROM fleet ORDER BY key"))

    def fact(self, key: str) -> str | None:
        """One value of ``facts``, or None."""
        found = self._query("SELECT value FROM fleet WHERE key = ?", (key,))
        return str(found[0][0]) if found else None

    def set_facts(self, **facts: str) -> None:
        """Adds or replaces ``facts``."""
        with self.transaction():
            for key, value in facts.items():
                self._query("INSERT OR REPLACE INTO fleet VALUES (?, ?)", (key, value))

    def request(self, key: str, value: str) -> None:
        """Adds a request to the aggregator (paused, revoke/NAME, …), or replaces the request with the same key."""
        with self.transaction():
            self._query("INSERT OR REPLACE INTO control VALUES (?, ?)", (key, value))

    def request_enrolment(self, name: str) -> None:
        """Adds the request to enrol a device."""
        self.request(f"enroll/{name}", repr(time.time()))

    def requests(self) -> dict[str, str]:
        """The pending requests."""
        return dict(self._query("SELECT key, value FROM control ORDER BY key"))

    def remove_request(self, key: str, value: str) -> None:
        """Removes a request, unless it was replaced by another one since it was read."""
        with self.transaction():
            self._query("DELETE FROM control WHERE key = ? AND value = ?", (key, value))

    def data_version(self) -> int:
        """A number that changes when another connection has written to the file."""
        return self._pragma("data_version")

    def _open(self) -> None:
        version = self._pragma("user_version")
        if version > VERSION:
            raise StateError(
                f"was made by a newer metafleet: version {version}, this one reads up to {VERSION}",
                where=str(self.path), hint="update metafleet",
            )
        empty = not self._db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if self._pragma("application_id") != APPLICATION if version else not empty:
            raise StateError("is an SQLite file, but not a ledger", where=str(self.path), hint=NEW_LEDGER)
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
            raise  # a mistake of the caller, such as a ledger of another thread
        except sqlite3.IntegrityError as error:
            raise StateError(f"the row breaks a rule of the ledger: {error}", where=str(self.path)) from error
        except sqlite3.OperationalError as error:
            raise StateError(f"cannot be used: {error}", where=str(self.path),
                             hint="check free space and permissions, and that no other process holds it") from error
        except sqlite3.DatabaseError as error:
            raise StateError(f"is damaged or not a ledger: {error}", where=str(self.path), hint=NEW_LEDGER) from error
        except OSError as error:
            raise StateError(f"cannot be used: {error.strerror or error}", where=str(self.path)) from error


def requested_at(value: str) -> float:
    """When a request to enrol or revoke was made, Unix seconds; 0 for other requests and those of older versions."""
    try:
        return float(value)
    except ValueError:
        return 0.0
