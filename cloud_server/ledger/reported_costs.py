"""Assigns the bytes, operations and joules that devices report to rounds; ``ledger_sums`` adds them up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from cloud_server.ledger import ledger_tables as tables
from cloud_server.ledger.ledger import Ledger
from fleet_core.protocol import device_messages
from fleet_core.protocol.device_messages import Report

KINDS = {
    "model_down": ("model", "down"),
    "counted_down": ("model", "down"),
    "graph_down": ("graph", "down"),
    "serve_down": ("serve", "down"),
    "update_up": ("update", "up"),
}

STARTS = 2

N = TypeVar("N", int, float)


class ReportedCosts:
    """Devices report counters that run since their start; a round gets the difference from the previous report.

    The last counters of a device's last two starts are kept in the ledger, so that a report that comes twice, late or
    out of order adds nothing twice.
    """

    def __init__(self, ledger: Ledger):
        self._ledger = ledger

    def report(self, device: str, report: Report) -> None:
        """Adds one report, all or nothing. If a power cut loses it, the device's next report has the same counts."""
        counters = _counters(report)
        key = f"counters/{device}"
        starts: dict[str, dict[str, float]] = json.loads(self._ledger.fact(key) or "{}")
        old = starts.pop(report.boot, {})
        added = {name: max(0.0, value - old.get(name, 0.0)) for name, value in counters.items()}
        starts[report.boot] = {**old, **{name: max(value, old.get(name, 0.0)) for name, value in counters.items()}}
        starts = dict(list(starts.items())[-STARTS:])
        with self._ledger.transaction(durable=False):
            self._ledger.set_facts(**{key: json.dumps(starts)})
            self._add_traffic(device, report, added)
            self._add_energy(device, report, added)
            self._add_usage(device, report, added)

    def _add_traffic(self, device: str, report: Report, added: Mapping[str, float]) -> None:
        sums: dict[tuple[str, str], int] = {}
        for name, place in KINDS.items():
            sums[place] = sums.get(place, 0) + int(added.get(f"payload.{name}", 0))
        rows = [
            tables.Traffic(round=report.round, device=device, direction=way, kind=kind, payload_bytes=count)
            for (kind, way), count in sums.items()
            if count
        ]
        for way in ("up", "down"):
            if report.traffic is not None:
                wire = int(added[f"wire.{way}"]) if f"wire.{way}" in added else None
                rows.append(tables.Traffic(
                    round=report.round, device=device, direction=way, kind="link",
                    mqtt_bytes=int(added.get(f"mqtt.{way}", 0)), wire_bytes=wire,
                ))
        for row in rows:
            known = self._ledger.rows(
                tables.Traffic, round=row.round, device=device, direction=row.direction, kind=row.kind
            )
            self._ledger.put(_sum(known[0], row) if known else row)

    def _add_energy(self, device: str, report: Report, added: Mapping[str, float]) -> None:
        for entry in report.energy:
            row = _energy(device, report.round, entry, added.get(f"energy.{entry.phase}", 0.0))
            known = self._ledger.rows(tables.Energy, round=report.round, device=device, phase=entry.phase)
            self._ledger.put(_energy_sum(known[0], row) if known else row)
        if report.absent_terms or report.energy:
            self._ledger.set_absent_energy(device, report.absent_terms)
        if "flops" in added:
            known_flops = self._ledger.rows(tables.Flops, round=report.round, device=device)
            total = added["flops"] + (known_flops[0].flops if known_flops else 0.0)
            self._ledger.put(tables.Flops(round=report.round, device=device, flops=total))

    def _add_usage(self, device: str, report: Report, added: Mapping[str, float]) -> None:
        """Peaks are not added up: the largest counts."""
        if report.peak_mib is None and not added.keys() & {"cpu_s", "connected_s", "retransmitted"}:
            return
        known = next(iter(self._ledger.rows(tables.Usage, round=report.round, device=device)),
                     tables.Usage(round=report.round, device=device))
        peaks = [peak for peak in (known.peak_mib, report.peak_mib) if peak is not None]
        again = int(added["retransmitted"]) if "retransmitted" in added else None
        self._ledger.put(tables.Usage(
            round=report.round, device=device, cpu_s=_both(known.cpu_s, added.get("cpu_s")),
            peak_mib=max(peaks, default=None), connected_s=_both(known.connected_s, added.get("connected_s")),
            retransmitted_bytes=_both(known.retransmitted_bytes, again),
        ))


def _counters(report: Report) -> dict[str, float]:
    counters: dict[str, float] = {f"energy.{entry.phase}": entry.joules for entry in report.energy}
    if report.flops is not None:
        counters["flops"] = report.flops
    if report.cpu_s is not None:
        counters["cpu_s"] = report.cpu_s
    if report.traffic is not None:
        traffic = report.traffic
        counters |= {"mqtt.up": traffic.mqtt_up, "mqtt.down": traffic.mqtt_down}
        if traffic.wire_up is not None and traffic.wire_down is not None:
            counters |= {"wire.up": traffic.wire_up, "wire.down": traffic.wire_down}
        if traffic.connected_s is not None:
            counters["connected_s"] = traffic.connected_s
        if traffic.retransmitted is not None:
            counters["retransmitted"] = traffic.retransmitted
        counters |= {f"payload.{name}": float(traffic.payload[name]) for name in KINDS if name in traffic.payload}
    return counters


def _energy(device: str, round_number: int, entry: device_messages.Energy, joules: float) -> tables.Energy:
    spread = entry.spread
    return tables.Energy(
        round=round_number, device=device, phase=entry.phase, joules=joules, source=entry.source,
        measured=entry.measured, low=None if spread is None else joules * spread.low,
        high=None if spread is None else joules * spread.high,
    )


def _energy_sum(left: tables.Energy, right: tables.Energy) -> tables.Energy:
    """The newer source; no spread if a modelled part has none. A measured part is its own low and high."""
    known = all(part.measured or part.low is not None for part in (left, right))
    modelled = known and not (left.measured and right.measured)
    low, high = (
        sum(part.joules if (bound := getattr(part, name)) is None else bound for part in (left, right))
        for name in ("low", "high")
    )
    return replace(right, joules=left.joules + right.joules, measured=left.measured and right.measured,
                   low=low if modelled else None, high=high if modelled else None)


def _both(a: N | None, b: N | None) -> N | None:
    return None if a is None and b is None else (a or 0) + (b or 0)


def _sum(left: tables.Traffic, right: tables.Traffic) -> tables.Traffic:
    return tables.Traffic(
        round=left.round, device=left.device, direction=left.direction, kind=left.kind,
        payload_bytes=left.payload_bytes + right.payload_bytes, mqtt_bytes=_both(left.mqtt_bytes, right.mqtt_bytes),
        wire_bytes=_both(left.wire_bytes, right.wire_bytes),
    )
