"""Devices that return without their training state, or with one that this ledger does not know.

The dual of such a device is not the dual in the server's sum, as if the device had left (``members``).
"""

from __future__ import annotations

import json
from collections.abc import Callable

from cloud_server.ledger.ledger import Ledger
from cloud_server.membership.members import Members
from fleet_core.protocol.round_messages import NO_UPDATE, UpdateRef

MOST_LOSSES, LOSS_ROUNDS = 3, 20
"""A device may lose its training state at most MOST_LOSSES times in LOSS_ROUNDS rounds, because each loss resets the
duals of all devices."""


class TrainingStates:
    """In the methods, ``after`` is the update that left the device in its present state, ``closed`` the last closed
    round, and ``begin`` the first round of the present duals."""

    def __init__(self, ledger: Ledger, members: Members, log: Callable[[str], None]):
        self._ledger, self._members, self._log = ledger, members, log

    def check(self, name: str, after: UpdateRef | None, closed: int, begin: int) -> None:
        """Counts a leave if an update was not trained from the state of the device's last counted update."""
        unlike = "" if after is None else self._unlike(name, after, closed, begin)
        if unlike:
            losses = {*self._losses(name, closed), closed}
            self._members.count_leave(**{f"losses/{name}": json.dumps(sorted(losses))})
            self._log(f"{name} {unlike}")

    def refusal(self, name: str, after: UpdateRef | None, closed: int, begin: int) -> str:
        """Why the update of a device that lost its training state too often is refused, or empty. A loss noted in this
        round does not count, because after a restart the update is checked again."""
        losses = [number for number in self._losses(name, closed) if number < closed]
        unlike = "" if after is None or len(losses) < MOST_LOSSES else self._unlike(name, after, closed, begin)
        return unlike and (f"the device {unlike}, {len(losses)} times before in {LOSS_ROUNDS} rounds; it is counted "
                           f"again from round {losses[-MOST_LOSSES] + LOSS_ROUNDS + 1} on")

    def _losses(self, name: str, closed: int) -> list[int]:
        """Those of the last ``LOSS_ROUNDS`` rounds after which the device had lost its training state."""
        return [number for number in json.loads(self._ledger.fact(f"losses/{name}") or "[]")
                if closed - LOSS_ROUNDS < number <= closed]

    def _unlike(self, name: str, after: UpdateRef, closed: int, begin: int) -> str:
        if after != NO_UPDATE and after.id != self._ledger.counted(name, after.round):
            return (f"has an update of round {after.round} that this ledger did not count: the fleet's folder is an "
                    "older one")
        since = range(max(after.round + 1, begin), closed + 1) if self._members.has_taken_part(name) else ()
        return "lost its training state" if any(self._ledger.counted(name, number) for number in since) else ""
