"""Reads a fleet's folder and ledger into small JSON values, each with a key, so that changed ones can be told.

    fleet     name, method, whether it runs, totals, budget, warnings
    d/NAME    a device
    r/NUMBER  a round, of the last MOST_ROUNDS
    l/KEY     an event of the log, of the last MOST_EVENTS

A figure that was not measured is absent from its value, never 0.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloud_server.console import events
from cloud_server.devices import fleet_status
from cloud_server.devices.devices import listed_devices, pending_requests
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.ledger import Ledger
from cloud_server.records.ledger_sums import Joules, Volume
from cloud_server.records.ledger_tables import Device, Evaluation, Round, Update
from cloud_server.reports import result, verdict
from cloud_server.reports.terminal_view import phase_of
from cloud_server.rounds.budget import resting, used_of

Values = dict[str, Any]

MOST_ROUNDS = 2000
LATE_ROUNDS = 20  # reports of these last rounds may still arrive; older ones are read again at every whole read
WHOLE_S = 60.0


@dataclass
class _Scores:
    """Round -> stage -> device -> accuracy, of the devices that train and of those that do not."""

    training: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    latest: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)

    def add(self, row: Evaluation) -> None:
        if not row.new:
            self.training.setdefault(row.round, {}).setdefault(row.stage, {})[row.device] = row.accuracy
        self.latest.setdefault(row.device, {})[row.stage] = (row.round, row.accuracy)


class FleetView:
    """Reads the fleet in ``folder``. Belongs to the thread that made it. Raises ConfigError and StateError."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.ledger = Ledger(Fleet.load(folder).ledger_path, create=False)
        self._whole_at = float("-inf")
        self._fleet: Fleet
        self._scores = _Scores()
        self._rounds: dict[int, Any] = {}
        self._verdict: list[str] = []
        self._troubles: dict[str, dict[str, Any]] = {}

    def close(self) -> None:
        self.ledger.close()

    def read(self) -> Values:
        """Everything that the page shows of the fleet as a whole."""
        whole = time.monotonic() - self._whole_at >= WHOLE_S
        first = 0 if whole else max(self._rounds, default=0) - LATE_ROUNDS
        if whole:
            self._fleet = Fleet.load(self.folder)
            self._scores, self._rounds, self._troubles = _Scores(), {}, {}
        within = range(first, 1 << 31)
        for row in self.ledger.each(Evaluation, within):
            self._scores.add(row)
        self._read_rounds(range(max(first, (self.ledger.newest(Round) or 0) - MOST_ROUNDS + 1), 1 << 31))
        if whole:
            self._verdict = list(getattr(verdict.of_ledger(self.ledger), "warnings", ()))
            self._whole_at = time.monotonic()
        return {
            "fleet": self._facts(),
            **{f"d/{name}": value for name, value in self._devices().items()},
            **{f"r/{number}": value for number, value in list(self._rounds.items())[-MOST_ROUNDS:]},
            **events.values(self.folder, self.ledger),
        }

    # Parts ------------------------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        config = self._fleet.config
        facts = fleet_status.facts(self._fleet, self.ledger)
        facts["totals"] = _slim(facts["totals"])
        budget, limits = config.budget, {}
        if budget is not None:
            limits = {name: getattr(budget, name) for name in ("bytes", "joules", "money", "target_accuracy")}
        used = used_of(self.ledger.volume().get(None), self.ledger.joules().get(None), self._fleet.tariff)
        known = {
            "warnings": self._verdict, "classes": list(config.model.classes), "shape": list(config.model.input.shape),
            "model": config.model.name, "limits": _known(limits), "used": used,
            "currency": self._fleet.tariff.currency if self._fleet.tariff else None,
        }
        lists = ("on", "off", "programs", "resting")  # said with each device
        counts = {"on_count": len(facts["on"]), "off_count": len(facts["off"])}
        return _known({**{k: v for k, v in facts.items() if k not in lists}, **counts, **known})

    def _devices(self) -> dict[str, dict[str, Any]]:
        ledger = self.ledger
        volume, kinds, joules = ledger.volume("device"), ledger.payload(), ledger.joules("device")
        counted = Counter(row.device for row in ledger.each(Update, status="counted"))
        pending, rests = pending_requests(ledger), resting(ledger, time.time())
        return {
            row.name: _known({
                **_device(row), **_costs(volume.get(row.name), joules.get(row.name)),
                "kinds": {kind: [moved.up, moved.down] for kind, moved in kinds.get(row.name, {}).items()} or None,
                "counted": counted[row.name], "pending": pending.get(row.name), "rests": rests.get(row.name),
                "trouble": self._troubles.get(row.name),
                **{stage: at[1] for stage, at in self._scores.latest.get(row.name, {}).items()},
            })
            for row in listed_devices(ledger)
        }

    def _read_rounds(self, within: range) -> None:
        became: dict[int, Counter[str]] = defaultdict(Counter)
        for update in self.ledger.each(Update, within):
            became[update.round][update.status] += 1
            if update.status != "counted":
                self._troubles[update.device] = {"round": update.round, "text": update.reason, "what": update.status}
        figures = {one.round: result.plain(one) for one in result.round_figures(self.ledger, within)}
        for row in self.ledger.rounds(within=within):
            before = self._scores.training.get(row.round, {}).get("before")
            self._rounds[row.round] = _known({
                **_slim(figures.get(row.round, {})), "round": row.round, "status": row.status,
                "opened_at": row.opened_at, "asked": len(row.cohort), "counted": became[row.round]["counted"],
                "note": row.note or None,
                "refused": became[row.round]["refused"], "late": became[row.round]["late"], "seconds": row.seconds,
                "before": sum(before.values()) / len(before) if before else None,
            })


def _device(row: Device) -> dict[str, Any]:
    said: Mapping[str, Any] = row.capabilities
    return {
        "name": row.name, "status": row.status, "state": row.state, "phase": phase_of(row) if said else None,
        "last_seen": row.last_seen, "version": row.version or None, "ram": said.get("ram") or None,
        "trains": said.get("train"), "cannot": row.cannot, "took_part": row.took_part, "new": row.new,
    }


def _costs(volume: Volume | None, joules: Joules | None) -> dict[str, Any]:
    moved = {name: [found.up, found.down] for name in ("payload", "mqtt", "wire")
             if volume is not None and (found := getattr(volume, name)) is not None}
    if joules is None:
        return moved
    said = _known({"value": joules.value, "low": joules.low, "high": joules.high, "source": joules.source,
                   "phases": dict(joules.phases), "missing": joules.missing})
    return {**moved, "joules": said}


def _slim(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Without the spread of each phase, which the page does not show."""
    energy = figures.get("energy_j")
    return {**figures, **({"energy_j": {k: v for k, v in energy.items() if k != "by_phase"}} if energy else {})}


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
