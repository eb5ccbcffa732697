"""A linear head fitted to the device's own embedded samples: softmax regression in numpy.

Minimises the mean cross-entropy plus ``DECAY``/2 · |W|² over embeddings that are centred and scaled to a mean square
of 1, by Nesterov's accelerated gradient with the step 1/L ("A method of solving a convex programming problem with
convergence rate O(1/k²)", 1983; L bounds the curvature: Böhning, "Multinomial logistic regression algorithm", 1992).
The body is not changed, as in Raghu et al., "Rapid Learning or Feature Reuse?", ICLR 2020. Their head starts from the
meta-learned one; this one starts from zeros, so that it also fits a body without a head.

Shapes: S stored samples, n samples, D embedding width, N classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.base.errors import DataError, StateError
from fleet_core.personalization.nearest import softmax

Array = np.ndarray[Any, Any]

STEPS = 50
DECAY = 1e-3
"""Weight decay: without it the weights of separable classes grow without limit."""


@dataclass(frozen=True, eq=False)
class Head:
    """weight: float32 [N, D]. bias: float32 [N], −inf for a class without samples, which is never predicted."""

    weight: Array
    bias: Array

    @classmethod
    def fit(cls, z_SD: Array, y_S: Array, n_classes: int, *, steps: int = STEPS) -> Head:
        """Fits a head to embedded samples z_SD with labels y_S int64. Deterministic. Raises StateError without a
        sample, DataError for a label outside 0…N − 1 or embeddings that are not finite."""
        if not len(y_S):
            raise StateError("there is no labelled sample to personalize with", hint="add some: edge-agent samples add")
        if len(z_SD) != len(y_S) or not 0 <= y_S.min() <= y_S.max() < n_classes:
            raise DataError(f"{len(z_SD)} samples with {len(y_S)} labels", expected=f"labels in 0…{n_classes - 1}")
        if not np.isfinite(z_SD).all():
            raise DataError("an embedding holds a value that is not finite")
        mean_D = z_SD.mean(0, dtype=np.float64)
        centred_SD = z_SD - mean_D
        scale = float(np.sqrt(np.square(centred_SD).mean())) or 1.0
        known_K, y_K = np.unique(y_S, return_inverse=True)
        weight_KE = _nesterov(np.c_[centred_SD / scale, np.ones(len(y_S))], y_K, len(known_K), steps)
        weight, bias = np.zeros((n_classes, z_SD.shape[1]), np.float32), np.full(n_classes, -np.inf, np.float32)
        weight[known_K] = weight_KE[:, :-1] / scale
        bias[known_K] = weight_KE[:, -1] - weight_KE[:, :-1] @ mean_D / scale
        return cls(weight, bias)

    def probabilities(self, z_nD: Array) -> Array:
        """float32 [n, N]; 0 for a class without samples."""
        return softmax(z_nD @ self.weight.T + self.bias)


def _nesterov(x_SE: Array, y_S: Array, n_classes: int, steps: int) -> Array:
    """float64 [N, E], E = D + 1: weights and, in the last column, biases, which do not decay."""
    target_SN = np.eye(n_classes)[y_S]
    decay_E = np.full(x_SE.shape[1], DECAY)
    decay_E[-1] = 0.0
    rate = 1 / (_curvature(x_SE) + DECAY)
    weight_NE = ahead_NE = np.zeros((n_classes, x_SE.shape[1]))
    for k in range(steps):
        error_SN = softmax(x_SE @ ahead_NE.T) - target_SN
        before_NE, weight_NE = weight_NE, ahead_NE - rate * (error_SN.T @ x_SE / len(x_SE) + decay_E * ahead_NE)
        ahead_NE = weight_NE + k / (k + 3) * (weight_NE - before_NE)
    return weight_NE


def _curvature(x_SE: Array) -> float:
    """½ · the largest eigenvalue of XᵀX / S, an upper bound of the curvature of the mean cross-entropy."""
    gram = x_SE @ x_SE.T if len(x_SE) < x_SE.shape[1] else x_SE.T @ x_SE
    return float(np.linalg.eigvalsh(gram)[-1]) / (2 * len(x_SE))
