"""Which devices belong to the fleet and which are on: enrolment, presence, heartbeats.

A member that leaves takes its dual with it, and the server cannot subtract that dual from its sum. ``leaves`` counts
these cases on disk, and lost training states too; after one, the next round starts every dual from zero
(``ServerRule.left``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, replace
from sys import intern

from cloud_server.broadcast.delta_chain import Holder
from cloud_server.identity.audit_log import Recorder
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device
from fleet_core.base import schema
from fleet_core.protocol import messages
from fleet_core.protocol.device_messages import Presence, reads

SILENT_S = 4.5
WORKING = ("train", "upload")
STRANGERS = 1000


@dataclass(slots=True)
class _Known:
    """What is kept of a device in memory; the rest is in the ledger.

    boot: id of the device's last start, or empty. state: on | off; empty until the aggregator has heard from the device
    since its own start. base: id of the training model that the device holds. chain: whether it can take a model as a
    chain of deltas. heard_s: clock time of its last message. lost: it is off because its connection broke. Texts that
    thousands of devices share (state, phase, base) are interned.
    """

    enrolled: bool
    new: bool
    took_part: bool
    boot: str = ""
    state: str = ""
    phase: str = ""
    base: str = ""
    chain: bool = False
    heard_s: float = 0.0
    lost: bool = False


class Members:
    """The devices of one fleet, in memory and in the ledger.

    everyone: enrol every device that announces itself. cannot(presence): why a device cannot take part, or None.
    ``quarantined``: device -> why it is quarantined; set by ``Quarantine``. ``resting``: device -> why it is not asked
    today; set by ``Budget``.
    """

    def __init__(
        self, ledger: Ledger, *, everyone: bool, quarantined: Mapping[str, str],
        cannot: Callable[[Presence], str | None], audit: Recorder, clock: Callable[[], float],
        now: Callable[[], float], log: Callable[[str], None],
    ):
        self._ledger, self._everyone, self._cannot, self._audit = ledger, everyone, cannot, audit
        self._clock, self._now, self._log = clock, now, log
        self._listens_from = -math.inf
        self._devices: dict[str, _Known] = {}
        self._strangers: dict[str, Presence] = {}
        self._awaited: set[str] = set()
        self._members: set[str] = set()
        self._ready: set[str] = set()
        self._reads_less: dict[str, int] = {}
        self.resting: Mapping[str, str] = {}
        self.quarantined: Mapping[str, str] = quarantined
        self.leaves = int(ledger.fact("leaves") or "0")
        for device in ledger.each(Device):
            self._know(device)
            if device.state == "on" and device.name in self._members:
                self._awaited.add(device.name)
            if device.state == "on":
                told = device.capabilities
                self._know_reads(device.name, reads(bool(told.get("packed")), int(told.get("dictionary", 0))))

    # Questions --------------------------------------------------------------------------------------------------------

    def enrolled(self, name: str) -> bool:
        return name in self._devices and self._devices[name].enrolled

    def revoked(self, name: str) -> bool:
        return name in self._devices and not self._devices[name].enrolled

    def revoked_at(self, name: str) -> float | None:
        """Unix seconds, or None if the ledger has no time."""
        return self._row(name).revoked_at

    def boot(self, name: str) -> str:
        """The id of the device's last known start."""
        return self._devices[name].boot

    def members(self) -> Set[str]:
        """The enrolled devices that train; their number is the papers' m. A device enrolled by name becomes a member
        when its presence says that it trains."""
        return self._members

    def ready(self) -> Set[str]:
        """Members that are on and able to take part."""
        return self._ready

    def askable(self) -> Set[str]:
        """Ready members that are not resting."""
        return self._ready - self.resting.keys() if self.resting else self._ready

    def all_read(self) -> int:
        """What every device that is on, or was on when the aggregator restarted, can read (``messages.encode``)."""
        return min(self._reads_less.values(), default=messages.SHORT)

    def awaited(self) -> bool:
        """Whether a member that was on before the aggregator restarted has sent nothing since."""
        return bool(self._awaited)

    def alive(self, name: str) -> bool:
        """Whether the device is on and, if it trains or uploads, was heard within ``SILENT_S``."""
        known = self._devices.get(name)
        if known is None or known.state != "on":
            return False
        return known.phase not in WORKING or self._silent_s(known) < SILENT_S

    def expected(self, name: str) -> bool:
        """Whether an update of this device may still arrive. A device whose connection broke has ``SILENT_S`` to
        reconnect."""
        known = self._devices.get(name)
        if known is not None and known.state == "off":
            return known.lost and self._silent_s(known) < SILENT_S
        return name in self._ready and self.alive(name)

    def listen_again(self) -> None:
        """After work during which no message was read: silence counts from now on."""
        self._listens_from = self._clock()

    def _silent_s(self, known: _Known) -> float:
        return self._clock() - max(known.heard_s, self._listens_from)

    def not_on(self) -> list[str]:
        """Enrolled devices that are not on."""
        return [name for name, known in self._devices.items() if known.enrolled and known.state != "on"]

    def off_for(self, seconds: float) -> set[str]:
        """Devices that have been off for longer."""
        rows = self._ledger.rows(Device, state="off", status="enrolled")
        return {row.name for row in rows if row.last_seen is not None and self._now() - row.last_seen > seconds}

    @property
    def listening(self) -> int:
        """How many enrolled devices are on."""
        return sum(known.enrolled and known.state == "on" for known in self._devices.values())

    def numbers(self) -> str:
        enrolled = sum(known.enrolled for known in self._devices.values())
        return f"{self.listening} of {enrolled} enrolled devices on"

    def standing(self, name: str) -> str:
        """A device's state in a few words, for log lines."""
        known = self._devices.get(name)
        if known is None or not known.state:
            return "not on since the aggregator started"
        seconds = f"{self._clock() - known.heard_s:.0f} s"
        if known.state == "off":
            return f"off for {seconds}"
        return f"on, phase {known.phase}, " + (f"heard {seconds} ago" if self.alive(name) else f"silent for {seconds}")

    def phase(self, name: str) -> str:
        return self._devices[name].phase if name in self._devices else ""

    def lacking(self, model: str, names: Collection[str]) -> list[Holder]:
        """A ``Holder`` for each ready device of ``names`` that is not known to hold ``model``."""
        known = (self._devices[name] for name in names if name in self._ready)
        return [Holder(one.base, one.chain) for one in known if one.base != model]

    def has_taken_part(self, name: str) -> bool:
        """Whether an update of this device was counted."""
        return self._devices[name].took_part

    def took_part(self, names: Collection[str], model: str) -> None:
        """Marks devices whose updates were counted. model: id of the training model."""
        for name in names:
            self._devices[name].base = intern(model)
            if not self._devices[name].took_part:
                self._put(replace(self._row(name), took_part=True))

    def answered(self, name: str) -> None:
        """Notes that the device's upload is over. The device was told so, and need not say it in a heartbeat."""
        self._devices[name].phase = "idle"

    # Enrolment --------------------------------------------------------------------------------------------------------

    def enroll(self, name: str, closed: int, *, trains: bool = False) -> None:
        """Enrols a device, and applies the presence that it sent before. closed: the last closed round."""
        if self.enrolled(name):
            return
        now = self._now()
        self._devices.pop(name, None)  # it may be known from before it was revoked
        with self._ledger.transaction(durable=False):
            self._put(Device(name=name, enrolled_round=closed + 1, first_seen=now, last_seen=now, new=not trains))
        self._log(f"{name} enrolled")
        self._audit.done("enrol", name, durable=False)
        waiting = self._strangers.pop(name, None)
        if waiting is not None:
            self.on_presence(name, waiting, closed)

    def revoke(self, name: str) -> None:
        if not self.enrolled(name):
            return
        was_member = name in self._members
        with self._ledger.transaction():
            self._put(replace(self._row(name), status="revoked", revoked_at=self._now()))
            if was_member:
                self.count_leave()
        self._log(f"{name} revoked")
        self._audit.done("revoke", name)

    def set_quarantined(self, devices: Mapping[str, str]) -> None:
        """Replaces ``quarantined``; devices stop being members or become members again. Call it in a transaction."""
        changed = {name for name in devices.keys() ^ self.quarantined.keys() if name in self._devices}
        self.quarantined = devices
        for name in changed:
            if name in self._members:
                self.count_leave()
            row = self._row(name)
            self._know(row)
            if name in self._members and row.state == "on" and row.cannot is None:
                self._ready.add(name)

    def count_leave(self, **facts: str) -> None:
        """facts: written with the count."""
        self.leaves += 1
        self._ledger.set_facts(leaves=str(self.leaves), **facts)

    # Presence ---------------------------------------------------------------------------------------------------------

    def heard(self, name: str) -> None:
        self._devices[name].heard_s = self._clock()

    def on_presence(self, name: str, presence: Presence, closed: int) -> None:
        """Notes a presence or a heartbeat. closed: the last closed round.

        A power cut may lose the row, because the device announces itself again, but never a leave."""
        if presence.beat:
            return self._on_beat(name, presence)
        if name not in self._devices and self._everyone:
            self.enroll(name, closed, trains=presence.train)
        if not self.enrolled(name):
            return self._on_stranger(name, presence)
        known = self._devices[name]
        if presence.st == "off" and known.boot not in ("", presence.boot):
            return  # the last will of an earlier start
        stopped = presence.st == "on" and not known.new and not presence.train
        with self._ledger.transaction(durable=stopped):
            if stopped:
                self.count_leave()
                self._log(f"{name} no longer trains")
            self._put(self._described(self._row(name), presence))
        known.state, known.phase = intern(presence.st), intern(presence.ph)
        known.lost = presence.st == "off" and not presence.ver  # a last will does not name a version
        if presence.st == "on":
            known.boot, known.base, known.chain = presence.boot, intern(presence.base), presence.chain
        self.heard(name)
        self._awaited.discard(name)
        self._know_reads(name, presence.reads if presence.st == "on" else messages.SHORT)
        able = name in self._members and presence.st == "on" and not self._cannot(presence)
        (self._ready.add if able else self._ready.discard)(name)

    def _described(self, row: Device, presence: Presence) -> Device:
        row = replace(row, state=presence.st, phase=presence.ph, last_seen=self._now())
        if presence.st == "off":
            return row
        return replace(
            row, version=presence.ver, cannot=self._cannot(presence), capabilities=schema.plain(presence),
            new=not presence.train,
        )

    def _on_beat(self, name: str, presence: Presence) -> None:
        known = self._devices.get(name)
        if known is not None and known.enrolled and known.state and known.boot == presence.boot:
            known.phase = intern(presence.ph)
            self.heard(name)

    def _on_stranger(self, name: str, presence: Presence) -> None:
        if self.revoked(name) and (row := self._row(name)).state != presence.st:
            with self._ledger.transaction(durable=False):
                self._put(replace(row, state=presence.st))
        if name not in self._strangers:
            self._log(f"{name} is not enrolled: ignored (metafleet devices enroll FLEET {name})")
        self._strangers[name] = presence
        while len(self._strangers) > STRANGERS:
            self._strangers.pop(next(iter(self._strangers)))

    # In memory and in the ledger --------------------------------------------------------------------------------------

    def _row(self, name: str) -> Device:
        return self._ledger.rows(Device, name=name)[0]

    def _put(self, device: Device) -> None:
        self._ledger.put(device)
        self._know(device)

    def _know(self, device: Device) -> None:
        """Updates what is in memory from a row of the ledger."""
        name, enrolled = device.name, device.status == "enrolled"
        known = self._devices.get(name)
        if known is None:
            boot = str(device.capabilities.get("boot", ""))
            known = self._devices[name] = _Known(enrolled, device.new, device.took_part, boot)
        known.enrolled, known.new, known.took_part = enrolled, device.new, device.took_part
        if enrolled and not device.new and name not in self.quarantined:
            self._members.add(name)
        else:
            for group in (self._members, self._ready, self._awaited):
                group.discard(name)
        if not enrolled:
            known.state = ""
            self._know_reads(name, messages.SHORT)

    def _know_reads(self, name: str, what: int) -> None:
        """Notes what a device can read; only devices that cannot read all forms of messages are kept."""
        if what < messages.SHORT:
            self._reads_less[name] = what
        else:
            self._reads_less.pop(name, None)
