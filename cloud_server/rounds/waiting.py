"""What a round waits for: the first one for devices that are not on yet, an open one for updates, device by device.

A broker that speaks MQTT 3.1.1 answers a publish that it denies or finds too large with success. That nothing came
after a grant is then the only trace, so it is counted and said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from cloud_server.rounds.members import Members
from cloud_server.rounds.open_round import OpenRound, Rounds
from fleet_core.base.errors import shortened
from fleet_core.protocol import cohort

SUSPICIOUS = 2  # grants without a chunk; one may have been lost
DENIED = (
    "what a device sends does not arrive: the broker may deny it, or take it for too large "
    "(its ACL; message_size_limit or max_packet_size against link.chunk_bytes)"
)
STAYS_AWAY = "a device that does not come back is let go with: metafleet devices revoke FLEET NAME"


class FirstWait:
    """The wait before round 1. limit_s: how long at most, from when the round could begin; 0: not at all. invited():
    devices that a token waits for."""

    def __init__(
        self, members: Members, limit_s: float, *, invited: Callable[[], Iterable[str]], clock: Callable[[], float],
        log: Callable[[str], None],
    ):
        self._members, self._limit_s, self._invited = members, limit_s, invited
        self._clock, self._log = clock, log
        self._since: float | None = None

    def over(self) -> bool:
        """Whether every device that was enrolled or invited is on, or was waited for long enough."""
        if not self._limit_s:
            return True
        missing = {*self._members.not_on(), *(name for name in self._invited() if not self._members.enrolled(name))}
        if self._since is None and missing:
            self._since = self._clock()
            names = ", ".join(shortened(sorted(missing)))
            self._log(
                f"round 1 waits up to {self._limit_s:g} s for {names} ({self._members.numbers()}; first_wait_s in "
                "fleet.toml sets how long)"
            )
        return not missing or self._since is None or self._clock() - self._since > self._limit_s


class Places:
    """Gives the places of devices that left an open round to devices that are on and were not asked: without this, a
    round whose only device broke would never end. A round needs as many updates after it as before.

    seed, size: of cohorts, as in fleet.toml.
    """

    def __init__(self, members: Members, rounds: Rounds, seed: int, size: int, *, log: Callable[[str], None]):
        self._members, self._rounds, self._seed, self._size, self._log = members, rounds, seed, size, log
        self._asked = (0, set[str]())  # the round, and who was asked in it since its last deadline

    def pass_on(self, opened: OpenRound, *, due: bool) -> bool:
        """Whether the round has another cohort in the ledger now, with which it is to be opened again.

        due: at the deadline. Before it, each device is asked once: devices that all fail do not take turns.
        """
        number, members = self._asked
        asked = {*opened.cohort} if due or number != opened.number else {*members, *opened.cohort}
        kept = [name for name in opened.cohort if name in opened.received or self._expected(opened, name)]
        gone = [name for name in opened.cohort if name not in kept]
        others = self._members.ready() - asked
        free = self._size - len(kept) if self._size else len(others)
        if not gone or not others or free <= 0:
            return False
        chosen = cohort.select(self._seed, opened.number, others, free)
        self._asked = opened.number, asked | {*chosen}
        self._rounds.replace_cohort(opened.number, tuple(sorted([*kept, *chosen, *gone[len(chosen) :]])))
        told = ", ".join(shortened(gone)), ", ".join(shortened(chosen))
        self._log(f"round {opened.number}: no update comes from {told[0]}; asked as well: {told[1]}")
        return True

    def _expected(self, opened: OpenRound, name: str) -> bool:
        return name not in opened.failed and self._members.expected(name)


class Waiting:
    """Follows the uploads of the open round from outside. deadline_s: how long a round that waits on waits then."""

    def __init__(
        self, members: Members, rounds: Rounds, deadline_s: float, *, clock: Callable[[], float],
        log: Callable[[str], None],
    ):
        self._members, self._rounds, self._deadline_s = members, rounds, deadline_s
        self._clock, self._log = clock, log
        self._grants: dict[str, int] = {}  # since the last chunk, of the devices that offered
        self._ask_again = False

    def begin(self) -> None:
        """Another round is open."""
        self._grants.clear()
        self._ask_again = False

    def offered(self, device: str) -> None:
        self._grants.setdefault(device, 0)

    def granted(self, device: str) -> None:
        self._grants[device] = self._grants.get(device, 0) + 1

    def chunk_came(self, device: str) -> None:
        self._grants[device] = 0

    def at_deadline(self, opened: OpenRound, wanted: int, missing: Collection[str]) -> bool:
        """Below the quorum: says who is missing and goes on waiting. True when the round is to be announced anew, so
        that devices that failed try again."""
        text = f"round {opened.number}: {len(opened.received)} of {wanted} updates at the deadline, waiting on "
        self._wait_on(opened, text + self._names(opened, missing))
        again, self._ask_again = self._ask_again, False
        return again

    def all_answered(self, opened: OpenRound, wanted: int) -> None:
        """Nobody is missing, too many failed: says so once; they are asked again at the next deadline."""
        if self._ask_again:
            return
        reasons = "; ".join(shortened([f"{name}: {why}" for name, why in sorted(opened.failed.items())]))
        text = f"round {opened.number}: {len(opened.received)} of {wanted} devices delivered ({reasons})"
        self._wait_on(opened, f"{text}; they are asked again in {self._deadline_s:g} s")
        self._ask_again = True

    def _wait_on(self, opened: OpenRound, text: str) -> None:
        """Said here and in the ledger; nothing ends."""
        self._log(text)
        self._rounds.say_stalled(" ".join(text.split()))
        opened.extend(self._clock() + self._deadline_s)

    def _names(self, opened: OpenRound, missing: Collection[str]) -> str:
        """Who is missing and who failed, what is known of each, and what an operator can do about it."""
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
        """Whether it says that it sends and nothing of it arrives."""
        if name in self._grants:
            return self._grants[name] >= SUSPICIOUS
        return self._members.alive(name) and self._members.phase(name) == "upload"
