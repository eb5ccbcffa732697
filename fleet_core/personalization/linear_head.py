"""A linear head fitted to the device's own embedded samples: softmax regression in numpy, or a logistic regression for
each of several labels.

Minimises the mean cross-entropy plus ``DECAY``/2 · |W|² over embeddings that are centred and scaled to a mean square
of 1, by Nesterov's accelerated gradient with the step 1/L ("A method of solving a convex programming problem with
convergence rate O(1/k²)", 1983; L bounds the curvature: Böhning, "Multinomial logistic regression algorithm", 1992).
The body is not changed, as in Raghu et al., "Rapid Learning or Feature Reuse?", ICLR 2020. Their head starts from the
meta-learned one; this one starts from zeros, so that it also fits a body without a head.

Shapes: S stored samples, n samples, D embedding width, N classes or labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.base.errors import DataError, StateError
from fleet_core.personalization.nearest import softmax
from fleet_core.tasks.labels import sigmoid

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
        known_K, y_K = np.unique(y_S, return_inverse=True)
        weight, bias = np.zeros((n_classes, z_SD.shape[1]), np.float32), np.full(n_classes, -np.inf, np.float32)
        weight[known_K], bias[known_K] = _fitted(z_SD, np.eye(len(known_K))[y_K], softmax, steps)
        return cls(weight, bias)

    def probabilities(self, z_nD: Array) -> Array:
        """float32 [n, N]; 0 for a class without samples."""
        return softmax(z_nD @ self.weight.T + self.bias)


@dataclass(frozen=True, eq=False)
class LabelHead:
    """A logistic regression for each label. weight: float32 [N, D]. bias: float32 [N]."""

    weight: Array
    bias: Array

    @classmethod
    def fit(cls, z_SD: Array, y_SN: Array, *, steps: int = STEPS) -> LabelHead:
        """Fits a head to embedded samples z_SD with labels y_SN, 0 or 1. A label without a sample that carries it, or
        without one that does not, gets a bias only. Deterministic. Raises StateError without a sample, DataError for
        other shapes or embeddings that are not finite."""
        if not len(y_SN):
            raise StateError("there is no labelled sample to personalize with", hint="add some: edge-agent samples add")
        if z_SD.ndim != 2 or y_SN.ndim != 2 or len(z_SD) != len(y_SN):
            raise DataError(f"embeddings {list(z_SD.shape)} with labels {list(y_SN.shape)}",
                            expected="[S, D] with [S, N]")
        if not np.isfinite(z_SD).all():
            raise DataError("an embedding holds a value that is not finite")
        return cls(*_fitted(z_SD, y_SN.astype(np.float64), sigmoid, steps))

    def answers(self, z_nD: Array) -> Array:
        """Logits float32 [n, N]."""
        return np.asarray(z_nD @ self.weight.T + self.bias, np.float32)


def _fitted(z_SD: Array, target_SN: Array, link: Callable[[Array], Array], steps: int) -> tuple[Array, Array]:
    """(weight [N, D], bias [N]), float32. link: logits -> probabilities."""
    mean_D = z_SD.mean(0, dtype=np.float64)
    x_SE = np.ones((len(z_SD), z_SD.shape[1] + 1))
    centred_SD = np.subtract(z_SD, mean_D, out=x_SE[:, :-1])
    scale = float(np.sqrt(np.einsum("sd,sd->", centred_SD, centred_SD) / centred_SD.size)) or 1.0
    centred_SD /= scale
    weight_NE = _nesterov(x_SE, target_SN, link, steps)
    bias_N = weight_NE[:, -1] - weight_NE[:, :-1] @ mean_D / scale
    return (weight_NE[:, :-1] / scale).astype(np.float32), bias_N.astype(np.float32)


def _nesterov(x_SE: Array, target_SN: Array, link: Callable[[Array], Array], steps: int) -> Array:
    """float64 [N, E], E = D + 1: weights and, in the last column, biases, which do not decay. The curvature bounds that
    of softmax and of sigmoids."""
    decay_E = np.full(x_SE.shape[1], DECAY)
    decay_E[-1] = 0.0
    rate = 1 / (_curvature(x_SE) + DECAY)
    weight_NE = ahead_NE = np.zeros((target_SN.shape[1], x_SE.shape[1]))
    for k in range(steps):
        error_SN = link(x_SE @ ahead_NE.T) - target_SN
        before_NE, weight_NE = weight_NE, ahead_NE - rate * (error_SN.T @ x_SE / len(x_SE) + decay_E * ahead_NE)
        ahead_NE = weight_NE + k / (k + 3) * (weight_NE - before_NE)
    return weight_NE


def _curvature(x_SE: Array) -> float:
    """½ · the largest eigenvalue of XᵀX / S, an upper bound of the curvature of the mean cross-entropy."""
    gram = x_SE @ x_SE.T if len(x_SE) < x_SE.shape[1] else x_SE.T @ x_SE
    return float(np.linalg.eigvalsh(gram)[-1]) / (2 * len(x_SE))
