"""Sums over the ledger: bytes, joules and floating-point operations by round, device or kind of traffic.

``Ledger`` inherits from ``LedgerSums``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cloud_server.ledger.folded_tables import ALL_KINDS
from cloud_server.ledger.ledger_statements import REPORT_SUMS, in_rounds, reports
from fleet_core.power.meter import WORKING

FOLDED = range(0)
REPORTED = ("reports", "payload_up", "payload_down", "mqtt_up", "mqtt_down", "mqtt_missing", "wire_up", "wire_down",
            "wire_missing")
ENERGY = ("phase", "source", "measured", "joules", "low", "high", "unknown")


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
class PhaseJoules:
    """J of one phase. low, high: between which they lie, if all modelled parts have a spread."""

    value: float = field(metadata={"min": 0})
    source: str
    low: float | None = field(default=None, metadata={"min": 0})
    high: float | None = field(default=None, metadata={"min": 0})


@dataclass(frozen=True, kw_only=True)
class Joules:
    """value: J of the working phases, without idle. low, high: between which they lie, if any part is modelled and all
    modelled parts have a spread. phases: J of each phase, including idle. by_phase: the same with source and spread.
    source: the meters, and the sources of the models' constants. missing: counted updates whose device reported no
    joules."""

    value: float = field(metadata={"min": 0})
    source: str
    low: float | None = field(default=None, metadata={"min": 0})
    high: float | None = field(default=None, metadata={"min": 0})
    phases: Mapping[str, float] = field(default_factory=dict, metadata={"min": 0})
    by_phase: Mapping[str, PhaseJoules] = field(default_factory=dict)
    missing: int | None = field(default=None, metadata={"min": 1})


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over the fleet's whole life, including abandoned rounds and devices that joined after the last round.
    absent_energy: {"term: why" the joules do not include it: number of devices}."""

    rounds: int
    volume: Volume | None
    payload_by_kind: Mapping[str, Bytes]
    energy: Joules | None
    absent_energy: Mapping[str, int]
    flops: float | None


class LedgerSums:
    """Sums over the tables of a ledger. within: only these rounds; None for the fleet's whole life, including folded
    rounds; FOLDED for the folded rounds that were closed. Sums by round have no entry for folded rounds."""

    def _query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        raise NotImplementedError

    def closed_count(self) -> int:
        """How many rounds are closed."""
        folded = "SELECT SUM(rounds) FROM folded_rounds WHERE status = 'closed'"
        return int(self._query(f"SELECT COUNT(*) + IFNULL(({folded}), 0) FROM rounds WHERE status = 'closed'")[0][0])

    def volume(self, by: str | None = None, within: range | None = None) -> dict[Any, Volume]:
        """Bytes over all rows (key None), or ``by`` "round", "device" or "kind". Scans the traffic table.

        A device that reported no MQTT or wire bytes for a round counts as one missing report.
        """
        key, inner = _grouping(by, ("round", "device", "kind"))
        found = f"SELECT {key} AS k, {REPORT_SUMS} FROM ({reports(inner, in_rounds(within))}) GROUP BY 1"
        kinds = f" AND kind {'!=' if by == 'kind' else '='} '{ALL_KINDS}'"
        folded = _folded(by, within, "folded_traffic", *REPORTED) + kinds
        sums = ", ".join(f"SUM({name})" for name in REPORTED)
        return {
            k: Volume(payload=Bytes(up=up, down=down), mqtt=_bytes(mqtt_up, mqtt_down, no_mqtt, count),
                      wire=_bytes(wire_up, wire_down, no_wire, count))
            for k, count, up, down, mqtt_up, mqtt_down, no_mqtt, wire_up, wire_down, no_wire in self._query(
                f"WITH every (k, {', '.join(REPORTED)}) AS ({found}{folded})"
                f" SELECT k, {sums} FROM every GROUP BY 1"
            )
        }

    def joules(self, by: str | None = None, within: range | None = None) -> dict[Any, Joules]:
        """Joules over all rows (key None), or ``by`` "round" or "device"; no entry if no working phase has any."""
        key, _ = _grouping(by, ("round", "device"))
        parts: dict[Any, dict[str, list[PhaseJoules]]] = {}
        for k, phase, source, measured, amount, low, high, unknown in self._query(
            "SELECT k, phase, source, measured, SUM(joules), SUM(low), SUM(high), SUM(unknown)"
            f" FROM (SELECT {key} AS k, phase, source, measured, joules, low, high, low IS NULL AS unknown FROM energy"
            f" WHERE {in_rounds(within)}{_folded(by, within, 'folded_energy', *ENERGY)}) GROUP BY 1, 2, 3, 4"
            " HAVING SUM(joules) > 0"
        ):
            spread = (amount, amount) if measured else (None, None) if unknown else (low, high)
            source = f"{'measured' if measured else 'modelled'}: {source}"
            part = PhaseJoules(value=amount, source=source, low=spread[0], high=spread[1])
            parts.setdefault(k, {}).setdefault(phase, []).append(part)
        missing: dict[Any, int] = dict(self._query(
            f"SELECT k, SUM(n) FROM (SELECT {key} AS k, COUNT(*) AS n FROM updates AS u WHERE {in_rounds(within)} AND"
            " status = 'counted' AND NOT EXISTS (SELECT 1 FROM energy AS e WHERE e.round = u.round AND e.device ="
            f" u.device) GROUP BY 1{_folded(by, within, 'folded_updates', 'without_energy')} AND status = 'counted')"
            " GROUP BY 1 HAVING SUM(n) > 0"
        ))
        found = {}
        for k, of in parts.items():
            working = _together([part for phase in WORKING for part in of.get(phase, [])])
            if working is not None:
                by_phase = {phase: one for phase, several in of.items() if (one := _together(several))}
                sources = "; ".join(dict.fromkeys(part.source for several in of.values() for part in several))
                found[k] = Joules(
                    value=working.value, source=sources, low=working.low, high=working.high, by_phase=by_phase,
                    phases={phase: one.value for phase, one in by_phase.items()}, missing=missing.get(k),
                )
        return found

    def absent_energy(self, by: str | None = None) -> dict[Any, dict[str, int]]:
        """{"term: why" the joules do not include it: number of devices}, over all devices (key None) or ``by``
        "device"."""
        key, _ = _grouping(by, ("device",))
        found: dict[Any, dict[str, int]] = {}
        for k, reason, count in self._query(f"SELECT {key}, reason, COUNT(*) FROM absent_energy GROUP BY 1, reason"):
            found.setdefault(k, {})[reason] = count
        return found

    def payload(self) -> dict[str, dict[str, Bytes]]:
        """Payload bytes by device and kind of traffic."""
        found: dict[str, dict[str, Bytes]] = {}
        for device, kind, up, down in self._query(
            "SELECT device, kind, SUM(up), SUM(down) FROM (SELECT device, kind,"
            " CASE direction WHEN 'up' THEN payload_bytes ELSE 0 END AS up,"
            " CASE direction WHEN 'down' THEN payload_bytes ELSE 0 END AS down FROM traffic UNION ALL"
            f" SELECT device, kind, payload_up, payload_down FROM folded_traffic WHERE kind != '{ALL_KINDS}')"
            " WHERE kind != 'link' GROUP BY device, kind"
        ):
            found.setdefault(device, {})[kind] = Bytes(up=up, down=down)
        return found

    def flops(self, within: range | None = None, *, by: str = "round") -> dict[Any, float]:
        """Floating-point operations ``by`` "round" or "device"."""
        key, _ = _grouping(by, ("round", "device"))
        return dict(self._query(
            f"SELECT k, SUM(flops) FROM (SELECT {key} AS k, flops FROM flops WHERE {in_rounds(within)}"
            f"{_folded(by, within, 'folded_flops', 'flops')}) GROUP BY 1"
        ))

    def fates(self, within: range | None = None, *, by: str = "round") -> dict[Any, dict[str, int]]:
        """Number of updates that were counted, refused and late ``by`` "round" or "device"."""
        key, _ = _grouping(by, ("round", "device"))
        found: dict[Any, dict[str, int]] = {}
        for k, status, count in self._query(
            f"SELECT k, status, SUM(n) FROM (SELECT {key} AS k, status, 1 AS n FROM updates WHERE {in_rounds(within)}"
            f"{_folded(by, within, 'folded_updates', 'status', 'updates')}) GROUP BY 1, 2"
        ):
            found.setdefault(k, {})[status] = count
        return found

    def totals(self) -> Totals:
        operations = self.flops(by="device")
        return Totals(
            rounds=self.closed_count(),
            volume=self.volume().get(None),
            payload_by_kind={kind: moved.payload for kind, moved in self.volume("kind").items() if kind != "link"},
            energy=self.joules().get(None),
            absent_energy=self.absent_energy().get(None, {}),
            flops=sum(operations.values()) if operations else None,
        )

    def usage(self) -> dict[str, dict[str, Any]]:
        """By device: sums of cpu_s, connected_s and retransmitted_bytes, the largest peak_mib; None where no round has
        one."""
        names = ("cpu_s", "connected_s", "retransmitted_bytes", "peak_mib")
        sums = "device, SUM(cpu_s), SUM(connected_s), SUM(retransmitted_bytes), MAX(peak_mib)"
        columns = f"device, {', '.join(names)}"
        every = f"SELECT {columns} FROM usage UNION ALL SELECT {columns} FROM folded_usage"
        return {
            device: dict(zip(names, found, strict=True))
            for device, *found in self._query(f"SELECT {sums} FROM ({every}) GROUP BY device")
        }

    def counted_updates(self) -> dict[str, tuple[int, int, int]]:
        """Device -> (number of counted updates, number of these that were skipped, round of the newest one)."""
        return {device: (count, skipped, newest) for device, count, skipped, newest in self._query(
            "SELECT device, SUM(n), SUM(skipped), MAX(newest) FROM (SELECT device, 1 AS n, skipped, round AS newest"
            " FROM updates WHERE status = 'counted' UNION ALL SELECT f.device, f.updates, f.skipped, l.round FROM"
            " folded_updates AS f JOIN last_counted AS l ON l.device = f.device WHERE f.status = 'counted')"
            " GROUP BY device"
        )}


def _together(parts: Sequence[PhaseJoules]) -> PhaseJoules | None:
    """The sum of ``parts``, in which measured joules count as their own low and high; None without parts."""
    if not parts:
        return None
    value, source = sum(part.value for part in parts), "; ".join(dict.fromkeys(part.source for part in parts))
    lows, highs = ([bound for part in parts if (bound := getattr(part, name)) is not None] for name in ("low", "high"))
    if len(lows) < len(parts) or all(part.source.startswith("measured") for part in parts):
        return PhaseJoules(value=value, source=source)
    return PhaseJoules(value=value, source=source, low=sum(lows), high=sum(highs))


def _grouping(by: str | None, allowed: tuple[str, ...]) -> tuple[str, str]:
    """(outer key, inner key) of a sum; a report is one per round and device, with ``kind`` also one per kind."""
    if by is not None and by not in allowed:
        raise ValueError(f"by must be one of {', '.join(allowed)}, not {by}")
    return by or "NULL", "round, device, kind" if by == "kind" else "round, device"


def _folded(by: str | None, within: range | None, table: str, *columns: str) -> str:
    """The end of a query that adds the rows of folded rounds; it selects none for a sum by round, because these rows
    have no round."""
    counts = "0" if by == "round" else "1" if within is None else "closed" if within is FOLDED else "0"
    key = by if by and by != "round" else "NULL"
    return f" UNION ALL SELECT {key}, {', '.join(columns)} FROM {table} WHERE {counts}"


def _bytes(up: int, down: int, missing: int, count: int) -> Bytes | None:
    return None if missing == count else Bytes(up=up, down=down, missing=missing or None)
