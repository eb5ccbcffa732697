"""``krum``: the updates that lie farthest from their neighbours are dropped.

Multi-Krum of Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent", NeurIPS 2017: of n updates with f hostile ones, the n − f are used whose squared distances to their n − f − 2
nearest neighbours have the smallest sum. It needs n ≥ 2 f + 3, so five updates for one hostile one. It drops f updates
in every round, whether or not there is an attacker.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fleet_core.algorithms.interface import Update
from fleet_core.robust.blocks import Array, blocks
from fleet_core.robust.interface import Choice, Memory, hostile

NEEDS = 3


def krum(updates: Iterable[Update], share: float, memory: Memory) -> Choice:
    devices = [update.device for update in updates]
    count = len(devices)
    out = hostile(count, share, NEEDS)
    if not out:
        return Choice()
    apart_nn = distances(updates)
    nearest_nn = np.sort(apart_nn, axis=1)[:, 1:count - out - 1]  # without its own
    scores_n = nearest_nn.sum(axis=1)
    order = sorted(range(count), key=lambda i: (scores_n[i], devices[i]))
    usual = float(np.median(scores_n))
    return Choice(dropped={
        devices[i]: f"it lies {_times(scores_n[i], usual)} as far from its neighbours as the median update (krum drops "
                    f"{out} of {count})" for i in order[count - out:]
    })


def distances(updates: Iterable[Update]) -> Array:
    """Squared distances [n, n] between all updates, from inner products in float64."""
    total: Array | None = None
    for _, part in blocks(updates):
        products = part @ part.T
        total = products if total is None else total + products
    assert total is not None
    squares = np.diag(total)
    apart: Array = np.maximum(squares[:, None] + squares - 2 * total, 0.0)
    return apart


def _times(squared: float, usual: float) -> str:
    return f"{(squared / usual) ** 0.5:.2g} times" if usual > 0 else "not"
