"""``clip``: every update is scaled down to the round's median norm.

Norm clipping of Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?", 2019, with the median as
the threshold. It is also the clipping about a centre of Karimireddy, He, Jaggi, "Learning from History for Byzantine
Robust Optimization", ICML 2021, with the centre zero, because an update is already a change to the model that all have.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from fleet_core.algorithms.interface import Update
from fleet_core.base import trees
from fleet_core.robust.interface import Choice, Memory


def clip(updates: Iterable[Update], share: float, memory: Memory) -> Choice:
    """Scales updates down to the median norm, for which updates of zero, such as skipped ones, do not count."""
    norms = {update.device: trees.norm(update.payload.groups) for update in updates}
    known = [length for length in norms.values() if length > 0]
    most = median(known) if known else 0.0
    return Choice(factors={device: most / length for device, length in norms.items() if length > most})
