"""The privacy spent by private rounds: epsilon of a round and in total, and the limit at which a run ends.

A device counts as having taken part in every round that asked it, even if another device has replaced it since. It also
counts for every other round for which the ledger has an update of the device, counted or not, because that update was
sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cloud_server.broadcast.open_round import OpenRound
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Round, RoundPrivacy, Update
from fleet_core.base.errors import ConfigError
from fleet_core.privacy.accountant import Accountant, Spent
from fleet_core.privacy.settings import NONE, PrivacySection


class PrivacyBudget:
    """The privacy budget of one fleet. Raises ConfigError if earlier rounds used another mode, because epsilon would
    not cover what they revealed."""

    def __init__(self, section: PrivacySection, ledger: Ledger):
        self._section, self._ledger = section, ledger
        modes = {row.round: NONE for row in ledger.each(Round)}
        modes |= {row.round: row.mode for row in ledger.each(RoundPrivacy)}
        for last, mode in ledger.folded_modes():
            modes[last] = mode
        other = next((number for number, mode in modes.items() if mode != section.mode), None)
        if other is not None:
            raise ConfigError(f"is '{section.mode}', and round {other} here was with '{modes[other]}'",
                              where="fleet.toml: privacy.mode", hint="put it back, or make a fleet in an empty folder")
        self._accountant = Accountant(section.delta) if section.on else None
        self._spent = None if self._accountant is None else Spent(self._accountant)
        self._number, self._asked = 0, set[str]()
        if self._spent is not None:
            for device, noise, rounds in ledger.folded_privacy():
                self._spent.add([device] * rounds, noise)
        for row in ledger.each(RoundPrivacy) if self._spent else ():
            (opened,) = ledger.rows(Round, round=row.round)
            self._add(row.round, {*opened.cohort, *row.asked}, row.noise)

    @property
    def over(self) -> str:
        """Why no further round opens, or empty."""
        limit = self._section.epsilon
        if self._spent is None or limit is None:
            return ""
        after = self._spent.after_another(self._section.noise_multiplier)
        if after <= limit:
            return ""
        return (f"the privacy budget is spent: epsilon {self._spent.epsilon:.3g} of {limit:g}, and {after:.3g} after "
                "another round")

    def note(self, opened: OpenRound) -> None:
        """Writes the round's row: whenever it opens, because other devices may be asked than before, and when it
        closes, because others may have sent something."""
        if self._accountant is None or self._spent is None:
            return
        section = self._section
        self._add(opened.number, opened.cohort, section.noise_multiplier)
        self._ledger.put(RoundPrivacy(
            round=opened.number, mode=section.mode, clip=section.clip, noise=section.noise_multiplier,
            delta=section.delta, epsilon=self._accountant.epsilon({section.noise_multiplier: 1}),
            spent=self._spent.epsilon, most=self._spent.most, asked=tuple(sorted(self._asked)),
        ))

    def _add(self, number: int, cohort: Collection[str], noise: float) -> None:
        if number != self._number:
            self._number, self._asked = number, set()
        senders = {row.device for row in self._ledger.rows(Update, round=number)}
        new = {*cohort, *senders} - self._asked
        self._asked |= new
        if self._spent is not None:
            self._spent.add(new, noise)


def facts(section: PrivacySection, ledger: Ledger) -> dict[str, Any]:
    """The privacy figures of ``server status`` as plain JSON; empty without privacy."""
    if not section.on:
        return {}
    newest = ledger.newest(RoundPrivacy)
    rows = [] if newest is None else ledger.rows(RoundPrivacy, round=newest)
    spent = {"epsilon": rows[0].spent, "rounds": rows[0].most, "delta": rows[0].delta} if rows else \
        {"epsilon": 0.0, "rounds": 0, "delta": section.delta}
    limit = {} if section.epsilon is None else {"limit": section.epsilon}
    return {"mode": section.mode, "clip": section.clip, "noise_multiplier": section.noise_multiplier, **spent, **limit}


def sentence(facts: Mapping[str, Any]) -> str:
    """The result of ``facts`` as a sentence."""
    of = f" of {facts['limit']:g}" if "limit" in facts else ""
    return (f"privacy, {facts['mode']}: epsilon {facts['epsilon']:.3g}{of} at delta {facts['delta']:g}, for a device "
            f"asked in {facts['rounds']} rounds (clip {facts['clip']:g}, noise {facts['noise_multiplier']:g})")
