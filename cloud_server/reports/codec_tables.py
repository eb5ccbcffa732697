"""The codecs of a run's rounds as text, for the terminal and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from cloud_server.figures.formatting import ABSENT
from cloud_server.ledger.ledger_tables import RoundCodec
from cloud_server.results.result import RoundFigures
from fleet_core.model.choose_codec import WAYS

NOTE = "auto: chosen for each round from what the rounds before it left out and from their loss"

Rows = list[tuple[str, ...]]


def is_auto(rounds: Sequence[RoundFigures]) -> bool:
    """Whether a codec was chosen with a reason."""
    return any(one.reason for closed in rounds for one in (closed.codecs or {}).values())


def spans(rounds: Sequence[RoundFigures]) -> tuple[tuple[str, ...], Rows]:
    """(heads, rows) of consecutive rounds with the same codecs, and why they began."""
    rows = []
    for names, found in groupby((closed for closed in rounds if closed.codecs), _names):
        span = list(found)
        first, last = span[0].round, span[-1].round
        chosen = span[0].codecs or {}
        why = "; ".join(f"{way}: {chosen[way].reason}" for way in WAYS if way in chosen and chosen[way].reason)
        rows.append((str(first) if first == last else f"{first} to {last}", *names, why))
    return ("rounds", *WAYS, "why"), rows


def counts(rounds: Sequence[RoundFigures]) -> Iterator[str]:
    """A line for each way: how many rounds used which codec."""
    for k, way in enumerate(WAYS):
        found = Counter(_names(closed)[k] for closed in rounds if closed.codecs)
        if found:
            yield f"{way:<5}" + ", ".join(f"{name} {count}" for name, count in found.items())


def explained(rows: Sequence[RoundCodec]) -> tuple[tuple[str, ...], Rows]:
    """(heads, rows) of every round and way, with the reason."""
    return ("round", "way", "codec", "left out", "why"), [
        (str(row.round), row.way, row.codec, ABSENT if row.left_out is None else f"{row.left_out:.2g}",
         row.reason or "set in fleet.toml")
        for row in rows
    ]


def _names(closed: RoundFigures) -> tuple[str, ...]:
    return tuple(closed.codecs[way].codec if closed.codecs and way in closed.codecs else ABSENT for way in WAYS)
