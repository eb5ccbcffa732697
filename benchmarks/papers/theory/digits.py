"""Multinomial logistic regression on MNIST by writer, with exact gradients: the convex problem of the theorems on real
data. Images are reduced to 14 x 14 by means; a ridge of ``RIDGE`` makes every device's loss strongly convex.

Shapes: m devices, n samples of a device, d values and a constant one, k classes; weights are float64 [d * k].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fleet_core.algorithms.interface import GradFn
from fleet_core.data.sets.set_cache import load_set

Array = np.ndarray[Any, Any]

CLASSES, SIDE, RIDGE, MIN_SAMPLES = 10, 14, 1e-2, 100
SIZE = (SIDE * SIDE + 1) * CLASSES


@dataclass(frozen=True)
class Digits:
    """x: [n, d] of each device, y: one-hot [n, k]. inner: rate of the one inner step of Per-FedAvg; 0 for none. best:
    the minimum of the mean loss without inner steps."""

    x: tuple[Array, ...]
    y: tuple[Array, ...]
    inner: float
    best: Array

    @staticmethod
    def drawn(seed: int, devices: int) -> Digits:
        """Writers that the seed draws, each with ``MIN_SAMPLES`` digits."""
        found = load_set("mnist").train
        assert found.client is not None
        names, counts = np.unique(found.client, return_counts=True)
        chosen = np.random.default_rng(seed).choice(names[counts >= MIN_SAMPLES], devices, replace=False)
        rows = [np.flatnonzero(found.client == name)[:MIN_SAMPLES] for name in sorted(chosen)]
        x = tuple(_values(found.x[row]) for row in rows)
        y = tuple(np.eye(CLASSES)[found.y[row]] for row in rows)
        return Digits(x, y, 0.0, _minimum(np.concatenate(x), np.concatenate(y)))

    def after_a_step(self, rate: float) -> Digits:
        """F_i(w) = f_i(w − rate ∇f_i(w))."""
        return Digits(self.x, self.y, rate, self.best)

    @property
    def devices(self) -> int:
        return len(self.x)

    @property
    def size(self) -> int:
        return SIZE

    def gradient(self, device: int) -> GradFn:
        return lambda at: {"body": {"w": self._gradient(device, at["body"]["w"])}}

    def slope(self, w: Array) -> Array:
        """The gradient of the mean over devices."""
        found: Array = np.mean([self._gradient(device, w) for device in range(self.devices)], axis=0)
        return found

    def error(self, w: Array) -> float:
        """f(w) − f(w*), without inner steps."""
        return self._loss(w) - self._loss(self.best)

    def _gradient(self, device: int, w: Array) -> Array:
        plain = self._plain(device, w)
        if not self.inner:
            return plain
        at = self._plain(device, w - self.inner * plain)
        return at - self.inner * self._hessian_product(device, w, at)

    def _plain(self, device: int, w: Array) -> Array:
        x, y = self.x[device], self.y[device]
        found: Array = (x.T @ (_softmax(x @ w.reshape(-1, CLASSES)) - y) / len(x)).ravel() + RIDGE * w
        return found

    def _hessian_product(self, device: int, w: Array, v: Array) -> Array:
        x = self.x[device]
        p, moved = _softmax(x @ w.reshape(-1, CLASSES)), x @ v.reshape(-1, CLASSES)
        found: Array = (x.T @ (p * (moved - (p * moved).sum(1, keepdims=True))) / len(x)).ravel() + RIDGE * v
        return found

    def _loss(self, w: Array) -> float:
        """The mean over devices, which have the same number of samples."""
        z = np.concatenate(self.x) @ w.reshape(-1, CLASSES)
        top = z.max(1, keepdims=True)
        log = np.log(np.exp(z - top).sum(1, keepdims=True)) + top - z
        return float((log * np.concatenate(self.y)).sum(1).mean() + RIDGE * (w @ w) / 2)


def _values(x: Array) -> Array:
    """Images of 28 x 28 in any layout -> [n, d + 1] from 0 to 1, the last one 1."""
    small = x.reshape(len(x), SIDE, 2, SIDE, 2).astype(np.float64).mean((2, 4)).reshape(len(x), -1)
    return np.concatenate([small / max(float(small.max()), 1.0), np.ones((len(x), 1))], axis=1)


def _softmax(z: Array) -> Array:
    raised = np.exp(z - z.max(1, keepdims=True))
    found: Array = raised / raised.sum(1, keepdims=True)
    return found


def _minimum(x: Array, y: Array) -> Array:
    features, labels = torch.from_numpy(x), torch.from_numpy(y.argmax(1))
    w = torch.zeros(SIZE, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=5000, tolerance_grad=1e-12, tolerance_change=0.0, history_size=50,
                                  line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = torch.nn.functional.cross_entropy(features @ w.view(-1, CLASSES), labels) + RIDGE * w.square().sum() / 2
        (w.grad,) = torch.autograd.grad(found, w)
        return found

    optimizer.step(loss)
    found: Array = w.detach().numpy()
    return found
