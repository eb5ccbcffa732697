"""The limits of ``[budget]``: when a run ends early, and which devices are not asked again today.

Limits are checked before a round opens, against the costs reported by then. A run or a device may therefore exceed a
limit by the cost of a round and of the last served model. A round belongs to the day (UTC) on which it opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloud_server.figures.formatting import bytes_text, count_text, phase_text
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_sums import Joules, Volume
from cloud_server.ledger.ledger_tables import Round
from cloud_server.membership.members import Members
from cloud_server.records.fleet_settings import Amounts, BudgetSection
from cloud_server.records.tariff import Tariff
from cloud_server.results.evaluations import accuracies
from cloud_server.results.verdict import MISSING_REPORTS

DAY_S = 86_400
LOOK_S = 2.0
ENDED, RESTING, REACHED, EVALUATED = "ended", "resting", "reached", "evaluated"
"""Keys of facts in the ledger: why the run ended early; the resting devices, with the end of the day; the accuracy that
reached the target; the rounds that enough devices have evaluated, with their accuracy."""
MOST_EVALUATED = 1000


class Budget:
    """Applies the limits of one fleet. section: None for no limits. private(): why the privacy budget allows no further
    round, or empty. now(): Unix seconds.

    ``ended``: why no further round opens, or empty. ``spent``: whether that is because a limit was reached.
    """

    def __init__(
        self, section: BudgetSection | None, tariff: Tariff | None, ledger: Ledger, members: Members, *,
        clock: Callable[[], float], now: Callable[[], float], log: Callable[[str], None],
        private: Callable[[], str] = str,
    ):
        self._section, self._tariff, self._ledger, self._members = section, tariff, ledger, members
        self._private, self._clock, self._now, self._log = private, clock, now, log
        self._looked: tuple[int, float] | None = None
        self._day, self._first = -1, 0
        self._unknown = set[str]()
        self.ended, self.spent = "", False
        self._keep(ENDED, "")
        self._keep(RESTING, "")

    def over(self, closed: int) -> bool:
        """Whether no further round opens after round ``closed``. Also determines which devices rest. Reads the ledger
        once after each round, then every two seconds."""
        if (self._looked is None or self._looked[0] != closed) and (why := self._private()):
            self._looked = closed, self._clock()
            self.spent = True
            self._end_with(why, closed, "privacy")
        if self._section is None or self.ended:
            return bool(self.ended)
        if self._looked is None or self._looked[0] != closed or self._clock() - self._looked[1] >= LOOK_S:
            self._looked = closed, self._clock()
            self._end(closed, self._section)
            self._rest(self._section.device_day)
        return bool(self.ended)

    def evaluated(self, number: int) -> None:
        """Call it when an evaluation of round ``number`` was added to the ledger. The round's accuracy counts once four
        of five devices that are on and train have reported."""
        if self._section is None or (self._section.target_accuracy is None and self._section.patience is None):
            return
        latest = accuracies(self._ledger, range(number, number + 1)).get(number, {})
        ready = self._members.ready()
        if not latest or len(ready - latest.keys()) > MISSING_REPORTS * len(ready):
            return
        mean, target = sum(latest.values()) / len(latest), self._section.target_accuracy
        if target is not None and mean >= target and mean > self._reached()[1]:
            self._ledger.set_facts(**{REACHED: json.dumps([number, mean])})
        if self._section.patience is not None:
            found = sorted((dict(self._evaluations()) | {number: mean}).items())[-MOST_EVALUATED:]
            self._keep(EVALUATED, json.dumps(found))

    # The fleet --------------------------------------------------------------------------------------------------------

    def _end(self, closed: int, section: BudgetSection) -> None:
        number, accuracy = self._reached()
        used = used_of(self._ledger.volume().get(None), self._ledger.joules().get(None), self._tariff)
        over = _over(section, used, self._tariff)
        if over:
            self.ended, self.spent = f"the fleet's budget is spent: {over}", True
        elif section.target_accuracy is not None and accuracy >= section.target_accuracy:
            self.ended = f"the target is reached: accuracy {accuracy:.3f} after round {number}"
        elif section.patience is not None and (best := _flat(self._evaluations(), section)):
            times = count_text(section.patience, "evaluation")
            self.ended = (f"a longer run does not pay: {times} without a gain over accuracy {best[1]:.3f} after round "
                          f"{best[0]}")
        else:
            return self._say_unknown(closed, section, used)
        self._end_with(self.ended, closed, "budget")

    def _end_with(self, why: str, closed: int, table: str) -> None:
        self.ended = f"{why}; no round opens after round {closed}; [{table}] in fleet.toml has the limit"
        self._keep(ENDED, self.ended)
        self._log(self.ended)

    def _reached(self) -> tuple[int, float]:
        """(round, accuracy) of the best evaluation that reached a target."""
        number, accuracy = json.loads(self._ledger.fact(REACHED) or "[0, 0.0]")
        return int(number), float(accuracy)

    def _evaluations(self) -> list[tuple[int, float]]:
        return [(int(number), float(mean)) for number, mean in json.loads(self._ledger.fact(EVALUATED) or "[]")]

    def _say_unknown(self, closed: int, section: BudgetSection, used: Mapping[str, float]) -> None:
        """Logs, once per limit, that it cannot be applied because no device reports the figure."""
        for where, limits in (("budget", section), ("budget.device_day", section.device_day)):
            for name in ("bytes", "joules", "money"):
                key = f"{where}.{name}"
                if closed and getattr(limits, name) is not None and name not in used and key not in self._unknown:
                    self._unknown.add(key)
                    self._log(f"warning: {key} cannot be enforced: no device has reported {name} so far")

    def needed_from(self) -> int:
        """The first round that counts against the limits of the day; without limits, a number that no round reaches."""
        limits = Amounts() if self._section is None else self._section.device_day
        return 1 << 31 if limits == Amounts() else self._first_of_today()

    # Devices ----------------------------------------------------------------------------------------------------------

    def _rest(self, limits: Amounts) -> None:
        """Determines which devices have used up their share of the day, and lets them rest."""
        if limits == Amounts():
            return
        today = range(self._first_of_today(), 1 << 31)
        volume, joules = self._ledger.volume("device", today), self._ledger.joules("device", today)
        resting = {
            name: over for name in sorted({*volume, *joules})
            if (over := _over(limits, used_of(volume.get(name), joules.get(name), self._tariff), self._tariff))
        }
        for name in resting.keys() - self._members.resting.keys():
            self._log(f"{name} is not asked until 00:00 UTC, its share of the day is used up: {resting[name]}")
        if resting != self._members.resting:
            self._members.resting = resting
            facts = {"until": (self._day + 1) * DAY_S, "devices": resting}
            self._keep(RESTING, json.dumps(facts) if resting else "")

    def _first_of_today(self) -> int:
        """The number of the first round that opened today; the next round's number if none did."""
        day = int(self._now() // DAY_S)
        if day != self._day:
            opened = [row.round for row in self._ledger.each(Round) if row.opened_at >= day * DAY_S]
            last = self._ledger.newest(Round) or 0
            self._day, self._first = day, min(opened, default=last + 1)
        return self._first

    def _keep(self, key: str, value: str) -> None:
        if (self._ledger.fact(key) or "") != value:
            self._ledger.set_facts(**{key: value})


def resting(ledger: Ledger, now: float) -> dict[str, str]:
    """Device -> why the aggregator does not ask it today, from the ledger. now: Unix seconds."""
    facts: dict[str, Any] = json.loads(ledger.fact(RESTING) or "{}")
    return dict(facts["devices"]) if facts and now < facts["until"] else {}


def used_of(volume: Volume | None, joules: Joules | None, tariff: Tariff | None) -> dict[str, float]:
    """The bytes, joules and money that count against a limit, without those that are unknown."""
    used: dict[str, float] = {}
    up = down = 0
    if volume is not None:
        up, down = max(((moved.up, moved.down) for moved in (volume.payload, volume.mqtt, volume.wire) if moved),
                       key=sum)
        used["bytes"] = up + down
    if joules is not None:
        used["joules"] = joules.value
    if tariff is not None:
        parts = [tariff.data(up, down) if volume is not None else None,
                 tariff.energy(joules.value) if joules is not None else None]
        known = [part for part in parts if part is not None]
        used |= {"money": sum(known)} if known else {}
    return used


def _flat(found: Sequence[tuple[int, float]], section: BudgetSection) -> tuple[int, float] | None:
    """(round, accuracy) of the last gain if ``patience`` evaluations have followed it, else None. found: (round,
    accuracy) in the order of rounds."""
    best, since = None, 0
    for at in found:
        if best is None or at[1] > best[1] + section.min_gain:
            best, since = at, 0
        else:
            since += 1
    return best if section.patience is not None and since >= section.patience else None


def _over(limits: Amounts, used: Mapping[str, float], tariff: Tariff | None) -> str:
    """The first limit that is reached, in words, or empty."""
    texts: dict[str, Callable[[float], str]] = {
        "bytes": bytes_text, "joules": phase_text,
        "money": lambda value: f"{value:.2f} {tariff.currency if tariff else ''}".strip(),
    }
    for name, text in texts.items():
        limit = getattr(limits, name)
        if limit is not None and used.get(name, 0.0) >= limit:
            return f"{text(used[name])} of {text(limit)}"
    return ""
