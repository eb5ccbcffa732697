"""``history``: drops a device whose updates keep pointing against the direction in which the fleet has learned.

Each update is compared with the direction of the earlier rounds: the running mean of the rounds' medians. A device's
score is the running mean of its updates' cosines with that direction. Where devices differ, one update says little, but
ten updates that all point the other way say much. Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust
Optimization", ICML 2021, use the past to tell attackers from devices that are merely different; the score is this
product's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import numpy as np

from fleet_core.algorithms.interface import Update
from fleet_core.base import storage, trees
from fleet_core.robust.blocks import Array, by_value, flat, like
from fleet_core.robust.interface import Choice, Memory

KEPT = 0.8
"""Share of the direction and of a score that is kept from one round to the next."""
SPREADS = 3.0
"""A score is an outlier this many deviations below the median of the scores, estimated from the median deviation."""
DEVIATION = 1.4826
"""Standard deviation over median absolute deviation, of normal values."""
DIRECTION = "direction"


def history(updates: Iterable[Update], share: float, memory: Memory) -> Choice:
    """Drops the updates of devices whose score is below zero *and* an outlier; fewer than half, the lowest scores."""
    middle = by_value(updates, lambda part: np.median(part, axis=0))
    past = memory.arrays.get(DIRECTION, {})
    flat_middle = flat(middle)
    before = _of(past, middle)
    compared = before if before.any() else flat_middle
    cosines = {update.device: _cosine(flat(update.payload.groups), compared) for update in updates}
    known = {device: (KEPT * memory.scores[device] + (1 - KEPT) * value if device in memory.scores else value)
             for device, value in cosines.items() if value is not None}
    length = _length(flat_middle)
    now = before * KEPT + (flat_middle * ((1 - KEPT) / length) if length > 0 else 0.0)
    kept = {**past, **storage.flatten(like(trees.widened(middle), now))}
    return Choice(
        dropped=_outliers(known), memory=Memory({DIRECTION: kept}, dict(sorted({**memory.scores, **known}.items())))
    )


def _outliers(scores: dict[str, float]) -> dict[str, str]:
    if len(scores) < 3:
        return {}
    usual = median(scores.values())
    spread = DEVIATION * median(abs(value - usual) for value in scores.values())
    limit = min(0.0, usual - SPREADS * spread)
    low = sorted((value, device) for device, value in scores.items() if value < limit)
    return {
        device: f"its updates have pulled against the fleet's for some rounds: score {value:.2f}, median {usual:.2f}"
        for value, device in low[:(len(scores) - 1) // 2]
    }


def _cosine(update: Array, direction: Array) -> float | None:
    """The cosine; None if either is zero."""
    lengths = _length(update) * _length(direction)
    return float((update * direction).sum()) / lengths if lengths > 0 else None


def _length(values: Array) -> float:
    return float(np.sqrt(np.square(values).sum()))


def _of(past: dict[str, Array] | trees.Params, tree: trees.Params) -> Array:
    """The direction's values of the arrays of ``tree``; zero for those that have not moved yet."""
    return flat({g: {n: past.get(f"{g}/{n}", np.zeros(np.shape(a))) for n, a in named.items()}
                 for g, named in tree.items()})
