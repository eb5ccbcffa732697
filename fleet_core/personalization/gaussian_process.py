"""Answers of Gaussian processes on a device's own embedded samples, without torch: a binary tree of classes.

``fleet_core.algorithms.methods.pfedgp`` has the paper and the deviations. In a node the samples of its left classes
have y = 1, those of its right ones y = −1, and f has the prior N(0, K). Given the augmentation's means ω, the posterior
of f is that of a regression on z = y / 2ω with noise 1 / ω; ω = tanh(c/2) / 2c with c² = E f² is found in turn (Wenzel
et al. 2019, eq. 8-10). The probability of a class is the product of σ(±f) along its path, each averaged over f by
Gauss-Hermite quadrature.

Shapes: n samples, S stored samples, D embedding width, N classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.algorithms.methods.pfedgp import Gaussian
from fleet_core.base.errors import StateError
from fleet_core.data.samples import stratified

Array = np.ndarray[Any, Any]
MOST = 1000
"""Samples that a device's processes are made of; time grows with their third power."""
POINTS, HEIGHTS = np.polynomial.hermite.hermgauss(20)


@dataclass(frozen=True)
class Node:
    """Classes of either side."""

    left: tuple[int, ...]
    right: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Process:
    """A node's posterior. rows: int64, of its samples. alpha: float64 [S], K⁻¹ of the posterior mean. lower, root:
    of B = 1 + √ω K √ω = L Lᵀ."""

    node: Node
    rows: Array
    alpha: Array
    lower: Array
    root: Array


@dataclass(frozen=True, eq=False)
class Processes:
    """z: float64 [S, D], the samples behind them. present: the classes that have any; others get probability 0."""

    z: Array
    present: tuple[int, ...]
    nodes: tuple[Process, ...]
    classes: int
    how: Gaussian

    @classmethod
    def of(cls, z_SD: Array, y_S: Array, classes: int, how: Gaussian) -> Processes:
        """Of embedded samples with labels int64 [S] below ``classes``; of more than ``MOST`` about as many of each
        class, spread evenly. Raises StateError for none."""
        if not len(y_S):
            raise StateError("there is no sample to answer by", hint="add labelled samples and personalize")
        rows = stratified(y_S, MOST)
        z, y = z_SD[rows].astype(np.float64), y_S[rows]
        made = []
        for node in tree(z, y):
            own = np.flatnonzero(np.isin(y, node.left + node.right))
            side = np.where(np.isin(y[own], node.left), 1.0, -1.0)
            k = kernel(z[own], z[own], how)
            root = np.sqrt(augmentation(k, side, how.augmentation_steps))
            lower, alpha = _posterior(k, side, root)
            made.append(Process(node, own, alpha, lower, root))
        return cls(z, tuple(map(int, np.unique(y))), tuple(made), classes, how)

    def probabilities(self, z_nD: Array) -> Array:
        """float32 [n, N] of embedded samples."""
        z = z_nD.astype(np.float64)
        found = np.zeros((len(z), self.classes))
        found[:, list(self.present)] = 1.0
        for process in self.nodes:
            k_nS = kernel(z, self.z[process.rows], self.how)
            mean = k_nS @ process.alpha
            known = np.linalg.solve(process.lower, process.root[:, None] * k_nS.T)
            deviation = np.sqrt(np.maximum(_prior(z, self.how) - np.square(known).sum(0), 0))
            yes = _sigmoid(mean[:, None] + np.sqrt(2) * deviation[:, None] * POINTS) @ HEIGHTS / np.sqrt(np.pi)
            found[:, list(process.node.left)] *= yes[:, None]
            found[:, list(process.node.right)] *= 1 - yes[:, None]
        return np.asarray(found, np.float32)


def tree(z_SD: Array, y_S: Array) -> list[Node]:
    """The nodes, the root first; none for a single class. It depends on no label's number but where means are equal."""
    classes = np.unique(y_S)
    means = np.stack([z_SD[y_S == k].astype(np.float64).mean(0) for k in classes])
    return list(_divided(classes, means))


def _divided(classes: Array, means: Array) -> Iterator[Node]:
    if len(classes) < 2:
        return
    centred = means - means.mean(0)
    direction = np.linalg.svd(centred, full_matrices=False)[2][0]
    left = centred @ direction > 0
    if left.all() or not left.any():
        left = np.arange(len(classes)) < len(classes) // 2
    yield Node(tuple(map(int, classes[left])), tuple(map(int, classes[~left])))
    yield from _divided(classes[left], means[left])
    yield from _divided(classes[~left], means[~left])


def kernel(a_nD: Array, b_mD: Array, how: Gaussian) -> Array:
    """[n, m]."""
    inner = a_nD @ b_mD.T
    if how.kernel == "linear":
        return np.asarray(inner * (how.output_scale / how.length_scale**2))
    squared = np.square(a_nD).sum(1)[:, None] - 2 * inner + np.square(b_mD).sum(1)
    return np.asarray(how.output_scale * np.exp(-np.maximum(squared, 0) / (2 * how.length_scale**2)))


def _prior(z_nD: Array, how: Gaussian) -> Array:
    """[n]: the kernel of each sample with itself."""
    if how.kernel == "linear":
        return np.asarray(np.square(z_nD).sum(1) * (how.output_scale / how.length_scale**2))
    return np.full(len(z_nD), how.output_scale)


def augmentation(k_SS: Array, side_S: Array, steps: int) -> Array:
    """ω [S] after so many updates from 1/4, its value for f = 0. side: 1 or −1."""
    omega = np.full(len(side_S), 0.25)
    for _ in range(steps):
        root = np.sqrt(omega)
        lower, alpha = _posterior(k_SS, side_S, root)
        known = np.linalg.solve(lower, root[:, None] * k_SS)
        square = np.square(k_SS @ alpha) + np.maximum(np.diag(k_SS) - np.square(known).sum(0), 0)
        c = np.sqrt(np.maximum(square, 1e-12))
        omega = np.tanh(c / 2) / (2 * c)
    return omega


def _posterior(k_SS: Array, side_S: Array, root_S: Array) -> tuple[Array, Array]:
    """(L, α): f's posterior mean is K α."""
    lower = np.linalg.cholesky(np.eye(len(root_S)) + root_S[:, None] * k_SS * root_S)
    inner = np.linalg.solve(lower.T, np.linalg.solve(lower, side_S / (2 * root_S)))
    return lower, root_S * inner


def _sigmoid(value: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(value / 2)))
