"""``median`` and ``trimmed``: value by value, a robust mean in the place of every update.

Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018,
Definitions 1 and 2. The sum over P devices is then P times the robust mean, whatever the server rule makes of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fleet_core.algorithms.interface import Update
from fleet_core.robust.blocks import Array, by_value
from fleet_core.robust.interface import Choice, Memory, hostile


def median(updates: Iterable[Update], share: float, memory: Memory) -> Choice:
    """The median of every value."""
    return Choice(instead=by_value(updates, lambda part: np.median(part, axis=0)))


def trimmed(updates: Iterable[Update], share: float, memory: Memory) -> Choice:
    """The mean of every value without the ``share`` largest and the ``share`` smallest ones."""
    count = sum(1 for _ in updates)
    left_out = hostile(count, share)

    def middle(part: Array) -> Array:
        return np.asarray(np.sort(part, axis=0)[left_out:count - left_out].mean(axis=0))

    return Choice(instead=by_value(updates, middle))
