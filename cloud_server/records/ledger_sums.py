"""Sums over the ledger: bytes, joules and floating-point operations by round, device or kind of traffic.

The functions take ``query``, which runs a statement and returns its rows; ``Ledger`` passes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloud_server.records.ledger_tables import in_rounds
from fleet_core.power.meter import WORKING

Query = Callable[[str], list[tuple[Any, ...]]]


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes up and down. missing: how many reports (one per device and round) the sum lacks; None if none."""

    up: int = field(metadata={"min": 0})
    down: int = field(metadata={"min": 0})
    missing: int | None = field(default=None, metadata={"min": 1})


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Three independent counters. mqtt and wire are None if no device reported them."""

    payload: Bytes
    mqtt: Bytes | None = None
    wire: Bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Joules:
    """value: J of the working phases, without idle. phases: J of each phase, including idle. source: the meter, or the
    source of the model's constants. missing: counted updates whose device reported no joules."""

    value: float = field(metadata={"min": 0})
    source: str
    phases: Mapping[str, float] = field(default_factory=dict, metadata={"min": 0})
    missing: int | None = field(default=None, metadata={"min": 1})


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over the fleet's whole life, including abandoned rounds and devices that joined after the last round."""

    rounds: int
    volume: Volume | None
    payload_by_kind: Mapping[str, Bytes]
    energy: Joules | None
    flops: float | None


def volume(query: Query, by: str | None = None, within: range | None = None) -> dict[Any, Volume]:
    """Bytes over all rows (key None), or ``by`` "round", "device" or "kind". Scans the traffic table.

    A device that reported no MQTT or wire bytes for a round counts as one missing report. within: only these rounds.
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
    reports = f"SELECT {inner}, {parts} FROM traffic WHERE {in_rounds(within)} GROUP BY {inner}"
    return {
        row[0]: Volume(payload=Bytes(up=row[1], down=row[2]), mqtt=_bytes(*row[5:9]), wire=_bytes(*row[9:13]))
        for row in query(f"SELECT {key}, {sums} FROM ({reports}) GROUP BY 1")
    }


def joules(query: Query, by: str | None = None, within: range | None = None) -> dict[Any, Joules]:
    """Joules over all rows (key None), or ``by`` "round" or "device"; no entry where nothing was metered."""
    key, _ = _grouping(by, ("round", "device"))
    phases: dict[Any, dict[str, float]] = {}
    sources: dict[Any, dict[str, None]] = {}
    for k, phase, source, measured, amount in query(
        f"SELECT {key}, phase, source, measured, SUM(joules) FROM energy WHERE {in_rounds(within)}"
        " GROUP BY 1, phase, source, measured"
    ):
        phases.setdefault(k, {})[phase] = phases.get(k, {}).get(phase, 0.0) + amount
        sources.setdefault(k, {})[f"{'measured' if measured else 'modelled'}: {source}"] = None
    missing: dict[Any, int] = dict(query(
        f"SELECT {key}, COUNT(*) FROM updates AS u WHERE {in_rounds(within)} AND status = 'counted' AND NOT EXISTS"
        " (SELECT 1 FROM energy AS e WHERE e.round = u.round AND e.device = u.device) GROUP BY 1"
    ))
    return {
        k: Joules(
            value=sum(by_phase.get(phase, 0.0) for phase in WORKING), source="; ".join(sources[k]), phases=by_phase,
            missing=missing.get(k),
        )
        for k, by_phase in phases.items()
        if by_phase.keys() & set(WORKING)
    }


def flops(query: Query, within: range | None = None) -> dict[int, float]:
    """Floating-point operations by round."""
    return dict(query(f"SELECT round, SUM(flops) FROM flops WHERE {in_rounds(within)} GROUP BY round"))


def totals(query: Query, *, rounds: int) -> Totals:
    """rounds: how many were closed."""
    operations = flops(query)
    return Totals(
        rounds=rounds,
        volume=volume(query).get(None),
        payload_by_kind={kind: moved.payload for kind, moved in volume(query, "kind").items() if kind != "link"},
        energy=joules(query).get(None),
        flops=sum(operations.values()) if operations else None,
    )


def _grouping(by: str | None, allowed: tuple[str, ...]) -> tuple[str, str]:
    """(outer key, inner key) of a sum whose reports are one per round and device."""
    if by is not None and by not in allowed:
        raise ValueError(f"by must be one of {', '.join(allowed)}, not {by}")
    return by or "NULL", "round, device, kind" if by == "kind" else "round, device"


def _bytes(up: int, down: int, missing: int, reports: int) -> Bytes | None:
    return None if missing == reports else Bytes(up=up, down=down, missing=missing or None)
