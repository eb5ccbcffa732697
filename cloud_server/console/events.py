"""The log: what happened to the fleet, newest last, from the ledger and from the audit log.

The aggregator's own lines go to its standard error, where a service keeps them; they are not in the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloud_server.identity import audit_log
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Certificate, Update

MOST_EVENTS = 300
ROUNDS_BACK = 100


def values(folder: Path, ledger: Ledger, rounds: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Key -> event of the last MOST_EVENTS: at (Unix seconds), kind, text, and the device or round that it is about.
    rounds: as ``fleet_view`` reads them."""
    found = {f"l/{key}": event for key, event in [*_rounds(ledger, rounds), *_devices(ledger), *_actions(folder)]}
    newest = sorted(found, key=lambda key: (found[key]["at"], key))[-MOST_EVENTS:]
    return {key: found[key] for key in newest}


Event = tuple[str, dict[str, Any]]


def _rounds(ledger: Ledger, rounds: Mapping[int, Mapping[str, Any]]) -> list[Event]:
    recent = list(rounds.values())[-ROUNDS_BACK:]
    within = range(recent[0]["round"] if recent else 0, 1 << 31)
    found: list[Event] = []
    for status, became in (("refused", "was refused"), ("late", "came too late")):
        for row in ledger.each(Update, within, status=status):
            text = f"an update of {row.device} {became}{f': {row.reason}' if row.reason else ''}"
            found.append((f"u{row.round}.{row.device}.{row.update_id}", {
                "at": row.received_at, "kind": "warning", "device": row.device, "round": row.round, "text": text}))
    for one in recent:
        number, about = one["round"], {"round": one["round"], "kind": "round"}
        if one["status"] == "open":
            text = f"round {number} opened: {one['asked']} devices asked"
            found.append((f"o{number}", {**about, "at": one["opened_at"], "text": text}))
            continue
        note = f"; {one['note']}" if "note" in one else ""
        text = f"round {number} {one['status']}: {one['counted']} of {one['asked']} devices counted{note}"
        kind = {"kind": "warning"} if one["status"] == "abandoned" else {}
        found.append((f"r{number}", {**about, **kind, "at": one["opened_at"] + one.get("seconds", 0.0), "text": text}))
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
            for entry in audit_log.read(folder) if entry.get("via") != audit_log.AGGREGATOR]  # the ledger has those
