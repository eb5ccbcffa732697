"""The log: what happened to the fleet, newest last, from the ledger and from the console's audit log.

The aggregator's own lines go to its standard error, where a service keeps them; they are not in the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cloud_server.console import audit_log
from cloud_server.records.ledger import Ledger
from cloud_server.records.ledger_tables import Certificate, Round, Update

MOST_EVENTS = 300
ROUNDS_BACK = 100


def values(folder: Path, ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Key -> event of the last MOST_EVENTS: at (Unix seconds), kind, text, and the device or round that it is about."""
    found = {f"l/{key}": event for key, event in [*_rounds(ledger), *_devices(ledger), *_actions(folder)]}
    newest = sorted(found, key=lambda key: (found[key]["at"], key))[-MOST_EVENTS:]
    return {key: found[key] for key in newest}


Event = tuple[str, dict[str, Any]]


def _rounds(ledger: Ledger) -> list[Event]:
    within = range(max(0, (ledger.newest(Round) or 0) - ROUNDS_BACK), 1 << 31)
    found: list[Event] = []
    counted: dict[int, int] = {}
    for row in ledger.each(Update, within):
        counted[row.round] = counted.get(row.round, 0) + (row.status == "counted")
        if row.status != "counted":
            text = f"update of {row.device} {'refused' if row.status == 'refused' else 'came late'}"
            found.append((f"u{row.round}.{row.device}.{row.update_id}", {
                "at": row.received_at, "kind": "warning", "device": row.device, "round": row.round,
                "text": f"{text}: {row.reason}" if row.reason else text}))
    for one in ledger.rounds(within=within):
        about = {"round": one.round, "kind": "warning" if one.status == "abandoned" else "round"}
        if one.status == "open":
            found.append((f"o{one.round}", {**about, "at": one.opened_at,
                                            "text": f"round {one.round} opened: {len(one.cohort)} devices asked"}))
        else:
            text = (f"round {one.round} {one.status}: {counted.get(one.round, 0)} of {len(one.cohort)} devices counted"
                    + (f"; {one.note}" if one.note else ""))
            found.append((f"r{one.round}", {**about, "at": one.closed_at or one.opened_at, "text": text}))
    return found


def _devices(ledger: Ledger) -> list[Event]:
    found: list[Event] = []
    for device in ledger.devices():
        about = {"device": device.name, "kind": "device"}
        if device.first_seen is not None:
            found.append((f"j{device.name}", {**about, "at": device.first_seen, "text": f"{device.name} joined"}))
        if device.revoked_at is not None:
            found.append((f"x{device.name}", {**about, "at": device.revoked_at, "text": f"{device.name} was revoked"}))
    for row in ledger.each(Certificate):
        found.append((f"c{row.serial}", {"device": row.device, "kind": "device", "at": row.issued_at,
                                         "text": f"{row.device} got a certificate"}))
    return found


def _actions(folder: Path) -> list[Event]:
    return [(f"a{entry['id']}", {"at": entry["at"], "kind": "action", "text": audit_log.sentence(entry),
                                 **({"device": entry["device"]} if entry.get("device") else {})})
            for entry in audit_log.read(folder)]
