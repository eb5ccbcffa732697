"""Quarantine: finds devices with mostly refused updates, quarantines devices and releases them.

A quarantined device stays enrolled and connected, and answers with the served model. It is no longer a member: no round
asks it, and all duals start again from zero, as when a member leaves. An operator can release it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from cloud_server.identity.audit_log import Recorder
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Update
from cloud_server.membership.members import Members

WINDOW = 10
"""Number of closed rounds that are considered."""
LEAST = 3
"""A device is suspect only if its updates were refused in at least this many rounds."""
QUARANTINED, RELEASED = "quarantined", "released"
"""Keys of facts in the ledger: device -> why it is quarantined; device -> the last closed round at its release."""


class Quarantine:
    """Quarantines and releases devices, in the ledger and in ``Members``. automatic: also quarantines those that
    ``suspects`` finds. withdraw(device): removes its update from the open round."""

    def __init__(
        self, ledger: Ledger, members: Members, *, automatic: bool, withdraw: Callable[[str], None], audit: Recorder,
        log: Callable[[str], None],
    ):
        self._ledger, self._members, self._automatic = ledger, members, automatic
        self._withdraw, self._audit, self._log = withdraw, audit, log

    def quarantine(self, name: str, why: str) -> None:
        """Takes effect at once: the open round drops the device's update, and the next one resets the duals."""
        devices = self._members.quarantined
        if not self._members.enrolled(name) or name in devices:
            return
        self._set({**devices, name: why})
        self._log(f"{name} is quarantined, no round asks it: {why}")
        self._audit.done("quarantine", name, why)
        self._withdraw(name)

    def release(self, name: str, closed: int) -> None:
        """Makes the device a member again. closed: the last closed round; refusals up to it no longer count."""
        devices = dict(self._members.quarantined)
        if devices.pop(name, None) is None:
            return
        released = json.loads(self._ledger.fact(RELEASED) or "{}")
        self._set(devices, **{RELEASED: json.dumps({**released, name: closed}, sort_keys=True)})
        self._log(f"{name} is released from quarantine")
        self._audit.done("release", name)

    def after_round(self) -> None:
        for name, why in suspects(self._ledger).items() if self._automatic else ():
            self.quarantine(name, why)

    def _set(self, devices: Mapping[str, str], **facts: str) -> None:
        with self._ledger.transaction():
            self._ledger.set_facts(**{QUARANTINED: json.dumps(dict(devices), sort_keys=True)}, **facts)
            self._members.set_quarantined(devices)


def suspects(ledger: Ledger) -> dict[str, str]:
    """Device -> a sentence about its refused updates, for each device with more than half of its updates in the last
    closed rounds refused or clipped away. Rounds before a device's release do not count."""
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
