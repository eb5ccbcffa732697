"""Clears what devices leave at the broker. A device may retain its presence there and nothing else.

A broker has no quota for a client's retained messages. The aggregator reads every topic that a device may write to.
With MQTT 5 it sees at once that a message is retained. With 3.1.1 it sees this only when it subscribes, so it
subscribes again every ``SWEEP_S``. It clears such a message by an empty one, and does not use its content. Answers
(``an``) and alarms are meant for others; the aggregator subscribes to them for ``LOOK_S`` only, because the broker
sends retained ones first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fleet_core.base.errors import LinkError
from fleet_core.link.interface import Link
from fleet_core.protocol import topics

SWEEP_S = 600.0
LOOK_S = 10.0
ABSENT_S = 30 * 86_400.0
"""A device that has been off for that long has no presence at the broker any more; it announces itself when it comes
back."""


class LeftMessages:
    """Call ``tick`` often, and ``retained`` for every retained message of a device.

    revoked(device): whether it is revoked. off_for(seconds): the devices that have been off for longer. refused(device,
    text): notes it in the audit log.
    """

    def __init__(
        self, fleet: str, link: Link, *, revoked: Callable[[str], bool], off_for: Callable[[float], set[str]],
        refused: Callable[[str, str], None], clock: Callable[[], float], log: Callable[[str], None],
    ):
        self._fleet, self._link = fleet, link
        self._revoked, self._off_for, self._refused, self._clock, self._log = revoked, off_for, refused, clock, log
        self._swept_at = -math.inf
        self._looking = False
        self._named: set[str] = set()
        self._denied = False
        self._absent: set[str] = set()

    def retained(self, topic: str) -> bool:
        """Clears a retained message of a device, unless it is the presence of a device that is not revoked. True if the
        caller must not use the message; a presence is always used, so that a revoked device is told."""
        device, kind = topics.sender(self._fleet, topic)
        if device and kind == "st" and self._revoked(device):
            self._clear(topic)
        if not device or kind == "st":
            return False
        if device not in self._named:
            self._named.add(device)
            self._log(f"{device} left a retained message at the broker, which the aggregator deleted ({topic})")
        self._refused(device, f"a retained message: {topic}")
        self._clear(topic)
        return True

    def forget(self, device: str) -> None:
        """Clears the presence of a device that was revoked."""
        self._clear(topics.presence(self._fleet, device))

    def denied(self, topic: str) -> None:
        """The broker's access list is of an earlier version, so nothing is cleared until the next start."""
        device, kind = topics.sender(self._fleet, topic)
        if device and kind != "dn" and not self._denied:
            self._denied = True
            self._log("the broker does not let the aggregator delete messages that devices left: give the broker the "
                      "current access list ('metafleet server config')")

    def connected(self) -> None:
        """Subscribes again at the next ``tick``."""
        self._swept_at, self._looking = -math.inf, False

    def tick(self) -> None:
        if not self._link.connected:
            return
        since_s = self._clock() - self._swept_at
        if since_s > SWEEP_S:
            self._swept_at, self._looking, self._named = self._clock(), True, set()
            self._link.subscribe(*topics.not_retained(self._fleet), as_published=True)
            self._forget_absent()
        elif self._looking and since_s > LOOK_S:
            self._looking = False
            self._link.unsubscribe(topics.answer(self._fleet, "+", "+"), topics.alarm(self._fleet, "+"))

    def _forget_absent(self) -> None:
        absent = self._off_for(ABSENT_S)
        for device in sorted(absent - self._absent):
            self.forget(device)
        self._absent = absent

    def _clear(self, topic: str) -> None:
        """If the message cannot be sent now, the next sweep finds the topic again."""
        if not self._denied and self._link.connected:
            try:
                self._link.publish(topic, b"", retain=True)
            except LinkError:
                return
