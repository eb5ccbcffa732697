"""Devices that come back, or join late, in a fleet whose devices keep a dual or control.

With PFLDyn, PFLScaf, FedDyn and SCAFFOLD updates shrink to nearly zero, because each device's dual fits the model. The
dual of a device that was away does not fit: its update is as long as updates were at the start, and by the usual norm
of the last rounds it would be refused in every round, for ever. So such a device is compared with the largest usual
norm so far, until the duals of the fleet have followed. A device is away when it has sent nothing for AWAY times as
long as the median device of its round; with small cohorts every device pauses, and none is away.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

FACT = "returning"
"""The key in a checkpoint's facts."""
AWAY = 5.0
FORGOTTEN = 1000
"""Rounds without an update after which a device counts as if it had never sent one, so that the memory does not grow
with every device that there ever was."""
ROUNDS = 3
"""For how many rounds a device that is back is compared with the largest usual norm. After one, its next updates would
still be refused; after three, the others' updates are as long as its own (``tests/fleet_core/robust``)."""


@dataclass(frozen=True)
class Returning:
    """round: how many rounds were screened. last: device -> the last of them in which it sent an update. back: device
    -> the round in which it came back. largest: group -> the largest usual norm so far."""

    round: int = 0
    last: Mapping[str, int] = field(default_factory=dict)
    back: Mapping[str, int] = field(default_factory=dict)
    largest: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(facts: Mapping[str, str]) -> Returning:
        return Returning(**json.loads(facts.get(FACT, "{}")))

    def after(self, senders: Collection[str]) -> Returning:
        """With one more round, in which ``senders`` have sent an update."""
        number = self.round + 1
        pauses = {name: number - self.last.get(name, 0) for name in senders}
        usual = median(pauses.values())
        back = {**self.back, **{name: number for name, pause in pauses.items() if pause > AWAY * usual}}
        last = {**{name: at for name, at in self.last.items() if number - at < FORGOTTEN},
                **dict.fromkeys(senders, number)}
        return Returning(number, last,
                         {name: came for name, came in back.items() if number - came < ROUNDS}, self.largest)

    def facts(self, usual: Mapping[str, float]) -> dict[str, str]:
        """For the checkpoint. usual: group -> the usual norm of the round."""
        largest = {group: max(usual.get(group, 0.0), self.largest.get(group, 0.0))
                   for group in {*usual, *self.largest}}
        kept = {"round": self.round, "last": dict(self.last), "back": dict(self.back), "largest": largest}
        return {FACT: json.dumps(kept, sort_keys=True)}
