"""What an open round waits for.

A broker that speaks MQTT 3.1.1 acknowledges even a publish that it denies or finds too large. The only sign is that no
chunk arrives after a grant; such grants are counted and logged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from cloud_server.broadcast.open_round import OpenRound, Rounds
from cloud_server.membership.members import Members
from fleet_core.base.errors import shortened
from fleet_core.protocol import cohort

SUSPICIOUS = 2  # grants without a chunk; one may have been lost
DENIED = (
    "what a device sends does not arrive: the broker may deny it, or take it for too large "
    "(its ACL; message_size_limit or max_packet_size against link.chunk_bytes)"
)
STAYS_AWAY = "to go on without a device that does not come back: metafleet devices revoke FLEET NAME"


class Places:
    """Replaces devices that left an open round by devices that are on and were not asked; without this, a round whose
    only device broke would never end. The round needs as many updates as before.

    seed, size: ``seed`` and ``cohort`` of fleet.toml.
    """

    def __init__(self, members: Members, rounds: Rounds, seed: int, size: int, *, log: Callable[[str], None]):
        self._members, self._rounds, self._seed, self._size, self._log = members, rounds, seed, size, log
        self._asked = (0, set[str]())  # the round, and the devices asked since its last deadline

    def pass_on(self, opened: OpenRound, *, due: bool) -> bool:
        """True if it gave the round another cohort in the ledger; the round must then be opened again.

        due: the deadline has passed. Before it, each device is asked only once, so that two failing devices do not
        replace each other forever.
        """
        number, members = self._asked
        asked = {*opened.cohort} if due or number != opened.number else {*members, *opened.cohort}
        kept = [name for name in opened.cohort if name in opened.delivered or self._expected(opened, name)]
        gone = [name for name in opened.cohort if name not in kept]
        others = self._members.askable() - asked
        free = self._size - len(kept) if self._size else len(others)
        if not gone or not others or free <= 0:
            return False
        chosen = cohort.select(self._seed, opened.number, others, free)
        self._asked = opened.number, asked | {*chosen}
        self._rounds.replace_cohort(opened.number, tuple(sorted([*kept, *chosen, *gone[len(chosen) :]])))
        told = ", ".join(shortened(gone)), ", ".join(shortened(chosen))
        self._log(f"round {opened.number}: no update will come from {told[0]}; asked instead: {told[1]}")
        return True

    def _expected(self, opened: OpenRound, name: str) -> bool:
        return name not in opened.failed and self._members.expected(name)


class Waiting:
    """Watches the uploads of the open round. deadline_s: how much longer a round below its quorum waits."""

    def __init__(
        self, members: Members, rounds: Rounds, deadline_s: float, *, clock: Callable[[], float],
        log: Callable[[str], None],
    ):
        self._members, self._rounds, self._deadline_s = members, rounds, deadline_s
        self._clock, self._log = clock, log
        self._grants: dict[str, int] = {}  # device with an offer -> grants since its last chunk
        self._ask_again = False

    def begin(self) -> None:
        """Starts watching a new round."""
        self._grants.clear()
        self._ask_again = False

    def offered(self, device: str) -> None:
        self._grants.setdefault(device, 0)

    def granted(self, device: str) -> None:
        self._grants[device] = self._grants.get(device, 0) + 1

    def chunk_came(self, device: str) -> None:
        self._grants[device] = 0

    def at_deadline(self, opened: OpenRound, wanted: int, missing: Collection[str]) -> bool:
        """At the deadline of a round below its quorum: logs which devices are missing, and extends the deadline. True
        if the round must be announced again, so that devices that failed try again."""
        text = f"round {opened.number}: {len(opened.delivered)} of {wanted} updates at the deadline, waiting on "
        self._wait_on(opened, text + self._names(opened, missing))
        again, self._ask_again = self._ask_again, False
        return again

    def all_answered(self, opened: OpenRound, wanted: int) -> None:
        """Call it when every device has answered and too many failed. Logs that once; the devices are asked again at
        the next deadline.
        """
        if self._ask_again:
            return
        reasons = "; ".join(shortened([f"{name}: {why}" for name, why in sorted(opened.failed.items())]))
        text = f"round {opened.number}: {len(opened.delivered)} of {wanted} devices delivered ({reasons})"
        self._wait_on(opened, f"{text}; they are asked again in {self._deadline_s:g} s")
        self._ask_again = True

    def _wait_on(self, opened: OpenRound, text: str) -> None:
        """Writes the reason to the log and the ledger, and extends the deadline."""
        self._log(text)
        self._rounds.say_stalled(" ".join(text.split()))
        opened.extend(self._clock() + self._deadline_s)

    def _names(self, opened: OpenRound, missing: Collection[str]) -> str:
        """Text: which devices are missing or failed, why, and what an operator can do."""
        parts = [f"{name} ({self._known(name)})" for name in sorted(missing)]
        parts += [f"{name} (failed: {why})" for name, why in sorted(opened.failed.items())]
        hints = [DENIED] if any(map(self._unheard, missing)) else []
        hints += [STAYS_AWAY] if not all(map(self._members.alive, missing)) else []
        return "; ".join([", ".join(shortened(parts)), *hints])

    def _known(self, name: str) -> str:
        if not self._members.alive(name):
            return self._members.standing(name)
        if name not in self._grants:
            said = "no offer came"
        elif self._grants[name] >= SUSPICIOUS:
            said = f"offered, but no chunk came after {self._grants[name]} grants"
        else:
            said = "its update is under way"
        return f"{self._members.standing(name)}; {said}"

    def _unheard(self, name: str) -> bool:
        """Whether the device says that it uploads, but nothing arrives."""
        if name in self._grants:
            return self._grants[name] >= SUSPICIOUS
        return self._members.alive(name) and self._members.phase(name) == "upload"
