"""The epsilon of a fleet's rounds as text, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Sequence

from cloud_server.ledger.ledger_tables import RoundPrivacy
from cloud_server.results.result import RoundFigures

NOTE = "Epsilon bounds what the noised values reveal about a device's samples; docs/privacy.md"

Rows = list[tuple[str, ...]]


def explained(rows: Sequence[RoundPrivacy]) -> tuple[tuple[str, ...], Rows]:
    """(heads, rows) of every round."""
    return ("round", "privacy", "clip", "noise", "epsilon", "in all", "delta", "rounds of a device"), [
        (str(row.round), row.mode, f"{row.clip:g}", f"{row.noise:g}", f"{row.epsilon:.3g}", f"{row.spent:.3g}",
         f"{row.delta:g}", str(row.most))
        for row in rows
    ]


def last(rounds: Sequence[RoundFigures]) -> tuple[tuple[str, ...], Rows]:
    """(heads, row) of the last private round; no row without one."""
    found = [one.privacy for one in rounds if one.privacy]
    return ("privacy", "clip", "noise", "epsilon in all", "delta", "rounds of a device"), [
        (one.mode, f"{one.clip:g}", f"{one.noise:g}", f"{one.spent:.3g}", f"{one.delta:g}", str(one.most))
        for one in found[-1:]
    ]
