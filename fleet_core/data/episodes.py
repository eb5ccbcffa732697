"""Draws of support and query samples for meta-learning, and of plain batches.

Acar et al., "Debiasing Model Updates for Improving Personalized Federated Training" (ICML 2021): a query whose classes
the support lacks is drawn again. In the paper support and query are disjoint random draws of each step; in the authors'
program they are batches of a shuffled pass (``draws = "pass"``). Deviation: after 20 draws a stratified one ends the
search.

No draw depends on the number that a label has: a device whose labels are permuted draws the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fleet_core.base.errors import DataError

Indices = NDArray[np.int64]
Draw = tuple[Indices, ...]
MAX_DRAWS = 21  # the first and at most 20 more


class Episodes:
    """An endless iterator of (support indices, query indices): disjoint, and every query class is in the support.

    Args:
        y: int [N], the labels.
        support_batch, query_batch: samples to draw. A device with fewer than both together draws its samples in the
            same proportion, at least one of each and one support sample of each class.
        rng: the only source of randomness.
        passes: both from one shuffled pass over all samples, which is shuffled anew when too few are left of it;
            otherwise every draw is from all.

    Attributes:
        left_out: {label: samples} of the classes with a single sample, which no episode can hold on both sides.
        support_batch, query_batch: as drawn, after scaling.
        redraws, stratified: draws that were repeated, and episodes that a stratified draw ended.

    Raises DataError when no class has two samples.
    """

    def __init__(
        self, y: ArrayLike, support_batch: int, query_batch: int, rng: np.random.Generator, *, passes: bool = False
    ):
        if support_batch < 1 or query_batch < 1:
            raise DataError(f"an episode of {support_batch} + {query_batch} samples", expected="at least 1 + 1")
        labels = np.asarray(y)
        names, self._class, counts = np.unique(labels, return_inverse=True, return_counts=True)
        self.left_out = {int(names[k]): int(counts[k]) for k in np.flatnonzero(counts < 2)}
        self._pool: Indices = np.flatnonzero(counts[self._class] >= 2)
        if not self._pool.size:
            raise DataError(
                f"no class has two samples among {labels.size}", hint="a class needs one to learn from, one to ask"
            )
        self.support_batch, self.query_batch = _scaled(
            support_batch, query_batch, self._pool.size, int((counts >= 2).sum())
        )
        self._rng, self._passes = rng, passes
        self._left: Indices = self._pool[:0]
        self.redraws = self.stratified = 0

    def __iter__(self) -> Iterator[tuple[Indices, Indices]]:
        return self

    def __next__(self) -> tuple[Indices, Indices]:
        for draw in range(MAX_DRAWS):
            self.redraws += draw > 0
            support, query = np.split(self._drawn(self.support_batch + self.query_batch), [self.support_batch])
            if np.isin(self._class[query], self._class[support]).all():
                return support, query
        self.stratified += 1
        return self._stratified()

    def _drawn(self, number: int) -> Indices:
        if not self._passes or self._left.size < number:
            self._left = self._rng.permutation(self._pool)
        drawn, self._left = np.split(self._left, [number])
        return drawn

    def _stratified(self) -> tuple[Indices, Indices]:
        """One support sample of each class, of as many as fit; the rest of both batches from those at random."""
        order = self._rng.permutation(self._pool)
        _, first = np.unique(self._class[order], return_index=True)
        lead = np.sort(first)[: self.support_batch]  # in the order of the permutation, not of the labels
        rest = np.delete(order, lead)
        rest = rest[np.isin(self._class[rest], self._class[order[lead]])]
        more = min(self.support_batch - lead.size, rest.size - 1)
        return np.concatenate([order[lead], rest[:more]]), rest[more : more + self.query_batch]


class Shots:
    """An endless iterator of (support indices, query indices) with ``shots`` and ``queries`` samples of every class.

    A class with fewer than both together gives its samples in the same proportion, at least one to each side; classes
    with a single sample are left out. Arguments, attributes and errors as of ``Episodes``.
    """

    def __init__(self, y: ArrayLike, shots: int, queries: int, rng: np.random.Generator):
        names, self._class, counts = np.unique(np.asarray(y), return_inverse=True, return_counts=True)
        self.left_out = {int(names[k]): int(counts[k]) for k in np.flatnonzero(counts < 2)}
        if not (counts >= 2).any():
            raise DataError(
                f"no class has two samples among {counts.sum()}", hint="a class needs one to learn from, one to ask"
            )
        self._take = [_scaled(shots, queries, int(n), 1) if n >= 2 else (0, 0) for n in counts]
        self._rng = rng

    def __iter__(self) -> Iterator[tuple[Indices, Indices]]:
        return self

    def __next__(self) -> tuple[Indices, Indices]:
        order = self._rng.permutation(self._class.size)  # one draw for all, so that no label's number matters
        parts: tuple[list[Indices], list[Indices]] = [], []
        for k, (shots, queries) in enumerate(self._take):
            own = order[self._class[order] == k]
            parts[0].append(own[:shots])
            parts[1].append(own[shots : shots + queries])
        return _shuffled(parts[0], order), _shuffled(parts[1], order)


def _shuffled(parts: list[Indices], order: Indices) -> Indices:
    """The indices of ``parts`` in the order of ``order``, which does not know their classes."""
    return order[np.isin(order, np.concatenate(parts))]


def draws(
    y: ArrayLike, hyper: Any, rng: np.random.Generator
) -> tuple[Iterator[Draw], Callable[[], Mapping[int, int]]]:
    """An endless stream of what one step draws, and what was left out so far: class -> samples.

    A draw is (support, query) or, with ``hyper.independent_hessian_batch``, (support, query, third); the support is
    empty where nothing adapts.
    """
    labels = np.asarray(y)
    if hasattr(hyper, "batch"):
        nothing = np.empty(0, np.int64)
        return ((nothing, index) for index in batches(labels.size, hyper.batch, rng)), dict
    if getattr(hyper, "shots", 0):
        shots = Shots(labels, hyper.shots, hyper.query_shots, rng)
        return shots, lambda: dict(shots.left_out)
    episodes = Episodes(labels, hyper.support_batch, hyper.query_batch, rng, passes=hyper.draws == "pass")
    if not getattr(hyper, "independent_hessian_batch", False):
        return episodes, lambda: dict(episodes.left_out)
    third = batches(labels.size, min(hyper.support_batch, labels.size), rng)
    return ((*pair, more) for pair, more in zip(episodes, third, strict=False)), lambda: dict(episodes.left_out)


def batches(n: int, batch: int, rng: np.random.Generator) -> Iterator[Indices]:
    """Endless batches of indices below ``n``, in shuffled passes; the last batch of a pass may be smaller."""
    if n < 1 or batch < 1:
        raise DataError(f"batches of {batch} out of {n} samples", expected="at least one of each")
    while True:
        order = rng.permutation(n)
        for start in range(0, n, batch):
            yield order[start : start + batch]


def _scaled(support: int, query: int, available: int, classes: int) -> tuple[int, int]:
    """Both as wanted, or in proportion to what there is (available ≥ 2 · classes)."""
    if support + query <= available:
        return support, query
    part = round(available * support / (support + query))
    part = min(max(part, classes), available - 1)
    return part, available - part
