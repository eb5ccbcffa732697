"""A linear head for numbers, fitted to the device's own embedded samples in closed form: ridge regression in numpy.

The decay is the one of ``DECAYS`` with the least leave-one-out error, which follows from one decomposition of the
embeddings, without another fit (PRESS: Allen, "The Relationship between Variable Selection and Data Augmentation and a
Method for Prediction", Technometrics 1974). The bias does not decay.

Shapes: S stored samples, n samples, D embedding width, K outputs, R singular values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.base.errors import DataError, StateError

Array = np.ndarray[Any, Any]

DECAYS = tuple(10.0**power for power in range(-4, 4))
"""Of the mean squared error, in units of the embeddings' mean square."""


@dataclass(frozen=True, eq=False)
class RidgeHead:
    """weight: float32 [K, D]. bias: float32 [K]. decay: the chosen one of ``DECAYS``."""

    weight: Array
    bias: Array
    decay: float

    @classmethod
    def fit(cls, z_SD: Array, y_SK: Array) -> RidgeHead:
        """Fits a head to embedded samples z_SD with targets y_SK float [S, K]. Deterministic. Raises StateError without
        a sample, DataError for other shapes or values that are not finite."""
        if not len(y_SK):
            raise StateError("there is no labelled sample to personalize with", hint="add some: edge-agent samples add")
        if z_SD.ndim != 2 or y_SK.ndim != 2 or len(z_SD) != len(y_SK):
            raise DataError(
                f"embeddings {list(z_SD.shape)} with targets {list(y_SK.shape)}", expected="[S, D] with [S, K]"
            )
        if not (np.isfinite(z_SD).all() and np.isfinite(y_SK).all()):
            raise DataError("an embedding or a target holds a value that is not finite")
        mean_D, mean_K = z_SD.mean(0, dtype=np.float64), y_SK.mean(0, dtype=np.float64)
        centred_SD, target_SK = z_SD - mean_D, y_SK - mean_K
        left_SR, singular_R, right_RD = np.linalg.svd(centred_SD, full_matrices=False)
        projected_RK = left_SR.T @ target_SK
        unit = len(y_SK) * (float(np.square(centred_SD).mean()) or 1.0)
        errors = [_left_out(left_SR, singular_R, projected_RK, target_SK, decay * unit) for decay in DECAYS]
        decay = DECAYS[int(np.argmin(errors))]
        weight_KD = (_shrunk(singular_R, decay * unit)[:, None] * projected_RK).T @ right_RD
        bias_K = mean_K - weight_KD @ mean_D
        return cls(weight_KD.astype(np.float32), bias_K.astype(np.float32), decay)

    def answers(self, z_nD: Array) -> Array:
        """float32 [n, K]."""
        found: Array = (z_nD @ self.weight.T + self.bias).astype(np.float32)
        return found


def _shrunk(singular_R: Array, decay: float) -> Array:
    """s / (s² + decay), the singular values of the regularised inverse."""
    found: Array = singular_R / (np.square(singular_R) + decay)
    return found


def _left_out(left_SR: Array, singular_R: Array, projected_RK: Array, target_SK: Array, decay: float) -> float:
    """The mean squared error of each sample by the head of all others. A sample's leverage counts the bias, 1/S."""
    kept_R = singular_R * _shrunk(singular_R, decay)
    leverage_S = np.square(left_SR) @ kept_R + 1 / len(left_SR)
    error_SK = target_SK - left_SR @ (kept_R[:, None] * projected_RK)
    return float(np.square(error_SK / np.maximum(1 - leverage_S, 1e-9)[:, None]).mean())
