"""How far the probabilities of answers agree with how often they are right, and a temperature that brings them closer.

Guo, Pleiss, Sun, Weinberger, "On Calibration of Modern Neural Networks", ICML 2017: the expected calibration error
(eq. 3, bins of equal width) and temperature scaling (§4.2). Deviation: a temperature is held near 1 by a normal prior
on its logarithm, which few samples do not outweigh.

Shapes: n samples, N classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

BINS = 15
DECIMALS, ROUNDING = 4, 1e-3
"""Decimals of a gap in a message, and by how much the gaps of all bins may then be wrong together."""
TEMPERATURES = tuple(float(t) for t in np.geomspace(0.1, 10, 25))
PRIOR = 3.0
"""Nats by which ln(temperature) = ±1 must raise the likelihood of all samples together."""
SMALLEST = 1e-6
"""Probabilities below it count as this, so that one sample cannot decide a mean log-likelihood."""


def gaps(confidence_n: Array, right_n: Array) -> Array:
    """For each bin, the number of right answers less the sum of their confidences, float64 [BINS]. Those of several
    devices add up to those of all their answers.

    confidence_n: the probability of each answered class; one that is not finite, from a model that has diverged, counts
    as 0. right_n: bool.
    """
    confidence_n = np.where(np.isfinite(confidence_n), confidence_n, 0)
    bin_n = np.minimum((confidence_n * BINS).astype(np.int64), BINS - 1)
    return np.bincount(bin_n, right_n.astype(np.float64) - confidence_n, BINS)


def expected_calibration_error(gap_B: Array, answers: int) -> float | None:
    """Mean over all answers of |share of right answers − mean confidence| in their bin; None without answers. It
    overrates small numbers of answers. gap_B: as ``gaps``."""
    return float(min(np.abs(gap_B).sum() / answers, 1.0)) if answers else None


def pooled(gaps_of_each: Sequence[Sequence[float]], answers: int) -> float | None:
    """The error of the answers of several devices together; None if one of them does not know its gaps."""
    known = len(gaps_of_each) and all(map(len, gaps_of_each))
    return expected_calibration_error(np.sum(gaps_of_each, axis=0), answers) if known else None


def possible(gap_B: Sequence[float], answers: int) -> bool:
    """Whether so many answers can have these gaps, up to rounding."""
    return len(gap_B) == BINS and sum(map(abs, gap_B)) <= answers + ROUNDING


def tempered(probabilities_nN: Array, temperature: float) -> Array:
    """Each row to the power 1 / temperature, summing to 1 again, float32; 0 stays 0. Above 1: less sure."""
    relative_nN = probabilities_nN.astype(np.float64) / probabilities_nN.max(axis=1, keepdims=True)
    powers_nN = relative_nN ** (1 / temperature)
    return np.asarray(powers_nN / powers_nN.sum(axis=1, keepdims=True), dtype=np.float32)


def best_temperature(probabilities_nN: Array, y_n: Array) -> float:
    """The one of ``TEMPERATURES`` with the highest likelihood of labels y_n int64, less the prior; 1 without any."""
    if not len(y_n):
        return 1.0
    cost = [PRIOR * np.log(t) ** 2 - likelihoods(tempered(probabilities_nN, t), y_n).sum() for t in TEMPERATURES]
    return TEMPERATURES[int(np.argmin(cost))]


def likelihoods(probabilities_nN: Array, y_n: Array) -> Array:
    """The logarithm of each label's probability, float64 [n]."""
    return np.asarray(np.log(np.maximum(probabilities_nN[np.arange(len(y_n)), y_n].astype(np.float64), SMALLEST)))
