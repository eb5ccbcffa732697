"""``metafleet server roll-back``: which rounds training can go back to, and the request for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cloud_server.figures.formatting import share_text
from cloud_server.ledger.ledger import Ledger
from cloud_server.records.checkpoint import served_rounds
from cloud_server.records.fleet_folder import Fleet
from cloud_server.results.evaluations import accuracies
from cloud_server.rounds.decide_roll_back import FACT, REQUEST
from fleet_core.base.errors import StateError
from fleet_core.base.processes import typed


@dataclass(frozen=True)
class KeptRound:
    """round: whose model was served. accuracy: mean over ``devices`` that evaluated it; None before one has."""

    round: int
    devices: int
    accuracy: float | None


def kept_rounds(fleet: Fleet) -> list[KeptRound]:
    """The rounds that training can go back to, the oldest first. Raises StateError without a ledger."""
    with Ledger(fleet.ledger_path, create=False) as ledger:
        rounds = [(number, accuracies(ledger, range(number, number + 1)).get(number, {}))
                  for number in served_rounds(fleet.folder / "state")]
    return [KeptRound(number, len(found), sum(found.values()) / len(found) if found else None)
            for number, found in rounds]


def ask(fleet: Fleet, to: int | None) -> int:
    """Requests that training goes back to round ``to``; by default to the served round before the last one. Raises
    StateError."""
    kept = [one.round for one in kept_rounds(fleet)]
    if to is None and len(kept) > 1:
        to = kept[-2]
    if to not in kept:
        what = "there is no earlier served model to go back to" if to is None else f"round {to} is not kept"
        raise StateError(what, where=str(fleet.folder), expected=", ".join(map(str, kept)) or "a served model",
                         hint=f"'metafleet server roll-back {typed(fleet.folder)} --list' shows the rounds")
    with Ledger(fleet.ledger_path, create=False) as ledger:
        ledger.request(REQUEST, str(to))
    return to


def line(one: KeptRound) -> str:
    """A kept round in words."""
    if one.accuracy is None:
        return f"round {one.round}: not evaluated"
    return f"round {one.round}: accuracy {share_text(one.accuracy)} on {one.devices} devices"


def last(ledger: Ledger) -> dict[str, Any]:
    """The last time that training went back: ``from``, ``to`` and ``why``; empty if it never did."""
    return dict(json.loads(ledger.fact(FACT) or "{}"))
