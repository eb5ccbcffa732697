"""Which devices have had most of their last updates refused, and which are quarantined.

A quarantined device stays enrolled and connected and answers with the served model. It is no member: no round asks it,
and as when a member leaves, all duals start again without its own. An operator lets it back in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Update

WINDOW = 10
"""Closed rounds that are looked at."""
LEAST = 3
"""Rounds of these in which a device was refused before it is named."""
QUARANTINED, RELEASED = "quarantined", "released"
"""Facts of the ledger: device -> why it is quarantined; device -> the last closed round when it was released."""


def suspects(ledger: Ledger) -> dict[str, str]:
    """Device -> how many of its updates in the last closed rounds were refused or clipped away, if that is more than
    half of them. Rounds before a device was released do not count."""
    closed = [row.round for row in ledger.rounds("closed")][-WINDOW:]
    if not closed:
        return {}
    within, released = range(closed[0], closed[-1] + 1), json.loads(ledger.fact(RELEASED) or "{}")
    bad: dict[str, dict[int, str]] = {}
    for row in ledger.rows(Update, within, status="refused"):
        if row.round > released.get(row.device, 0):
            bad.setdefault(row.device, {})[row.round] = row.reason
    good: dict[str, set[int]] = {}
    for row in ledger.rows(Update, within, status="counted"):
        if row.reason and row.round > released.get(row.device, 0):
            bad.setdefault(row.device, {})[row.round] = row.reason
        elif row.device in bad:
            bad[row.device].pop(row.round, None)  # a second try in the same round was counted
            good.setdefault(row.device, set()).add(row.round)
    found = {}
    for device, reasons in sorted(bad.items()):
        total = len(reasons) + sum(number > released.get(device, 0) for number in good.get(device, ()))
        if len(reasons) >= LEAST and 2 * len(reasons) > total:
            last = reasons[max(reasons)]
            found[device] = f"{len(reasons)} of its last {total} updates were refused or clipped away: {last}"
    return found


def quarantined(ledger: Ledger) -> dict[str, str]:
    """Device -> why it is quarantined."""
    return dict(json.loads(ledger.fact(QUARANTINED) or "{}"))


def keep(ledger: Ledger, devices: Mapping[str, str]) -> None:
    """Writes which devices are quarantined."""
    ledger.set_facts(**{QUARANTINED: json.dumps(dict(devices), sort_keys=True)})


def note_release(ledger: Ledger, device: str, closed: int) -> None:
    """closed: the last closed round; what was refused up to it does not count against the device any more."""
    known = json.loads(ledger.fact(RELEASED) or "{}")
    ledger.set_facts(**{RELEASED: json.dumps({**known, device: closed}, sort_keys=True)})
