"""``[alerts]``: what in a fleet needs a person's attention, and when a message about it is sent.

An alert is sent when it begins, when it concerns further devices, every ``repeat_s`` while it lasts, and when it is
over, with at least ``pause_s`` between two messages of a kind. ``alerts.json`` in the fleet's folder keeps what was
sent, so that a restart repeats nothing. The aggregator checks while it runs, ``metafleet server alerts --watch`` while
no aggregator runs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography import x509

from cloud_server.figures.formatting import count_text
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Certificate, Device, Evaluation, Update
from cloud_server.records import update_record
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.fleet_settings import AlertsSection
from cloud_server.results.accuracy_drop import lost
from cloud_server.results.evaluations import accuracies
from fleet_core.base import schema, storage
from fleet_core.base.errors import shortened

FILE = "alerts.json"
LOOK_S = 30.0
ROUNDS_BACK, EVALUATED_BACK = 20, 500
MOST_NAMES = 20
DAY_S = 86_400.0


@dataclass(frozen=True)
class Alert:
    """kind: aggregator | stalled | lost | refused | disk | certificate | accuracy | drift | update. devices: those that
    it concerns."""

    kind: str
    text: str
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Told:
    """The last message of a kind. since, at: Unix seconds of the first and of the last message about it. over: the last
    message said that the alert is over."""

    kind: str
    since: float
    at: float
    text: str
    devices: tuple[str, ...] = ()
    over: bool = False


@dataclass(frozen=True)
class Kept:
    """alerts.json."""

    told: tuple[Told, ...] = ()


class Alerts:
    """Decides which messages about one fleet are sent."""

    def __init__(self, fleet: Fleet, section: AlertsSection):
        self._fleet, self._section = fleet, section
        self._path = fleet.folder / FILE

    def look(self, ledger: Ledger, now: float) -> list[dict[str, Any]]:
        """The messages that are due at ``now``, Unix seconds. Raises StateError."""
        told, messages = self._told(), list[dict[str, Any]]()
        before = dict(told)
        found = {alert.kind: alert for alert in present(self._fleet, ledger, self._section, now)}
        for kind in sorted(found.keys() | told.keys()):
            next_one = self._next(found.get(kind), told.pop(kind, None), now)
            if next_one is not None:
                told[kind] = next_one
                if next_one != before.get(kind):
                    messages.append(self._message(next_one, now))
        if told != before:
            storage.write_json(self._path, schema.plain(Kept(tuple(told.values()))))
        return messages

    def _next(self, alert: Alert | None, before: Told | None, now: float) -> Told | None:
        """The last message of a kind at ``now``: ``before`` itself if none is due; None to forget it."""
        if before is not None and now - before.at < self._section.pause_s:
            return before
        if alert is None:
            return None if before is None or before.over else replace(before, at=now, over=True)
        if before is None or before.over:
            return Told(alert.kind, now, now, alert.text, alert.devices)
        new = bool(set(alert.devices) - set(before.devices))
        if new or now - before.at >= self._section.repeat_s:
            return replace(before, at=now, text=alert.text, devices=alert.devices)
        return before

    def test(self, now: float) -> dict[str, Any]:
        """A test message."""
        return self._message(Told("test", now, now, "a test, nothing is wrong"), now)

    def _message(self, told: Told, now: float) -> dict[str, Any]:
        name = self._fleet.config.fleet.name
        return {
            "fleet": name, "kind": told.kind, "state": "over" if told.over else "alert", "since": told.since, "at": now,
            "text": f"{name}: {'over: ' if told.over else ''}{told.text}", "devices": list(told.devices[:MOST_NAMES]),
        }

    def _told(self) -> dict[str, Told]:
        """The alerts sent so far; empty if the file is missing or damaged."""
        try:
            kept, _ = schema.read(Kept, json.loads(self._path.read_bytes()), unknown="ignore")
        except (OSError, ValueError, RecursionError):
            kept = None
        return {} if kept is None else {one.kind: one for one in kept.told}


def present(fleet: Fleet, ledger: Ledger, section: AlertsSection, now: float) -> list[Alert]:
    """The alerts about the fleet at ``now``, Unix seconds."""
    enrolled = {device.name: device for device in ledger.each(Device) if device.status == "enrolled"}
    found = [*_disk(fleet.folder, section), *_certificates(fleet, ledger, enrolled, section, now)]
    if not fleet.running():
        return [Alert("aggregator", "no aggregator runs: metafleet server start"), *found]
    if stalled := ledger.fact("stalled"):
        found.append(Alert("stalled", f"the fleet is stalled: {stalled}"))
    return [*found, *_lost(enrolled, section, now), *_refused(ledger, enrolled), *_accuracy(ledger, section),
            *_drift(enrolled), *_update(fleet.folder)]


def _disk(folder: Path, section: AlertsSection) -> Iterator[Alert]:
    free = shutil.disk_usage(folder).free / 2**20
    if free < section.disk_mib:
        yield Alert("disk", f"the disk of {folder} has {free:.0f} MiB left, fewer than [alerts] asks for: "
                            f"{section.disk_mib:g}")


def _certificates(
    fleet: Fleet, ledger: Ledger, enrolled: dict[str, Device], section: AlertsSection, now: float
) -> Iterator[Alert]:
    """Certificates that end soon. A device renews its own in time, unless it cannot."""
    last: dict[str, float] = {}
    for row in ledger.each(Certificate):
        if row.device in enrolled and row.revoked_at is None:
            last[row.device] = max(row.expires_at, last.get(row.device, 0.0))
    soon = now + section.certificate_days * DAY_S
    devices = tuple(sorted(name for name, ends in last.items() if ends < soon))
    files = [path.name for path in sorted(fleet.folder.glob("*.pem")) if _ends(path) < soon]
    if devices or files:
        names = ", ".join(shortened([*files, *devices]))
        yield Alert("certificate", f"certificates end within {section.certificate_days:g} days: {names}", devices)


def _ends(path: Path) -> float:
    """When the certificate in a file ends, Unix seconds; never for a file without one."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return float("inf")


def _lost(enrolled: dict[str, Device], section: AlertsSection, now: float) -> Iterator[Alert]:
    lost = tuple(sorted(
        name for name, device in enrolled.items()
        if device.took_part and device.state == "off" and now - (device.last_seen or 0.0) > section.lost_after_s
    ))
    if lost:
        yield Alert("lost", f"{count_text(len(lost), 'device')} off for more than {section.lost_after_s:g} s: "
                            f"{', '.join(shortened(lost))}", lost)


def _refused(ledger: Ledger, enrolled: dict[str, Device]) -> Iterator[Alert]:
    """Devices whose last update was refused."""
    newest = ledger.newest(Update) or 0
    last = {row.device: row for row in ledger.each(Update, range(newest - ROUNDS_BACK, newest + 1))}
    refused = {name: row.reason for name, row in sorted(last.items()) if name in enrolled and row.status == "refused"}
    if refused:
        reasons = shortened([f"{name} ({reason})" for name, reason in refused.items()])
        yield Alert("refused", f"these devices' last updates were refused: {', '.join(reasons)}", tuple(refused))


def _update(folder: Path) -> Iterator[Alert]:
    """An update that devices fetch themselves and that was halted, because too many of them failed."""
    update = update_record.read(folder)
    if update is not None and update.st == update_record.HALTED:
        failed = update.of(update_record.FAILED)
        yield Alert("update", f"the update to {update.plan.version} is halted: {update.why}", tuple(failed))


def _drift(enrolled: dict[str, Device]) -> Iterator[Alert]:
    moved = tuple(sorted(name for name, device in enrolled.items() if device.capabilities.get("moved")))
    if moved:
        yield Alert("drift", f"the samples of {count_text(len(moved), 'device')} have moved away from those that they "
                             f"were personalized on: {', '.join(shortened(moved))}", moved)


def _accuracy(ledger: Ledger, section: AlertsSection) -> Iterator[Alert]:
    """Compares the last evaluated round with the earlier ones, over the devices that were evaluated in both. Rounds
    with too few such devices are left out."""
    newest = ledger.newest(Evaluation, new=False) or 0
    last = accuracies(ledger, range(newest, newest + 1)).get(newest, {})
    worst = (0.0, 0)
    for number in range(max(newest - EVALUATED_BACK, 0), newest):  # one at a time: a large fleet's are many
        for earlier in accuracies(ledger, range(number, number + 1)).values():
            if losses := lost(earlier, last):
                worst = max(worst, (sum(losses) / len(losses), number))
    if worst[0] > section.accuracy_drop:
        yield Alert("accuracy", f"the devices' accuracy is {100 * worst[0]:.1f} points below that of round {worst[1]}")
