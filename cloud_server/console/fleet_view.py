"""Reads a fleet's folder and ledger into small JSON values, each with a key, so that only changed ones are sent.

    fleet     name, method, whether it runs, totals, budget, warnings
    d/NAME    a device
    r/NUMBER  a round, of the last MOST_ROUNDS
    l/KEY     an event of the log, of the last MOST_EVENTS

A figure that was not measured is absent from its value, never 0.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloud_server.console import events
from cloud_server.devices import fleet_status
from cloud_server.devices.devices import engine_of, listed_devices, pending_requests
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_sums import Joules, Volume
from cloud_server.ledger.ledger_tables import Device, Round, Update
from cloud_server.membership.quarantine import quarantined
from cloud_server.records.fleet_folder import Fleet
from cloud_server.reports.terminal_view import phase_of
from cloud_server.results import result, verdict
from cloud_server.rounds.budget import resting, used_of
from fleet_core.base import schema

Values = dict[str, Any]

MOST_ROUNDS = 1000
LATE_ROUNDS = 3  # reports of these last rounds are read at every look, those of earlier ones now and then
WHOLE_S, WHOLE_SHARE = 60.0, 30  # a whole read that took a second is followed by thirty without one


@dataclass
class _Seen:
    """What was read about rounds. training: round -> stage -> device -> accuracy, of devices that train. latest: device
    -> stage -> accuracy. troubles: device -> its last update that was refused or late."""

    rounds: dict[int, dict[str, Any]] = field(default_factory=dict)
    training: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    latest: dict[str, dict[str, float]] = field(default_factory=dict)
    troubles: dict[str, dict[str, Any]] = field(default_factory=dict)


class FleetView:
    """Reads the fleet in ``folder``. Belongs to the thread that made it. Raises ConfigError and StateError."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._fleet = Fleet.load(folder)
        self.ledger = Ledger(self._fleet.ledger_path, create=False)
        self._whole_at = float("-inf")
        self._seen = _Seen()
        self._warnings: list[str] = []

    def close(self) -> None:
        self.ledger.close()

    def read(self) -> Values:
        """All values that the page shows of the whole fleet."""
        started = time.monotonic()
        newest, first = self.ledger.newest(Round) or 0, max(self._seen.rounds, default=0) - LATE_ROUNDS
        whole = started >= self._whole_at
        if whole:
            self._fleet, self._seen, first = Fleet.load(self.folder), _Seen(), 0
            self._warnings = list(getattr(verdict.of_ledger(self.ledger), "warnings", ()))
        self._read_rounds(range(max(first, newest - MOST_ROUNDS + 1, 0), 1 << 31))
        rounds = dict(list(self._seen.rounds.items())[-MOST_ROUNDS:])
        values = {
            "fleet": self._facts(),
            **{f"d/{name}": value for name, value in self._devices().items()},
            **{f"r/{number}": value for number, value in rounds.items()},
            **events.values(self.folder, self.ledger, rounds),
        }
        if whole:
            now = time.monotonic()
            self._whole_at = now + max(WHOLE_S, WHOLE_SHARE * (now - started))
        return values

    # Parts ------------------------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        config = self._fleet.config
        budget, limits = config.budget, {}
        if budget is not None:
            limits = {name: getattr(budget, name) for name in ("bytes", "joules", "money", "target_accuracy")}
        sums = result.sums(self.ledger)
        facts = fleet_status.facts(self._fleet, self.ledger, sums)
        facts["totals"] = _slim(facts["totals"])
        if "update" in facts:  # numbers of devices, not their names
            facts["update"] = {k: len(v) if isinstance(v, list) else v for k, v in facts["update"].items()}
        volume = None if sums.payload_bytes is None else Volume(
            payload=sums.payload_bytes, mqtt=sums.mqtt_bytes, wire=sums.wire_bytes)
        used = used_of(volume, sums.energy_j, self._fleet.tariff)
        known = {
            "warnings": self._warnings, "classes": list(config.model.classes), "shape": list(config.model.sample.shape),
            "model": config.model.name, "limits": schema.present(limits), "used": used,
            "currency": self._fleet.tariff.currency if self._fleet.tariff else None,
        }
        lists = ("on", "off", "programs", "resting", "suspects", "quarantined", "moved")  # sent with each device
        counts = {"on_count": len(facts["on"]), "off_count": len(facts["off"])}
        return schema.present({**{k: v for k, v in facts.items() if k not in lists}, **counts, **known})

    def _devices(self) -> dict[str, dict[str, Any]]:
        ledger = self.ledger
        volume, kinds, joules = ledger.volume("device"), ledger.payload(), ledger.joules("device")
        fates = ledger.fates(by="device")
        pending, rests, shut_out = pending_requests(ledger), resting(ledger, time.time()), quarantined(ledger)
        return {
            row.name: schema.present({
                **_device(row), **_costs(volume.get(row.name), joules.get(row.name)),
                "kinds": {kind: [moved.up, moved.down] for kind, moved in kinds.get(row.name, {}).items()} or None,
                "counted": fates.get(row.name, {}).get("counted", 0), "pending": pending.get(row.name),
                "rests": rests.get(row.name), "quarantined": shut_out.get(row.name),
                "trouble": self._seen.troubles.get(row.name),
                **self._seen.latest.get(row.name, {}),
            })
            for row in listed_devices(ledger)
        }

    def _read_rounds(self, within: range) -> None:
        seen, ledger = self._seen, self.ledger
        for number, device, stage, new, accuracy in ledger.accuracies(within):
            seen.latest.setdefault(device, {})[stage] = accuracy
            if not new:
                seen.training.setdefault(number, {}).setdefault(stage, {})[device] = accuracy
        for status in ("refused", "late"):
            for update in ledger.each(Update, within, status=status):
                trouble = {"round": update.round, "text": update.reason, "what": status}
                if update.round >= seen.troubles.get(update.device, trouble)["round"]:
                    seen.troubles[update.device] = trouble
        fates, volume, joules = ledger.fates(within), ledger.volume("round", within), ledger.joules("round", within)
        for row in ledger.rounds(within=within):
            became, scored = fates.get(row.round, {}), seen.training.get(row.round, {})
            before, after = (list(scored.get(stage, {}).values()) for stage in ("before", "after"))
            seen.rounds[row.round] = schema.present({
                "round": row.round, "status": row.status, "opened_at": row.opened_at, "seconds": row.seconds,
                "asked": len(row.cohort), "note": row.note or None, "loss": row.loss,
                **{status: became.get(status, 0) for status in ("counted", "refused", "late")},
                "before": sum(before) / len(before) if before else None,
                "accuracy": _spread(after),
                **_costs(volume.get(row.round), joules.get(row.round)),
            })


def _spread(shares: Sequence[float]) -> dict[str, float] | None:
    return {"mean": sum(shares) / len(shares), "worst": min(shares), "best": max(shares)} if shares else None


def _device(row: Device) -> dict[str, Any]:
    said: Mapping[str, Any] = row.capabilities
    return {
        "name": row.name, "status": row.status, "state": row.state, "phase": phase_of(row) if said else None,
        "last_seen": row.last_seen, "version": row.version or None, "ram": said.get("ram") or None,
        "board": said.get("board") or None, "engine": engine_of(row) or None,
        "trains": said.get("train"), "cannot": row.cannot, "took_part": row.took_part, "new": row.new,
        "moved": said.get("moved") or None,
    }


def _costs(volume: Volume | None, joules: Joules | None) -> dict[str, Any]:
    moved = {name: [found.up, found.down] for name in ("payload", "mqtt", "wire")
             if volume is not None and (found := getattr(volume, name)) is not None}
    if joules is None:
        return moved
    said = schema.present({
        "value": joules.value, "low": joules.low, "high": joules.high, "source": joules.source,
        "phases": dict(joules.phases), "missing": joules.missing,
    })
    return {**moved, "joules": said}


def _slim(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Without the spread of each phase, which the page does not show."""
    energy = figures.get("energy_j")
    return {**figures, **({"energy_j": {k: v for k, v in energy.items() if k != "by_phase"}} if energy else {})}
