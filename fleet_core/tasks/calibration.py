"""How far the probabilities of answers agree with how often they are right, and a temperature that brings them closer.

Guo, Pleiss, Sun, Weinberger, "On Calibration of Modern Neural Networks", ICML 2017: the expected calibration error
(eq. 3, bins of equal width) and temperature scaling (§4.2). Deviation: a temperature is held near 1 by a normal prior
on its logarithm, which few samples do not outweigh.

Shapes: n samples, N classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

BINS = 15
TEMPERATURES = tuple(float(t) for t in np.geomspace(0.1, 10, 25))
PRIOR = 3.0
"""Nats by which ln(temperature) = ±1 must raise the likelihood of all samples together."""
SMALLEST = 1e-6
"""Probabilities below it count as this, so that one sample cannot decide a mean log-likelihood."""


def expected_calibration_error(confidence_n: Array, right_n: Array) -> float | None:
    """Mean over all answers of |share of right answers − mean confidence| in their bin; None without answers.

    confidence_n: the probability of each answered class. right_n: bool. It overrates small numbers of answers.
    """
    if not len(confidence_n):
        return None
    bin_n = np.minimum((confidence_n * BINS).astype(np.int64), BINS - 1)
    gap_B = np.bincount(bin_n, right_n.astype(np.float64) - confidence_n, BINS)
    return float(np.abs(gap_B).sum() / len(confidence_n))


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
