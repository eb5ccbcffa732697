"""Folds old rounds and drops old files of the audit log after a round has closed, as ``[keep]`` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cloud_server.identity import audit_log
from cloud_server.ledger.ledger import Ledger
from cloud_server.records.fleet_settings import KeepSection
from cloud_server.rounds.budget import Budget
from fleet_core.base.errors import StateError

LEAST = 50
"""How many of the last rounds are never folded, because quarantine, codecs, alerts and lost training states look back
on them."""


class KeepRounds:
    """Keeps the folder of one fleet small."""

    def __init__(
        self, folder: Path, section: KeepSection, ledger: Ledger, budget: Budget, log: Callable[[str], None]
    ):
        self._folder, self._files = folder, section.audit_files
        self._failed = ""
        self._keep = max(section.rounds, LEAST) if section.rounds else None
        self._ledger, self._budget, self._log = ledger, budget, log

    def after_round(self, closed: int) -> None:
        """closed: the last closed round. Does not fold rounds that count against a limit of the day. Raises
        StateError."""
        if self._files:
            self._drop_audit_files()
        if self._keep is None:
            return
        first = self._ledger.folded() is None
        folded = self._ledger.fold(min(closed - self._keep + 1, self._budget.needed_from()))
        if folded is not None and first:
            self._log(f"rounds {folded.first} to {folded.last} are folded into sums, and later ones will be: [keep] in "
                      f"fleet.toml keeps the last {self._keep}")

    def _drop_audit_files(self) -> None:
        """If a file cannot be deleted, logs it once, and training goes on."""
        try:
            audit_log.drop_old(self._folder, self._files, self._log)
            self._failed = ""
        except StateError as error:
            if str(error) != self._failed:
                self._failed = str(error)
                self._log(f"warning: {error}")
