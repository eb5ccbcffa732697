"""Rolls training back to an earlier served model, between two rounds."""

from __future__ import annotations

import json
from collections.abc import Callable

from cloud_server.broadcast.served_model import ServedModels
from cloud_server.ledger import disk_errors
from cloud_server.ledger.ledger import Ledger
from cloud_server.records.checkpoint import Checkpoints
from cloud_server.results import accuracy_drop
from cloud_server.rounds.server_rule import RuleState
from fleet_core.base.errors import StateError

REQUEST, FACT = "roll_back", "rolled_back"
"""Keys in the ledger: the requested round, or JSON [round, why] for a decision of the aggregator; and {"from": the last
closed round then, "to", "why"} of the last roll back."""


class RollBacks:
    """Rolls training back if an operator asked for it, or if the newest evaluated model lowered the devices' accuracy.
    limit: the accuracy that the median device may lose; 0: only operators decide."""

    def __init__(
        self, ledger: Ledger, rule: RuleState, checkpoints: Checkpoints, served: ServedModels, *, limit: float,
        log: Callable[[str], None],
    ):
        self._ledger, self._rule, self._checkpoints, self._served = ledger, rule, checkpoints, served
        self._limit, self._log = limit, log
        self._asked: str | None = None
        self._evaluated = True  # since evaluations were compared

    def request(self, to: str) -> None:
        """Takes a request, which stays in the ledger until it is handled. to: as in ``REQUEST``."""
        self._asked = to

    def evaluated(self) -> None:
        """Devices have reported evaluations, which are compared before the next round opens."""
        self._evaluated = True

    def go_back_if_due(self, *, last: bool) -> None:
        """Rolls back if it was requested or the model is worse. last: no further round opens."""
        asked, self._asked = self._asked, None
        if asked is None and (worse := self._worse_model()) is not None:
            asked = json.dumps(worse)
            self._ledger.request(REQUEST, asked)  # a killed aggregator completes at its next start what it began
        if asked is not None:
            to = json.loads(asked)
            self._go_back(*([to, "an operator asked for it"] if isinstance(to, int) else to), last=last)
            self._ledger.remove_request(REQUEST, asked)

    def _go_back(self, to: int, why: str, *, last: bool) -> None:
        number = self._rule.checkpoint.round
        try:
            self._rule.roll_back(to)
        except StateError as error:
            if disk_errors.is_disk_error(error):
                raise
            return self._log(f"training does not go back to round {to}: {error}")
        self._served.serve(self._rule.checkpoint, last=last)
        self._ledger.set_facts(**{FACT: json.dumps({"from": number, "to": to, "why": why})})
        self._log(f"training continues from the model of round {to}: {why}")

    def _worse_model(self) -> tuple[int, str] | None:
        """(round to go back to, why), or None; determined once after evaluations arrived. A model that training was
        rolled back to is not rolled back again."""
        served = self._served.reference
        if not self._limit or served is None or not self._evaluated:
            return None
        self._evaluated, before = False, json.loads(self._ledger.fact(FACT) or '{"from": 0}')
        kept = self._checkpoints.served_rounds()
        newest = accuracy_drop.newest_evaluated(self._ledger, {*kept, served.round})
        if newest is None or newest <= before["from"]:
            return None
        found = accuracy_drop.better_round(self._ledger, newest, kept, self._limit)
        if found is None:
            return None
        to, lost = found
        return to, f"with the one of round {newest} the median device lost {100 * lost:.1f} points of accuracy"
