"""Draws support and query samples for meta-learning, and plain batches.

``Splits`` are for gradient steps (Fallah et al. 2020, Chen et al. 2018): support and query are disjoint random draws,
whatever their classes. In Chen's runs the support is a fixed share of a device's samples.

``Episodes`` are for methods that compare with the support's classes: a query of a class that the support lacks has no
right answer. Acar et al., "Debiasing Model Updates for Improving Personalized Federated Training" (ICML 2021): draws
are repeated until every class of the query is in the support. Deviation: after 20 repetitions a stratified draw is
used.

``Shots`` have as many samples of each class, for methods whose papers draw so and for ``draws = "balanced"``.

In the papers support and query are drawn anew in each step; in the program of Acar et al. they are batches of a
shuffled pass (``draws = "pass"``). Draws do not depend on the numbering of labels: a device with permuted labels draws
the same samples.
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


class _Pool:
    """Draws without replacement from ``rows``: all of them each time, or with ``passes`` from a shuffled pass over
    them, which is shuffled again when too few are left."""

    def __init__(self, rows: Indices, rng: np.random.Generator, *, passes: bool):
        self._rows, self._rng, self._passes = rows, rng, passes
        self._left: Indices = rows[:0]

    def draw(self, first: int, second: int) -> tuple[Indices, Indices]:
        if not self._passes or self._left.size < first + second:
            self._left = self._rng.permutation(self._rows)
        one, two, self._left = np.split(self._left, [first, first + second])
        return one, two


class Splits:
    """An endless iterator of (support indices, query indices): disjoint, at random, whatever their classes.

    Args:
        samples: number of samples of the device. If both batches need more, all are drawn in the same proportion, at
            least one for each.
        support_batch, query_batch, rng, passes: as in ``Episodes``.

    Raises DataError for fewer than two samples.
    """

    def __init__(
        self, samples: int, support_batch: int, query_batch: int, rng: np.random.Generator, *, passes: bool = False
    ):
        _check_sizes(support_batch, query_batch)
        if samples < 2:
            raise DataError(f"{samples} samples", expected="two, one for support and one for query")
        self.support_batch, self.query_batch = _scaled(support_batch, query_batch, samples, 1)
        self._pool = _Pool(np.arange(samples), rng, passes=passes)

    def __iter__(self) -> Iterator[tuple[Indices, Indices]]:
        return self

    def __next__(self) -> tuple[Indices, Indices]:
        return self._pool.draw(self.support_batch, self.query_batch)


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
        _check_sizes(support_batch, query_batch)
        labels = np.asarray(y)
        names, self._class, counts = np.unique(labels, return_inverse=True, return_counts=True)
        self.left_out = {int(names[k]): int(counts[k]) for k in np.flatnonzero(counts < 2)}
        self._rows: Indices = np.flatnonzero(counts[self._class] >= 2)
        if not self._rows.size:
            raise DataError(
                f"no class has two samples among {labels.size}", hint="a class needs one for support and one for query"
            )
        self.support_batch, self.query_batch = _scaled(
            support_batch, query_batch, self._rows.size, int((counts >= 2).sum())
        )
        self._rng, self._pool = rng, _Pool(self._rows, rng, passes=passes)
        self.redraws = self.stratified = 0

    def __iter__(self) -> Iterator[tuple[Indices, Indices]]:
        return self

    def __next__(self) -> tuple[Indices, Indices]:
        for draw in range(MAX_DRAWS):
            self.redraws += draw > 0
            support, query = self._pool.draw(self.support_batch, self.query_batch)
            if np.isin(self._class[query], self._class[support]).all():
                return support, query
        self.stratified += 1
        return self._stratified()

    def _stratified(self) -> tuple[Indices, Indices]:
        """One support sample of each class, as far as they fit; the rest of both batches at random from these classes.
        """
        order = self._rng.permutation(self._rows)
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
    y: ArrayLike, hyper: Any, rng: np.random.Generator, *, by_class: bool
) -> tuple[Iterator[Draw], Callable[[], Mapping[int, int]]]:
    """(endless iterator of the draws of a step, function that returns what was left out so far: class -> samples).

    y: labels int [N], or numbers [N, K] of a task without classes, whose methods draw at random.
    by_class: the query may only have classes of the support, for methods that compare with these. A draw is (support,
    query) or, with ``hyper.independent_hessian_batch``, (support, query, third). The support is empty for methods
    without adaptation.
    """
    labels = np.asarray(y)
    if hasattr(hyper, "batch"):
        nothing = np.empty(0, np.int64)
        return ((nothing, index) for index in batches(len(labels), hyper.batch, rng)), dict
    if getattr(hyper, "shots", 0):
        shots = Shots(labels, hyper.shots, hyper.query_shots, rng)
        return shots, lambda: dict(shots.left_out)
    sizes, passes = (hyper.support_batch, hyper.query_batch), hyper.draws == "pass"
    if hyper.draws == "balanced":
        classes = max(1, int((np.unique(labels, return_counts=True)[1] >= 2).sum()))
        even = Shots(labels, max(1, hyper.support_batch // classes), max(1, hyper.query_batch // classes), rng)
        return even, lambda: dict(even.left_out)
    if by_class:
        episodes = Episodes(labels, *sizes, rng, passes=passes)
        return episodes, lambda: dict(episodes.left_out)
    splits = Splits(len(labels), *sizes, rng, passes=passes)
    if not getattr(hyper, "independent_hessian_batch", False):
        return splits, dict
    third = batches(len(labels), min(hyper.support_batch, len(labels)), rng)
    return ((*pair, more) for pair, more in zip(splits, third, strict=False)), dict


def batches(n: int, batch: int, rng: np.random.Generator) -> Iterator[Indices]:
    """Yields batches of indices below ``n`` without end, in shuffled passes; the last of a pass may be smaller."""
    if n < 1 or batch < 1:
        raise DataError(f"batches of {batch} out of {n} samples", expected="at least one of each")
    while True:
        order = rng.permutation(n)
        for start in range(0, n, batch):
            yield order[start : start + batch]


def _check_sizes(support_batch: int, query_batch: int) -> None:
    if support_batch < 1 or query_batch < 1:
        raise DataError(f"an episode of {support_batch} + {query_batch} samples", expected="at least 1 + 1")


def _scaled(support: int, query: int, available: int, classes: int) -> tuple[int, int]:
    """(support, query), scaled down in proportion to ``available`` (≥ 2 · classes) samples."""
    if support + query <= available:
        return support, query
    part = round(available * support / (support + query))
    part = min(max(part, classes), available - 1)
    return part, available - part
