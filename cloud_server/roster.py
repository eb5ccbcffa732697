"""Who belongs to the fleet and who is there: enrolment, presence, heartbeats, and members whose state was lost.

A member that took part and leaves, or comes back without its training state, takes a dual with it that the server does
not know; ``leaves`` counts these on disk, and the round after one starts every dual again (see ``ServerRule.left``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from cloud_server.fleet import LinkSection
from cloud_server.ledger import Device, Ledger, Update
from fleet_core import messages, schema
from fleet_core.algorithms.seam import Method
from fleet_core.messages import Presence

SILENT_S = 5.0
WORKING = ("train", "upload")
STRANGERS = 1000


class Roster:
    """The devices of one fleet, in memory and in the ledger.

    everyone: enrol whoever announces itself. cannot(presence): why a device cannot take part, or None.
    """

    def __init__(
        self, ledger: Ledger, *, everyone: bool, cannot: Callable[[Presence], str | None],
        clock: Callable[[], float], now: Callable[[], float], log: Callable[[str], None],
    ):
        self._ledger, self._everyone, self._cannot = ledger, everyone, cannot
        self._clock, self._now, self._log = clock, now, log
        self._devices = {device.name: device for device in ledger.devices()}
        self._there: dict[str, Presence] = {}
        self._strangers: dict[str, Presence] = {}
        self._heard: dict[str, float] = {}
        self._phase: dict[str, str] = {}
        self.leaves = int(ledger.facts().get("leaves", "0"))

    # Who is who -------------------------------------------------------------------------------------------------------

    def enrolled(self, name: str) -> bool:
        return name in self._devices and self._devices[name].status == "enrolled"

    def members(self) -> list[str]:
        """m: the enrolled devices that train. One that was enrolled by name is a member once it has said so."""
        return [d.name for d in self._devices.values() if d.status == "enrolled" and not d.new]

    def ready(self) -> list[str]:
        """Members that are there and able to do this fleet's rounds."""
        there = [name for name, presence in self._there.items() if presence.st == "on" and not self._cannot(presence)]
        return sorted(set(there) & set(self.members()))

    def awaited(self) -> bool:
        """Whether a member that was on when this aggregator began has not been heard of yet."""
        return any(self._devices[name].state == "on" and name not in self._there for name in self.members())

    def alive(self, name: str) -> bool:
        """On, and heard lately if it is at work; a device that never came up counts as not there."""
        presence = self._there.get(name)
        if presence is None or presence.st != "on":
            return False
        return self._phase.get(name) not in WORKING or self._clock() - self._heard.get(name, 0.0) < SILENT_S

    def someone_lacks(self, model: str, *, besides: Collection[str]) -> bool:
        """Whether a device that may be asked has not said that it holds ``model``; ``besides`` are known to."""
        return any(name not in besides and self._there[name].base != model for name in self.ready())

    def took_part(self, names: Collection[str]) -> None:
        """Updates of these devices were counted."""
        for name in names:
            if not self._devices[name].took_part:
                self._put(replace(self._devices[name], took_part=True))

    # Enrolment --------------------------------------------------------------------------------------------------------

    def enroll(self, name: str, closed: int, epoch_start: int, *, trains: bool = False) -> None:
        """closed: the last closed round. A device that announced itself before is taken in as it is."""
        if self.enrolled(name):
            return
        now = self._now()
        self._put(Device(name=name, enrolled_round=closed + 1, first_seen=now, last_seen=now, new=not trains))
        self._log(f"{name} enrolled")
        waiting = self._strangers.pop(name, None)
        if waiting is not None:
            self.on_presence(name, waiting, closed, epoch_start)

    def revoke(self, name: str) -> None:
        if not self.enrolled(name):
            return
        known = self._devices[name]
        with self._ledger.transaction():
            self._put(replace(known, status="revoked"))
            if not known.new:
                self._count_leave()
        self._there.pop(name, None)
        self._log(f"{name} revoked")

    # Presence ---------------------------------------------------------------------------------------------------------

    def heard(self, name: str) -> None:
        self._heard[name] = self._clock()

    def on_presence(self, name: str, presence: Presence, closed: int, epoch_start: int) -> None:
        """closed: the last closed round. epoch_start: the first round of the present duals."""
        if presence.beat:
            return self._on_beat(name, presence)
        if name not in self._devices and self._everyone:
            self.enroll(name, closed, epoch_start, trains=presence.train)
        if not self.enrolled(name):
            return self._on_stranger(name, presence)
        known = self._devices[name]
        if presence.st == "off" and presence.boot != known.capabilities.get("boot", presence.boot):
            return  # the will of an earlier life
        self._there[name], self._phase[name] = presence, presence.ph
        self.heard(name)
        with self._ledger.transaction():
            if presence.st == "on" and self._lost(known, presence, closed, epoch_start):
                self._count_leave()
            self._put(self._described(known, presence))

    def _described(self, known: Device, presence: Presence) -> Device:
        known = replace(known, state=presence.st, phase=presence.ph, last_seen=self._now())
        if presence.st == "off":
            return known
        return replace(
            known, version=presence.ver, cannot=self._cannot(presence), capabilities=schema.plain(presence),
            new=not presence.train,
        )

    def _on_beat(self, name: str, presence: Presence) -> None:
        there = self._there.get(name)
        if there is not None and there.boot == presence.boot:
            self._phase[name] = presence.ph
            self.heard(name)

    def _on_stranger(self, name: str, presence: Presence) -> None:
        if name not in self._strangers:
            self._log(f"{name} is not enrolled: ignored (metafleet devices enroll {name})")
        self._strangers[name] = presence
        while len(self._strangers) > STRANGERS:
            self._strangers.pop(next(iter(self._strangers)))

    def _lost(self, known: Device, presence: Presence, closed: int, epoch_start: int) -> bool:
        """Whether a member stopped training, or came back with less training state than was counted of it."""
        if not known.new and not presence.train:
            self._log(f"{known.name} does not train any more")
            return True
        if known.capabilities.get("boot") in (None, presence.boot):
            return False
        unknown = range(max(presence.trained + 1, epoch_start), closed + 1)
        if any(self._ledger.rows(Update, round=n, device=known.name, status="counted") for n in unknown):
            self._log(f"{known.name} lost its training state: every device's dual starts again")
            return True
        return False

    def _count_leave(self) -> None:
        self.leaves += 1
        self._ledger.set_facts(leaves=str(self.leaves))

    def _put(self, device: Device) -> None:
        self._ledger.put(device)
        self._devices[device.name] = device


def inability(presence: Presence, method: Method, link: LinkSection) -> str | None:
    """Why a device cannot take part in the rounds of a fleet with this method and these codecs, or None."""
    if presence.proto != messages.PROTOCOL:
        return f"speaks protocol {presence.proto}, this is {messages.PROTOCOL}"
    if not presence.train:
        return "does not train"
    if presence.methods.get(method.name) != method.version:
        return f"lacks {method.name} version {method.version}"
    if link.up not in presence.codecs or link.down not in presence.codecs:
        return f"lacks codec {link.up} or {link.down}"
    return None
