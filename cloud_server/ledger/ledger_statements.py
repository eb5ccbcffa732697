"""SQL statements for the ledger's tables, and the conversion of rows."""

from __future__ import annotations

import dataclasses
import functools
import json
import numbers
import typing
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from cloud_server.ledger.ledger_tables import STAGES, Row

R = TypeVar("R", bound=Row)


def upsert(kind: type[Row]) -> str:
    """The statement that inserts the values of ``stored``, or replaces the row with the same key."""
    names = columns(kind)
    changes = ", ".join(f"{c} = excluded.{c}" for c in names if c not in kind.key)
    return (
        f"INSERT INTO {kind.table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        f" ON CONFLICT ({', '.join(kind.key)}) DO " + (f"UPDATE SET {changes}" if changes else "NOTHING")
    )


def equal_to(kind: type[Row], equal: Mapping[str, Any], of: str = "") -> str:
    """The condition that these columns equal the bound values. of: before each column, as ``name.``. Raises TypeError
    for an unknown column."""
    unknown = equal.keys() - set(columns(kind))
    if unknown:
        raise TypeError(f"{kind.__name__} has no column {', '.join(sorted(unknown))}")
    return " AND ".join(f"{of}{name} IS ?" for name in equal) or "1"


def latest(kind: type[Row], equal: Mapping[str, Any]) -> str:
    """The statement that selects the columns of each device's last row, by ``equal_to`` of the found row. It looks up
    each device, and does not read the table; CROSS JOIN keeps SQLite from turning that round."""
    stages = " CROSS JOIN (" + " UNION ALL ".join(f"SELECT '{stage}' AS stage" for stage in STAGES) + ") AS s"
    staged = "stage" in kind.key
    same = "{0}.device = d.name" + " AND {0}.stage = s.stage" * staged
    newest = f"(SELECT MAX(other.round) FROM {kind.table} AS other WHERE {same.format('other')})"
    return (
        f"SELECT {', '.join(f'found.{name}' for name in columns(kind))} FROM devices AS d{stages * staged}"
        f" CROSS JOIN {kind.table} AS found ON {same.format('found')} AND found.round = {newest}"
        f" WHERE {equal_to(kind, equal, 'found.')} ORDER BY d.name{', s.stage' * staged}"
    )


def in_rounds(within: range | None) -> str:
    """The condition that a row is of these rounds; always true for None."""
    return "1" if within is None else f"round BETWEEN {within.start} AND {within.stop - 1}"


COUNTERS, WAYS = ("payload", "mqtt", "wire"), ("up", "down")
REPORT_SUMS = "COUNT(*), SUM(IFNULL(payload_up, 0)), SUM(IFNULL(payload_down, 0)), " + ", ".join(
    f"SUM(IFNULL({c}_up, 0)), SUM(IFNULL({c}_down, 0)), SUM({c}_up IS NULL AND {c}_down IS NULL)" for c in COUNTERS[1:]
)
"""Over ``reports``: how many there are, payload up and down, then of the other counters up, down and how many reports
lack them."""


def reports(by: str, where: str) -> str:
    """The statement that selects one row per group ``by``: these columns, and the bytes of each counter and way."""
    parts = ", ".join(f"SUM(CASE direction WHEN '{way}' THEN {counter}_bytes END) AS {counter}_{way}"
                      for counter in COUNTERS for way in WAYS)
    return f"SELECT {by}, {parts} FROM traffic WHERE {where} GROUP BY {by}"


def stored(row: Row) -> list[Any]:
    """The row's values as SQLite stores them, in the order of ``columns``."""
    return [_stored(getattr(row, name)) for name in columns(type(row))]


def columns(kind: type[Row]) -> list[str]:
    return list(_readers(typing.cast("Hashable", kind)))


def made(kind: type[R], values: Sequence[Any]) -> R:
    """The row from SQLite's values, in the order of ``columns``."""
    readers = _readers(typing.cast("Hashable", kind))
    return kind(**{name: read(value) for (name, read), value in zip(readers.items(), values, strict=True)})


@functools.cache
def _readers(kind: Any) -> dict[str, Any]:
    """Column -> conversion from SQLite: JSON to tuples and mappings, 0/1 to bool, everything else unchanged."""
    hints = typing.get_type_hints(kind)
    return {f.name: _reader(hints[f.name]) for f in dataclasses.fields(kind)}


def _reader(kind: Any) -> Any:
    return bool if kind is bool else _from_json if typing.get_origin(kind) in (tuple, Mapping) else _same


def _stored(value: Any) -> Any:
    """``value`` as SQLite stores it: numpy numbers as Python numbers (SQLite would store their bytes), trees as
    JSON."""
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
