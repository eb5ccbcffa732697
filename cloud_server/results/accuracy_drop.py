"""Whether a served model costs devices accuracy, by the evaluations that they report."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from cloud_server.ledger.ledger import Ledger
from cloud_server.results.evaluations import accuracies

SAME_DEVICES = 0.8
"""Two rounds are compared if at least this share of the later one's devices was evaluated in both."""


def lost(before: dict[str, float], after: dict[str, float]) -> list[float]:
    """The accuracy that each device evaluated in both rounds has lost; empty if there are too few such devices."""
    both = before.keys() & after.keys()
    return [before[name] - after[name] for name in sorted(both)] if len(both) >= SAME_DEVICES * len(after) else []


def better_round(ledger: Ledger, newest: int, kept: Sequence[int], limit: float) -> tuple[int, float] | None:
    """(the round of ``kept`` since which the median device has lost most accuracy, that loss), or None if every loss is
    at most ``limit``. The median is used so that a few devices cannot move it with false reports. At least half of the
    earlier round's devices must have reported."""
    after = accuracies(ledger, range(newest, newest + 1)).get(newest, {})
    worst: tuple[int, float] | None = None
    for number in kept:
        before = accuracies(ledger, range(number, number + 1)).get(number, {})
        losses = lost(before, after) if number < newest and 2 * len(after) >= len(before) else []
        if losses and median(losses) > (limit if worst is None else worst[1]):
            worst = number, median(losses)
    return worst
