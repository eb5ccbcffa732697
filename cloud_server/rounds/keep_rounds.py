"""Folds rounds that are older than ``[keep] rounds`` says, after a round has closed."""

from __future__ import annotations

from collections.abc import Callable

from cloud_server.ledger.ledger import Ledger
from cloud_server.records.fleet_settings import KeepSection
from cloud_server.rounds.budget import Budget

LEAST = 50
"""Rounds that decisions look back on: quarantine, codecs, alerts, lost training states."""


class KeepRounds:
    """Keeps the ledger of one fleet small."""

    def __init__(self, section: KeepSection, ledger: Ledger, budget: Budget, log: Callable[[str], None]):
        self._keep = max(section.rounds, LEAST) if section.rounds else None
        self._ledger, self._budget, self._log = ledger, budget, log

    def after_round(self, closed: int) -> None:
        """closed: the last closed round. Rounds that a limit of the day needs stay. Raises StateError."""
        if self._keep is None:
            return
        first = self._ledger.folded() is None
        folded = self._ledger.fold(min(closed - self._keep + 1, self._budget.needed_from()))
        if folded is not None and first:
            self._log(f"rounds {folded.first} to {folded.last} are folded into sums, and later ones will be: [keep] in "
                      f"fleet.toml keeps the last {self._keep}")
