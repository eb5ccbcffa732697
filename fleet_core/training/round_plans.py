"""The samples that each client of a round draws, and which clients can be stacked because they draw equally many."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fleet_core.algorithms.interface import EPISODIC, ClientState, Method
from fleet_core.base.errors import DataError
from fleet_core.base.trees import Params
from fleet_core.data.episodes import Draw, draws

Samples = np.ndarray[Any, Any]

BATCHES = ("batch", "support_batch", "query_batch")
"""The hyper-parameters that are numbers of samples."""
CHUNK = 256
"""Samples per pass over a whole data set, so that memory does not grow with its size."""
MAX_PADDING = 2
"""The batches of padded clients differ in size by at most this factor."""


@dataclass(frozen=True, eq=False)
class Participant:
    """One client of a round. state: empty for one that never took part. x, y: raw samples [N, *shape] with labels
    int64 [N], or a task's numbers [N, K] or [N] in the user's unit. rng: its only source of randomness. per_device:
    groups that it alone received beside the broadcast."""

    state: ClientState
    x: Samples
    y: Samples
    rng: np.random.Generator
    per_device: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What a client draws in a round. seed: of the model's random layers. samples: of the pass over all samples that
    ends FedProto's round, else 0."""

    seed: int
    draws: tuple[Draw, ...]
    left_out: Mapping[int, int]
    samples: int

    @property
    def sizes(self) -> tuple[Any, ...]:
        return self.samples, tuple(tuple(map(len, draw)) for draw in self.draws)

    @property
    def drawn(self) -> int:
        return sum(len(part) for draw in self.draws for part in draw)


def capped(hyper: Any, most: int | None) -> Any:
    """``hyper`` with batches of at most ``most`` samples, a board's limit. Support and query keep their proportion."""
    sizes = _sizes(hyper)
    largest = max(sizes.values(), default=0)
    if most is None or largest <= most:
        return hyper
    return replace(hyper, **{name: max(1, round(size * most / largest)) for name, size in sizes.items()})


def cut(asked: Any, used: Any) -> dict[str, float]:
    """{batch: samples} of the batches that ``capped`` made smaller; a device reports them."""
    before = _sizes(asked)
    return {name: float(size) for name, size in _sizes(used).items() if size < before[name]}


def _sizes(hyper: Any) -> dict[str, int]:
    return {name: getattr(hyper, name) for name in BATCHES if hasattr(hyper, name)}


def plan_of(method: Method, one: Participant, hyper: Any) -> Plan:
    if not len(one.y):
        raise DataError("there are no samples to train on")
    seed = int(one.rng.integers(2**31))
    drawn, left_out = draws(one.y, hyper, one.rng, by_class=method.adaptation in EPISODIC)
    taken = tuple(itertools.islice(drawn, hyper.local_steps))
    whole = len(one.y) if method.adaptation == "fedproto" else 0
    return Plan(seed, taken, left_out(), whole)


def of_equal_size(plans: Sequence[Plan]) -> list[list[int]]:
    """Indices of the plans, grouped by equal sizes of all draws."""
    alike: dict[Any, list[int]] = {}
    for number, plan in enumerate(plans):
        alike.setdefault(plan.sizes, []).append(number)
    return list(alike.values())


def of_similar_size(plans: Sequence[Plan]) -> list[list[int]]:
    """Indices of the plans, grouped so that numbers of drawn samples differ by at most the factor ``MAX_PADDING``."""
    similar: list[list[int]] = []
    for number in sorted(range(len(plans)), key=lambda i: (plans[i].samples, plans[i].drawn)):
        least = plans[similar[-1][0]] if similar else None
        if least is None or plans[number].samples != least.samples or plans[number].drawn > MAX_PADDING * least.drawn:
            similar.append([])
        similar[-1].append(number)
    return similar
