"""Weighs several ways to personalize by cross-validation on a device's own labelled samples. Numpy only.

The answer is the weighted mean of the ways' probabilities. The weights are those of highest likelihood for the answers
to samples that were left out (stacking: Breiman, "Stacked Regressions", Machine Learning 1996; for probabilities Smyth
and Wolpert, "Linearly Combining Density Estimators via Stacking", Machine Learning 1999), found by their expectation
maximisation. Each way counts as if it alone had answered ``PRIOR`` more samples, so that a device with few labels
weighs all ways alike. The mixture's temperature follows from the same answers.

The folds are blocks of neighbouring samples, not random draws: windows of a recording overlap, and with random folds a
way that remembers samples would be judged on samples that it has seen (Roberts et al., "Cross-validation strategies for
data with temporal, spatial, hierarchical, or phylogenetic structure", Ecography 2017).

Shapes: S samples, n samples, N classes, W ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.data.samples import stratified
from fleet_core.tasks.calibration import best_temperature, likelihoods, tempered

Array = np.ndarray[Any, Any]

Way = Callable[[Array, Array], Array]
"""(int64 rows to learn from, int64 rows [n] to answer) -> probabilities float32 [n, N]."""

FOLDS = 3
MAX_SAMPLES = 500
"""The most samples that ways are judged on, about equally many of each class: it bounds time and memory."""
PRIOR = 5.0
STEPS = 50


@dataclass(frozen=True)
class Judged:
    """A way's cross-validated accuracy and mean log-likelihood (nats per sample), and its weight in the answer."""

    accuracy: float
    log_likelihood: float
    weight: float


@dataclass(frozen=True)
class Mixture:
    """samples: number of judged samples. ways: by name; without a judged sample of accuracy 0 and equal weights."""

    samples: int
    temperature: float
    ways: Mapping[str, Judged]

    def answer(self, found: Mapping[str, Array]) -> Array:
        """Probabilities float32 [n, N] from those of each way."""
        return tempered(_mean([found[name] for name in self.ways], [way.weight for way in self.ways.values()]),
                        self.temperature)


def mixture_of(ways: Mapping[str, Way], y_S: Array) -> Mixture:
    """The mixture that answers samples with labels y_S int64 [S] best when they are left out. The rows must be in the
    order of their recording. Deterministic. Raises what a way raises."""
    rows = stratified(y_S, MAX_SAMPLES)
    parts = [(rows[train], rows[test]) for train, test in folds(y_S[rows])]
    if not parts:
        return Mixture(0, 1.0, {name: Judged(0.0, 0.0, 1 / len(ways)) for name in ways})
    y_n = np.concatenate([y_S[test] for _, test in parts])
    found = [np.concatenate([way(train, test) for train, test in parts]) for way in ways.values()]
    likelihood_Wn = np.stack([likelihoods(one, y_n) for one in found])
    weights = stacked(likelihood_Wn)
    judged = {
        name: Judged(float((one.argmax(1) == y_n).mean()), float(likelihood_n.mean()), float(weight))
        for name, one, likelihood_n, weight in zip(ways, found, likelihood_Wn, weights, strict=True)
    }
    return Mixture(len(y_n), best_temperature(_mean(found, weights), y_n), judged)


def stacked(likelihood_Wn: Array) -> Array:
    """The weights [W] of ways from their log-likelihoods of n samples."""
    ways, samples = likelihood_Wn.shape
    weight_W = np.full(ways, 1 / ways)
    probability_Wn = np.exp(likelihood_Wn)
    for _ in range(STEPS):
        share_Wn = weight_W[:, None] * probability_Wn
        share_Wn /= share_Wn.sum(0)
        weight_W = (share_Wn.sum(1) + PRIOR) / (samples + ways * PRIOR)
    return weight_W


def _mean(found: list[Array], weights: Any) -> Array:
    return np.asarray(sum(weight * one for weight, one in zip(weights, found, strict=True)), dtype=np.float32)


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
