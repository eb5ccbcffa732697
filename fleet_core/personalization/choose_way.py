"""Chooses how a device personalizes, by cross-validation on its own labelled samples. Numpy only.

The folds are blocks of neighbouring samples, not random draws. Windows of a recording overlap, so with random folds a
way that remembers samples would be judged on samples that it has seen (Roberts et al., "Cross-validation strategies for
data with temporal, spatial, hierarchical, or phylogenetic structure", Ecography 2017). The first way is kept unless
another is surely better: it is replaced only by a way whose accuracy is higher by more than one standard error of their
paired difference (Breiman et al., "Classification and Regression Trees", 1984, §3.4.3), so that few labels change
little.

Shapes: S samples, n samples, N classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.data.samples import stratified

Array = np.ndarray[Any, Any]

Way = Callable[[Array, Array], Array]
"""(int64 rows to learn from, int64 rows [n] to answer) -> probabilities float32 [n, N]."""

FOLDS = 5
MAX_SAMPLES = 500
"""The most samples that ways are judged on, about equally many of each class: it bounds time and memory."""
LEAST = 10
"""With fewer judged samples the first way is kept."""
SMALLEST = 1e-6
"""Probabilities below it count as this, so that one sample cannot decide a mean log-likelihood."""


@dataclass(frozen=True)
class Judged:
    """A way's cross-validated accuracy and mean log-likelihood (nats per sample)."""

    accuracy: float
    log_likelihood: float


@dataclass(frozen=True)
class Choice:
    """way: the chosen one. samples: number of judged samples. judged: by way; empty if the samples are too few."""

    way: str
    samples: int
    judged: Mapping[str, Judged]


def choose_way(ways: Mapping[str, Way], y_S: Array) -> Choice:
    """The way that answers samples with labels y_S int64 [S] best, if it is surely better than the first of ``ways``.

    The rows must be in the order of their recording. Of equally accurate ways the one with the highest log-likelihood
    is taken. Deterministic. Raises what a way raises.
    """
    first = next(iter(ways))
    rows = stratified(y_S, MAX_SAMPLES)
    parts = [(rows[train], rows[test]) for train, test in folds(y_S[rows])]
    tested = np.concatenate([test for _, test in parts]) if parts else np.zeros(0, np.int64)
    if len(tested) < LEAST:
        return Choice(first, len(tested), {})
    right, judged = {}, {}
    for name, way in ways.items():
        found_nN = np.concatenate([way(train, test) for train, test in parts])
        right[name] = found_nN.argmax(1) == y_S[tested]
        likelihood_n = found_nN[np.arange(len(tested)), y_S[tested]]
        mean = float(np.log(np.maximum(likelihood_n, SMALLEST)).mean())
        judged[name] = Judged(float(right[name].mean()), mean)
    better = [name for name in ways if name == first or _surely_better(right[name], right[first])]
    best = max(better, key=lambda name: (judged[name].accuracy, judged[name].log_likelihood))
    return Choice(best, len(tested), judged)


def folds(y_S: Array) -> Iterator[tuple[Array, Array]]:
    """(rows to learn from, rows to answer), both ascending int64, for each of at most ``FOLDS`` folds.

    Each class is cut into blocks of neighbouring rows. A row that touches a block in the recording is not learned from
    in that fold, unless its class would have no other. A class with one sample is learned from and never judged.
    """
    classes = [np.flatnonzero(y_S == label) for label in np.unique(y_S)]
    for fold in range(FOLDS):
        train, test = [], []
        for own in classes:
            count = min(FOLDS, len(own))
            block = np.array_split(own, count)[fold] if fold < count > 1 else own[:0]
            others = np.setdiff1d(own, block)
            apart = others[~np.isin(others, np.concatenate([block - 1, block + 1]))]
            train.append(apart if len(apart) else others)
            test.append(block)
        if any(map(len, test)):
            yield np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def _surely_better(right_n: Array, first_n: Array) -> bool:
    """Whether the mean of the paired differences exceeds their standard error."""
    difference_n = right_n.astype(np.float64) - first_n
    return bool(difference_n.mean() > difference_n.std(ddof=1) / np.sqrt(len(difference_n)))
