"""Whether enough devices are on to open a round."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cloud_server.membership.members import Members
from fleet_core.base.errors import shortened

GRACE_S = 3.0  # for devices that were on before this aggregator connected, to announce themselves


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
