"""Folds old rounds of a ledger into sums, so that the file does not grow without end.

It keeps the sums by device in ``folded_tables``, from which ``ledger_sums`` computes the same totals as before; each
device's last counted update, by which a returning device is recognised; each device's newest evaluations, and those of
the last EVALUATED rounds. It deletes all other rows of these rounds.

A later report for a folded round is added to the sums, and counts as a report of its own.

``Ledger`` inherits from ``LedgerFolds``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from cloud_server.ledger import ledger_statements as statements
from cloud_server.ledger.folded_tables import ALL_KINDS, FoldedRounds

STEP = 20
"""Least number of rounds that are folded together."""
MOST = 200
"""Largest number of rounds that are folded together: a ledger that was never folded takes several steps."""
EVALUATED = 20
FREE_SHARE, FREE_BYTES = 0.5, 16 << 20
"""The file is made smaller if this share of it, and this many bytes, are unused."""

BY_ROUND = ("updates", "codecs", "arrays", "privacy", "traffic", "energy", "flops", "usage", "rounds")
"""Tables with rows of rounds, in the order of deletion: ``rounds`` is last, because rows of the others refer to it."""

CLOSED = "EXISTS (SELECT 1 FROM rounds AS r WHERE r.round = {0}.round AND r.status = 'closed')"
SUMS = {
    "folded_rounds": (
        ("status", "privacy"),
        "SELECT status, IFNULL(mode, 'none'), COUNT(*), MIN(r.round), MAX(r.round), SUM(seconds),"
        " SUM(models_transmitted) FROM rounds AS r LEFT JOIN privacy AS p ON p.round = r.round"
        " WHERE r.round < {before} GROUP BY 1, 2",
    ),
    "folded_updates": (
        ("closed", "device", "status"),
        f"SELECT {CLOSED.format('u')}, device, status, COUNT(*), SUM(skipped), SUM(NOT EXISTS"
        " (SELECT 1 FROM energy AS e WHERE e.round = u.round AND e.device = u.device)) FROM updates AS u"
        " WHERE round < {before} GROUP BY 1, 2, 3",
    ),
    "last_counted": (
        ("device",),
        "SELECT device, MAX(round), update_id FROM updates WHERE round < {before} AND status = 'counted' GROUP BY 1",
    ),
    "folded_traffic": (
        ("closed", "device", "kind"),
        f"SELECT {CLOSED.format('t')}, device, '{ALL_KINDS}', {statements.REPORT_SUMS} FROM ({{reports}}) AS t"
        f" GROUP BY 1, 2 UNION ALL SELECT {CLOSED.format('t')}, device, kind, {statements.REPORT_SUMS}"
        " FROM ({reports_by_kind}) AS t GROUP BY 1, 2, 3",
    ),
    "folded_energy": (
        ("closed", "device", "phase", "source", "measured"),
        f"SELECT {CLOSED.format('e')}, device, phase, source, measured, SUM(joules), SUM(low), SUM(high),"
        " SUM(low IS NULL) FROM energy AS e WHERE round < {before} GROUP BY 1, 2, 3, 4, 5",
    ),
    "folded_flops": (
        ("closed", "device"),
        f"SELECT {CLOSED.format('f')}, device, SUM(flops) FROM flops AS f WHERE round < {{before}} GROUP BY 1, 2",
    ),
    "folded_usage": (
        ("device",),
        "SELECT device, SUM(cpu_s), MAX(peak_mib), SUM(connected_s), SUM(retransmitted_bytes) FROM usage"
        " WHERE round < {before} GROUP BY 1",
    ),
}
"""Table of sums -> (its key, the query for the rows that are added)."""
NOT_SUMMED = {"first": "MIN", "last": "MAX", "peak_mib": "MAX"}
REPLACED = ("round", "update_id")


class LedgerFolds:
    """Folds the rounds of a ledger."""

    def _query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        raise NotImplementedError

    def _pragma(self, name: str) -> int:
        raise NotImplementedError

    def transaction(self, *, durable: bool = True) -> AbstractContextManager[None]:
        raise NotImplementedError

    def fold(self, before: int, *, step: int = STEP) -> FoldedRounds | None:
        """Folds rounds before ``before``, at most MOST of them, in one transaction: a process that is killed has folded
        all of them or none. Returns what is folded so far. For fewer than ``step`` rounds, or if one of them is open,
        does nothing and returns None.

        Raises StateError if the ledger cannot be written."""
        first = self._query("SELECT MIN(round) FROM rounds")[0][0]
        if first is None or before - first < max(step, 1):
            return None
        before = min(before, first + MOST)
        if self._query("SELECT 1 FROM rounds WHERE round < ? AND status = 'open'", (before,)):
            return None
        with self.transaction(durable=False):
            self._fold_privacy(before)
            for table, (key, select) in SUMS.items():
                self._add(table, key, select.format(
                    before=before, reports=statements.reports("round, device", f"round < {before}"),
                    reports_by_kind=statements.reports("round, device, kind", f"round < {before}"),
                ))
            for table in BY_ROUND:
                self._query(f"DELETE FROM {table} WHERE round < {before}")
            self._forget_evaluations(before)
        return self.folded()

    def folded(self) -> FoldedRounds | None:
        """What was folded so far, without the devices' bytes and joules; None if nothing was."""
        first, last, closed, seconds, models = self._query(
            "SELECT MIN(first), MAX(last), SUM(rounds) FILTER (WHERE status = 'closed'), SUM(seconds),"
            " SUM(models_transmitted) FROM folded_rounds"
        )[0]
        if first is None:
            return None
        updates: dict[str, tuple[int, int]] = {status: (count, skipped) for status, count, skipped in self._query(
            "SELECT status, SUM(updates), SUM(skipped) FROM folded_updates WHERE closed GROUP BY 1")}
        counted, skipped = updates.get("counted", (0, 0))
        return FoldedRounds(first=first, last=last, closed=closed or 0, participants=counted, skipped=skipped,
                            refused=updates.get("refused", (0, 0))[0], seconds=seconds, models_transmitted=models)

    def last_folded(self, device: str, number: int) -> str | None:
        """The id of the device's newest counted update among the folded rounds, if it is of round ``number``; else
        None."""
        found = self._query("SELECT update_id FROM last_counted WHERE device = ? AND round = ?", (device, number))
        return str(found[0][0]) if found else None

    def folded_modes(self) -> list[tuple[int, str]]:
        """(last folded round of a privacy mode, the mode), for each mode."""
        return [(last, mode) for last, mode in self._query("SELECT MAX(last), privacy FROM folded_rounds GROUP BY 2")]

    def folded_privacy(self) -> list[tuple[str, float, int]]:
        """(device, noise, number of folded private rounds in which it was asked, or sent an update)."""
        return [(device, noise, rounds) for device, noise, rounds in self._query("SELECT * FROM folded_privacy")]

    def shrink(self) -> bool:
        """Gives unused room of a large file back to the disk; False if there is too little of it. Until it is done it
        needs disk space for a second copy. Raises StateError at once if another process uses the ledger."""
        free, pages = self._pragma("freelist_count"), self._pragma("page_count")
        if free < FREE_SHARE * pages or free * self._pragma("page_size") < FREE_BYTES:
            return False
        self._query("VACUUM")
        self._query("PRAGMA wal_checkpoint(TRUNCATE)")
        return True

    def _add(self, table: str, key: Collection[str], select: str) -> None:
        """Adds the rows of ``select`` to those with the same key. NULL is a missing figure, not 0."""
        names = [name for _, name, *_ in self._query(f"PRAGMA table_info({table})")]
        changes = ", ".join(f"{name} = {_together(name)}" for name in names if name not in key)
        self._query(f"INSERT INTO {table} SELECT * FROM ({select}) WHERE true"
                    f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}")

    def _fold_privacy(self, before: int) -> None:
        """Counts a device as asked in a round if it was ever in its cohort or sent an update."""
        found = Counter[tuple[str, float]]()
        for number, cohort, asked, noise in self._query(
            "SELECT r.round, r.cohort, p.asked, p.noise FROM privacy AS p JOIN rounds AS r ON r.round = p.round"
            " WHERE r.round < ?", (before,)
        ):
            senders = {device for (device,) in self._query("SELECT device FROM updates WHERE round = ?", (number,))}
            found.update((name, noise) for name in {*json.loads(cohort), *json.loads(asked), *senders})
        for (name, noise), count in found.items():
            self._query("INSERT INTO folded_privacy VALUES (?, ?, ?) ON CONFLICT (device, noise)"
                        " DO UPDATE SET rounds = rounds + excluded.rounds", (name, noise, count))

    def _forget_evaluations(self, before: int) -> None:
        self._query(
            f"DELETE FROM task_evaluations WHERE round < {before} AND round NOT IN"
            f" (SELECT DISTINCT round FROM task_evaluations ORDER BY round DESC LIMIT {EVALUATED}) AND round NOT IN"
            " (SELECT MAX(round) FROM task_evaluations AS other WHERE other.device = task_evaluations.device"
            " AND other.stage = task_evaluations.stage)"
        )
        recent = "SELECT DISTINCT round FROM evaluations ORDER BY round DESC LIMIT"
        keep = f"round < {before} AND round NOT IN ({recent} {EVALUATED})"
        newest = "SELECT MAX(round) FROM {0} AS other WHERE other.device = {0}.device"
        alone = f"round NOT IN ({newest.format('alone')})"
        self._query(f"DELETE FROM alone WHERE {keep} AND {alone}")
        self._query(f"DELETE FROM evaluations WHERE {keep}"
                    f" AND round NOT IN ({newest.format('evaluations')} AND other.stage = evaluations.stage)"
                    " AND NOT EXISTS (SELECT 1 FROM alone WHERE alone.device = evaluations.device"
                    " AND alone.round = evaluations.round)")


def _together(name: str) -> str:
    """The SQL expression that adds a row's figure to the folded one."""
    if name in REPLACED:
        return f"excluded.{name}"
    both = f"{NOT_SUMMED[name]}({name}, excluded.{name})" if name in NOT_SUMMED else f"{name} + excluded.{name}"
    return f"COALESCE({both}, {name}, excluded.{name})"
