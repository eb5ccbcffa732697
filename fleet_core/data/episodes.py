"""Draws support and query samples for meta-learning, and plain batches.

Acar et al., "Debiasing Model Updates for Improving Personalized Federated Training" (ICML 2021): draws are repeated
until every class of the query is in the support. In the paper support and query are disjoint random draws of each step;
in the authors' program they are batches of a shuffled pass (``draws = "pass"``). Deviation: after 20 repetitions a
stratified draw is used.

Draws do not depend on the numbering of labels: a device with permuted labels draws the same samples.
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
        support_batch, query_batch: samples to draw. A device with fewer samples draws them in the same proportion, at
            least one of each, and at least one support sample of each class.
        rng: the only source of randomness.
        passes: draw both from a shuffled pass over all samples, which is shuffled again when too few are left;
            otherwise every draw is from all samples.

    Attributes:
        left_out: {label: samples} of classes with a single sample, which cannot be in both parts.
        support_batch, query_batch: the sizes drawn, after scaling.
        redraws, stratified: number of repeated draws, and of episodes with a stratified draw.

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
                f"no class has two samples among {labels.size}", hint="a class needs one for support and one for query"
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
            support, query = np.split(self._draw(self.support_batch + self.query_batch), [self.support_batch])
            if np.isin(self._class[query], self._class[support]).all():
                return support, query
        self.stratified += 1
        return self._stratified()

    def _draw(self, number: int) -> Indices:
        if not self._passes or self._left.size < number:
            self._left = self._rng.permutation(self._pool)
        drawn, self._left = np.split(self._left, [number])
        return drawn

    def _stratified(self) -> tuple[Indices, Indices]:
        """One support sample of each class, as far as they fit; the rest of both batches at random from these classes.
        """
        order = self._rng.permutation(self._pool)
        _, first = np.unique(self._class[order], return_index=True)
        lead = np.sort(first)[: self.support_batch]  # in the order of the permutation, not of the labels
        rest = np.delete(order, lead)
        rest = rest[np.isin(self._class[rest], self._class[order[lead]])]
        more = min(self.support_batch - lead.size, rest.size - 1)
        return np.concatenate([order[lead], rest[:more]]), rest[more : more + self.query_batch]


class Shots:
    """An endless iterator of (support indices, query indices) with ``shots`` and ``queries`` samples of every class.

    A class with fewer samples is divided in the same proportion, with at least one on each side; classes with a single
    sample are left out. Other arguments, attributes and errors as in ``Episodes``.
    """

    def __init__(self, y: ArrayLike, shots: int, queries: int, rng: np.random.Generator):
        names, self._class, counts = np.unique(np.asarray(y), return_inverse=True, return_counts=True)
        self.left_out = {int(names[k]): int(counts[k]) for k in np.flatnonzero(counts < 2)}
        if not (counts >= 2).any():
            raise DataError(
                f"no class has two samples among {counts.sum()}", hint="a class needs one for support and one for query"
            )
        self._take = [_scaled(shots, queries, int(n), 1) if n >= 2 else (0, 0) for n in counts]
        self._rng = rng

    def __iter__(self) -> Iterator[tuple[Indices, Indices]]:
        return self

    def __next__(self) -> tuple[Indices, Indices]:
        order = self._rng.permutation(self._class.size)  # one draw for all classes: independent of their numbering
        parts: tuple[list[Indices], list[Indices]] = [], []
        for k, (shots, queries) in enumerate(self._take):
            own = order[self._class[order] == k]
            parts[0].append(own[:shots])
            parts[1].append(own[shots : shots + queries])
        return _shuffled(parts[0], order), _shuffled(parts[1], order)


def _shuffled(parts: list[Indices], order: Indices) -> Indices:
    """The indices of ``parts`` in the order of ``order``, which is independent of their classes."""
    return order[np.isin(order, np.concatenate(parts))]


def draws(
    y: ArrayLike, hyper: Any, rng: np.random.Generator
) -> tuple[Iterator[Draw], Callable[[], Mapping[int, int]]]:
    """(endless iterator of the draws of a step, function that returns what was left out so far: class -> samples).

    A draw is (support, query) or, with ``hyper.independent_hessian_batch``, (support, query, third). The support is
    empty for methods without adaptation.
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
    """Yields batches of indices below ``n`` without end, in shuffled passes; the last of a pass may be smaller."""
    if n < 1 or batch < 1:
        raise DataError(f"batches of {batch} out of {n} samples", expected="at least one of each")
    while True:
        order = rng.permutation(n)
        for start in range(0, n, batch):
            yield order[start : start + batch]


def _scaled(support: int, query: int, available: int, classes: int) -> tuple[int, int]:
    """(support, query), scaled down in proportion to ``available`` (≥ 2 · classes) samples."""
    if support + query <= available:
        return support, query
    part = round(available * support / (support + query))
    part = min(max(part, classes), available - 1)
    return part, available - part
