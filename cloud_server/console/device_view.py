"""One device: its facts, its accuracy over the rounds, what became of its updates, what each round cost it."""

from __future__ import annotations

from typing import Any

from cloud_server.devices.devices import facts_of, known_device
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Energy, Evaluation, TaskEvaluation, Traffic, Update
from cloud_server.records.fleet_folder import Fleet
from cloud_server.results.result import score_of, task_score
from fleet_core.base import schema
from fleet_core.power.meter import WORKING

MOST_ROUNDS = 1000
MOST_UPDATES = 200


def shown(fleet: Fleet, ledger: Ledger, name: str) -> dict[str, Any]:
    """Plain values, without those that are not known. Raises ConfigError for a device that is not there."""
    facts = facts_of(ledger, [known_device(ledger, fleet.folder, name)])[0]
    kept = ("name", "status", "certificate", "pending", "token", "resting", "enrolled_round", "first_seen", "last_seen",
            "revoked_at", "version")
    said = facts["capabilities"] or {}
    return {
        **schema.present({key: facts[key] for key in kept}),
        "capabilities": {key: value for key, value in said.items() if key not in ("boot", "st", "base", "beat")},
        "usage": schema.present(ledger.usage().get(name, {})),
        "absent_energy": list(ledger.absent_energy("device").get(name, ())),
        "evaluations": _evaluations(ledger, name), "updates": _updates(ledger, name), "rounds": _costs(ledger, name),
    }


def _evaluations(ledger: Ledger, name: str) -> list[dict[str, Any]]:
    """A row for each evaluated round: accuracy, or the measures of a task, and method by stage, and the last counts."""
    found: dict[int, dict[str, Any]] = {}
    confusion = None
    for row in ledger.each(Evaluation, device=name):
        found.setdefault(row.round, {"round": row.round})[row.stage] = \
            schema.present(schema.plain(score_of(row)))
        if row.stage == "after":
            confusion = row.confusion
    for one in ledger.each(TaskEvaluation, device=name):
        score = task_score([one])
        found.setdefault(one.round, {"round": one.round})[one.stage] = {
            "measures": score and score.measures, "method": one.method}
    rows = [found[number] for number in sorted(found)][-MOST_ROUNDS:]
    if rows and confusion is not None and len(confusion) <= 30:
        rows[-1]["confusion"] = confusion
    return rows


def _updates(ledger: Ledger, name: str) -> list[dict[str, Any]]:
    rows = [{"round": one.round, "at": one.received_at, **update_facts(one)}
            for one in ledger.each(Update, device=name)]
    return rows[-MOST_UPDATES:]


def update_facts(one: Update) -> dict[str, Any]:
    """What became of an update, and its figures as far as they are known."""
    return schema.present({
        "status": "skipped" if one.skipped else one.status, "reason": one.reason or None, "samples": one.samples,
        "loss": one.loss, "bytes": one.payload_bytes,
    })


def _costs(ledger: Ledger, name: str) -> list[dict[str, Any]]:
    """A row for each round with bytes or joules: payload up and down, joules of work."""
    found: dict[int, dict[str, Any]] = {}
    for row in ledger.each(Traffic, device=name):
        at = found.setdefault(row.round, {"round": row.round, "up": 0, "down": 0})
        at[row.direction] += row.payload_bytes
    for one in ledger.each(Energy, device=name):
        if one.phase in WORKING:
            at = found.setdefault(one.round, {"round": one.round})
            at["joules"] = at.get("joules", 0.0) + one.joules
    return [found[number] for number in sorted(found)][-MOST_ROUNDS:]
