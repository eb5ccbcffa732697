"""Quarantine: which devices have had most of their last updates refused, who is quarantined, and who is released.

A quarantined device stays enrolled and connected and answers with the served model. It is no member: no round asks it,
and as when a member leaves, all duals start again without its own. An operator lets it back in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from cloud_server.identity.audit_log import Recorder
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Update
from cloud_server.rounds.members import Members

WINDOW = 10
"""Closed rounds that are looked at."""
LEAST = 3
"""Rounds of these in which a device was refused before it is named."""
QUARANTINED, RELEASED = "quarantined", "released"
"""Facts of the ledger: device -> why it is quarantined; device -> the last closed round when it was released."""


class Quarantine:
    """Puts devices into quarantine and releases them, in the ledger and among the members. automatic: also those that
    ``suspects`` names. withdraw(device): its update of the open round is not used."""

    def __init__(
        self, ledger: Ledger, members: Members, *, automatic: bool, withdraw: Callable[[str], None], audit: Recorder,
        log: Callable[[str], None],
    ):
        self._ledger, self._members, self._automatic = ledger, members, automatic
        self._withdraw, self._audit, self._log = withdraw, audit, log

    def quarantine(self, name: str, why: str) -> None:
        """At once: the open round does without the device's update, and the next one makes up for its dual."""
        devices = self._members.quarantined
        if not self._members.enrolled(name) or name in devices:
            return
        self._set({**devices, name: why})
        self._log(f"{name} is quarantined, no round asks it: {why}")
        self._audit.done("quarantine", name, why)
        self._withdraw(name)

    def release(self, name: str, closed: int) -> None:
        """closed: the last closed round; what was refused up to it does not count against the device any more."""
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
