"""Whether a served model costs devices accuracy, by the evaluations that they report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from cloud_server.ledger.ledger import Ledger
from cloud_server.results.evaluations import accuracies

SAME_DEVICES = 0.8
"""Two rounds are compared if at least this share of the later one's devices was evaluated in both."""


def lost(before: dict[str, float], after: dict[str, float]) -> list[float]:
    """The accuracy that each device evaluated in both rounds has lost; empty if there are too few such devices."""
    both = before.keys() & after.keys()
    return [before[name] - after[name] for name in sorted(both)] if len(both) >= SAME_DEVICES * len(after) else []


def newest_evaluated(ledger: Ledger, served: Iterable[int]) -> int | None:
    """The newest of these rounds whose model can be compared with that of an earlier one, or None. A model that was
    served since may not be evaluated yet."""
    by_round = {number: _accuracies(ledger, number) for number in sorted(served)}
    comparable = [
        number for number in by_round
        if any(_losses(by_round[earlier], by_round[number]) for earlier in by_round if earlier < number)
    ]
    return max(comparable, default=None)


def better_round(ledger: Ledger, newest: int, kept: Sequence[int], limit: float) -> tuple[int, float] | None:
    """(the round of ``kept`` since which the median device has lost most accuracy, that loss), or None if every loss is
    at most ``limit``. The median is used so that a few devices cannot move it with false reports. At least half of the
    earlier round's devices must have reported."""
    after = _accuracies(ledger, newest)
    worst: tuple[int, float] | None = None
    for number in kept:
        losses = _losses(_accuracies(ledger, number), after) if number < newest else []
        if losses and median(losses) > (limit if worst is None else worst[1]):
            worst = number, median(losses)
    return worst


def _accuracies(ledger: Ledger, number: int) -> dict[str, float]:
    return accuracies(ledger, range(number, number + 1)).get(number, {})


def _losses(before: dict[str, float], after: dict[str, float]) -> list[float]:
    """``lost``, or empty if less than half of the earlier round's devices have reported."""
    return lost(before, after) if 2 * len(after) >= len(before) else []
