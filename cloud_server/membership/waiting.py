"""What a round waits for: devices before it opens, their updates afterwards.

A broker that speaks MQTT 3.1.1 acknowledges even a publish that it denies or finds too large. The only sign is that no
chunk arrives after a grant; such grants are counted and logged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from cloud_server.broadcast.open_round import OpenRound, Rounds
from cloud_server.membership.members import Members
from fleet_core.base.errors import shortened
from fleet_core.protocol import cohort

GRACE_S = 3.0  # for devices that were on before this aggregator connected, to announce themselves
SUSPICIOUS = 2  # grants without a chunk; one may have been lost
DENIED = (
    "what a device sends does not arrive: the broker may deny it, or take it for too large "
    "(its ACL; message_size_limit or max_packet_size against link.chunk_bytes)"
)
STAYS_AWAY = "to go on without a device that does not come back: metafleet devices revoke FLEET NAME"


class Readiness:
    """Whether a new round may open. least: ``min_devices`` of fleet.toml. first_wait_s: how long round 1 waits at most
    for all devices, from when it could open. invited(): devices that have not used their token yet."""

    def __init__(
        self, members: Members, least: int, first_wait_s: float, *, invited: Callable[[], Iterable[str]],
        clock: Callable[[], float], log: Callable[[str], None],
    ):
        self._members, self._least, self._first_wait_s, self._invited = members, least, first_wait_s, invited
        self._clock, self._log = clock, log
        self._since: float | None = None
        self._numbers, self._few = "", 0
        self._connected_at = clock()

    def connected(self) -> None:
        """Call it when the aggregator has connected to the broker."""
        self._connected_at = self._clock()

    def may_open(self, number: int) -> bool:
        """Whether enough devices are on for round ``number``; logs what it waits for."""
        if not self.enough:
            self._say_few(number)
            return False
        return number > 1 or self._all_on()

    @property
    def enough(self) -> bool:
        """Whether enough devices are on to begin, and those that were on before this aggregator started have announced
        themselves or had time to."""
        return len(self._members.askable()) >= self._least and (self._late or not self._members.awaited())

    @property
    def _late(self) -> bool:
        return self._clock() - self._connected_at > GRACE_S

    def say_numbers(self, number: int) -> None:
        """Logs how many devices are on, if the number has changed since the last round."""
        numbers = self._members.numbers()
        if numbers != self._numbers:
            self._numbers = numbers
            self._log(f"round {number} begins: {numbers}")

    def _say_few(self, number: int) -> None:
        """Logs once per round for how many devices it waits."""
        if self._few != number and self._late and len(self._members.ready()) < self._least:
            self._few = number
            wanted = "a device is" if self._least == 1 else f"{self._least} devices are"
            self._log(f"round {number} begins when {wanted} on and can train (min_devices in fleet.toml): "
                      f"{self._members.numbers()}")

    def _all_on(self) -> bool:
        """Before round 1: whether every enrolled or invited device is on, or ``first_wait_s`` has passed."""
        if not self._first_wait_s:
            return True
        missing = {*self._members.not_on(), *(name for name in self._invited() if not self._members.enrolled(name))}
        if self._since is None and missing:
            self._since = self._clock()
            names = ", ".join(shortened(sorted(missing)))
            self._log(
                f"round 1 waits up to {self._first_wait_s:g} s for {names} ({self._members.numbers()}; first_wait_s in "
                "fleet.toml sets how long)"
            )
        return not missing or self._since is None or self._clock() - self._since > self._first_wait_s


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
        self._log(f"round {opened.number}: no update comes from {told[0]}; asked as well: {told[1]}")
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
