"""The adaptive bound: an update whose norm is far above the usual norm is refused.

The usual norm is the median over all received updates of this round and of the last ones, group by group. Refused
updates count too, so that a fleet whose updates grow is not shut out forever; hostile devices cannot move the median
unless they are half of the devices over several rounds. The first round is compared with itself alone.

Once a fleet has converged, the usual norm is close to zero. The update of an honest device that was away, or has other
samples, is then far above it. So an update that changes a group by little of that group's own norm is never refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from fleet_core.algorithms.interface import Update
from fleet_core.base.trees import Params
from fleet_core.robust.returning_devices import Returning

TIMES = 5.0
"""The bound over the median norm. ``benchmarks/hostile`` measures how far honest updates are from it."""
SMALL = 0.01
"""The share of the norm of a group of the model below which an update is not refused."""
WINDOW = 5
"""Rounds before this one."""
KEPT = 64
"""The most norms that are kept of a round, evenly spaced in their order."""
FACT = "norms"
"""The key in a checkpoint's facts."""

Norms = Mapping[str, float]


@dataclass(frozen=True)
class Measure:
    """The norms of one update. norms: by group; per sample if devices send sums over samples. arrays: a name for the
    arrays that it moves; only norms of the same arrays are compared."""

    norms: Norms
    arrays: str

    @property
    def whole(self) -> float:
        """The norm over all groups."""
        return math.sqrt(sum(length * length for length in self.norms.values()))


def measure(update: Update, *, per_sample: bool) -> Measure:
    groups = update.payload.groups
    lengths, samples = norms_of(groups), max(1, update.samples) if per_sample else 1
    return Measure({group: length / samples for group, length in lengths.items()}, _arrays_of(groups))


def norms_of(params: Params) -> dict[str, float]:
    """Group -> Euclidean norm of its float32 arrays; infinite for values whose squares float32 cannot hold."""
    with np.errstate(over="ignore"):
        flat = {group: [np.ravel(array) for array in named.values()] for group, named in params.items()}
        return {group: float(np.sqrt(sum(float(np.dot(a, a)) for a in arrays))) for group, arrays in flat.items()}


def _arrays_of(params: Params) -> str:
    names = sorted(f"{group}/{name}" for group, named in params.items() for name in named)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]


def refused(
    measures: Mapping[str, Measure], facts: Mapping[str, str], model: Norms, back: Returning | None = None
) -> dict[str, str]:
    """Device -> why its update is refused. At least one device stays: if all are above the bound, the lower half.
    model: norms of the model by group; empty if updates are not changes of the model. back: devices with a wider bound;
    None: there are none."""
    usual_norms = usual(measures, facts)
    usually = _bounds(usual_norms, model)
    wider = usually if back is None else _bounds(
        {group: max(norm, back.largest.get(group, 0.0)) for group, norm in usual_norms.items()}, model)
    found: dict[str, str] = {}
    for device, one in measures.items():
        bounds = wider if back is not None and device in back.back else usually
        over = {group: length for group, length in one.norms.items() if group in bounds and length > bounds[group]}
        if over:
            group = max(over, key=lambda name: over[name] / bounds[name])
            found[device] = (f"the norm of its {group} is {over[group]:.3g}, expected at most {bounds[group]:.3g}: "
                             f"{TIMES:g} times the median of the last rounds, or {SMALL:.0%} of the model's norm")
    if len(found) < len(measures):
        return found
    middle = median(one.whole for one in measures.values())
    return {device: why for device, why in found.items() if measures[device].whole > middle}


def _bounds(norms: Norms, model: Norms) -> dict[str, float]:
    return {group: max(TIMES * norm, SMALL * model.get(group, 0.0)) for group, norm in norms.items()}


def facts_after(measures: Mapping[str, Measure], facts: Mapping[str, str]) -> dict[str, str]:
    """The checkpoint's facts after a round with these updates."""
    row = {group: _sample(values) for group, values in _by_group(measures).items()}
    return {FACT: json.dumps([*_past(facts), [_arrays(measures), row]][-WINDOW:], sort_keys=True)}


def _arrays(measures: Mapping[str, Measure]) -> str:
    return next(one.arrays for one in measures.values())


def usual(measures: Mapping[str, Measure], facts: Mapping[str, str]) -> dict[str, float]:
    """Group -> median norm. Zeros are left out: updates that are skipped, and groups that do not move."""
    pool, arrays = _by_group(measures), _arrays(measures)
    for past, row in _past(facts):
        if past == arrays:
            for group, values in row.items():
                pool.setdefault(group, []).extend(values)
    return {group: median(values) for group, values in pool.items() if values}


def _by_group(measures: Mapping[str, Measure]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in measures.values():
        for group, length in one.norms.items():
            if length > 0:
                found.setdefault(group, []).append(length)
    return found


def _sample(values: Iterable[float]) -> list[float]:
    ordered = sorted(values)
    if len(ordered) <= KEPT:
        return ordered
    return [ordered[k * (len(ordered) - 1) // (KEPT - 1)] for k in range(KEPT)]


def _past(facts: Mapping[str, str]) -> list[tuple[str, dict[str, list[float]]]]:
    return [(arrays, row) for arrays, row in json.loads(facts.get(FACT, "[]"))]
