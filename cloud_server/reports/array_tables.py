"""The arrays that a run's rounds left out, as text, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from cloud_server.ledger.ledger_tables import RoundArrays
from cloud_server.results.result import RoundFigures
from fleet_core.base.errors import shortened

NOTE = "an array that is frozen in a round is neither trained nor sent"
SET = "set in fleet.toml"
NAMES = 6

Rows = list[tuple[str, ...]]


def is_partial(rounds: Sequence[RoundFigures]) -> bool:
    """Whether a round trained a part of the model."""
    return any(closed.arrays is not None and closed.arrays.frozen for closed in rounds)


def spans(rounds: Sequence[RoundFigures]) -> tuple[tuple[str, ...], Rows]:
    """(heads, rows) of consecutive rounds with the same frozen arrays, and why they began."""
    rows: Rows = []
    known = [(closed.round, closed.arrays) for closed in rounds if closed.arrays is not None]
    for frozen, found in groupby(known, lambda one: one[1].frozen):
        span = list(found)
        (first, arrays), (last, _) = span[0], span[-1]
        rows.append((str(first) if first == last else f"{first} to {last}", names(frozen), arrays.reason or SET))
    return ("rounds", "frozen", "why"), rows


def counts(rounds: Sequence[RoundFigures]) -> str:
    """A line that says how many rounds trained a part."""
    part = [len(closed.arrays.frozen) for closed in rounds if closed.arrays is not None and closed.arrays.frozen]
    return f"{len(part)} of {len(rounds)} rounds trained a part, {min(part)} to {max(part)} arrays were frozen"


def explained(rows: Sequence[RoundArrays]) -> tuple[tuple[str, ...], Rows]:
    """(heads, rows) of every round, with the reason."""
    return ("round", "frozen", "why"), [(str(row.round), names(row.frozen), row.reason or SET) for row in rows]


def names(frozen: Sequence[str]) -> str:
    """How many arrays, and the names of the first ones, without groups."""
    listed = ", ".join(shortened([key.partition("/")[2] for key in frozen], NAMES))
    return f"{len(frozen)}: {listed}" if frozen else "none"
