"""Gaussian process classification of a device's own embedded samples, in numpy: a binary tree of classes.

``fleet_core.algorithms.methods.pfedgp`` names the paper and the deviations. In a node the samples of its left classes
have y = 1, those of its right classes y = −1, and f has the prior N(0, K). Given the means ω of the Pólya-Gamma
augmentation, the posterior of f is that of a regression on z = y / 2ω with noise 1 / ω; in alternation
ω = tanh(c/2) / 2c with c² = E f² (Wenzel et al. 2019, eq. 8-10). The probability of a class is the product of σ(±f)
along its path, each averaged over f by Gauss-Hermite quadrature.

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
MAX_SAMPLES = 1000
"""The most samples of a device's processes; time grows with their cube."""
POINTS, HEIGHTS = np.polynomial.hermite.hermgauss(20)


@dataclass(frozen=True)
class Node:
    """A node of the tree, with the classes on each side."""

    left: tuple[int, ...]
    right: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Process:
    """A node's posterior. rows: int64 indices of its samples. alpha: float64 [S], K⁻¹ times the posterior mean.
    whitening: L⁻¹ √ω, float64 [S, S], where 1 + √ω K √ω = L Lᵀ."""

    node: Node
    rows: Array
    alpha: Array
    whitening: Array


@dataclass(frozen=True, eq=False)
class Processes:
    """z: float64 [S, D], the embedded samples. present: the classes that have samples; others get probability 0."""

    z: Array
    present: tuple[int, ...]
    nodes: tuple[Process, ...]
    classes: int
    how: Gaussian

    @classmethod
    def of(cls, z_SD: Array, y_S: Array, classes: int, how: Gaussian) -> Processes:
        """Processes of embedded samples with labels int64 [S] below ``classes``. Of more than ``MAX_SAMPLES``, about as
        many of each class are used. Raises StateError without a sample."""
        if not len(y_S):
            raise StateError("there is no labelled sample to answer with", hint="add labelled samples and personalize")
        rows = stratified(y_S, MAX_SAMPLES)
        z, y = z_SD[rows].astype(np.float64), y_S[rows]
        nodes = []
        for node in tree(z, y):
            own = np.flatnonzero(np.isin(y, node.left + node.right))
            side = np.where(np.isin(y[own], node.left), 1.0, -1.0)
            k = kernel(z[own], z[own], how)
            whitening, alpha = _posterior(k, side, augmentation(k, side, how.augmentation_steps))
            nodes.append(Process(node, own, alpha, whitening))
        return cls(z, tuple(map(int, np.unique(y))), tuple(nodes), classes, how)

    def probabilities(self, z_nD: Array) -> Array:
        """float32 [n, N] for embedded samples."""
        z = z_nD.astype(np.float64)
        product = np.zeros((len(z), self.classes))
        product[:, list(self.present)] = 1.0
        for process in self.nodes:
            k_nS = kernel(z, self.z[process.rows], self.how)
            mean = k_nS @ process.alpha
            explained = np.square(process.whitening @ k_nS.T).sum(0)
            deviation = np.sqrt(np.maximum(_prior_variance(z, self.how) - explained, 0))
            left = _sigmoid(mean[:, None] + np.sqrt(2) * deviation[:, None] * POINTS) @ HEIGHTS / np.sqrt(np.pi)
            product[:, list(process.node.left)] *= left[:, None]
            product[:, list(process.node.right)] *= 1 - left[:, None]
        return np.asarray(product, np.float32)


def tree(z_SD: Array, y_S: Array) -> list[Node]:
    """The nodes, root first; none for a single class. Renumbering the labels changes nothing unless means are equal."""
    classes = np.unique(y_S)
    means = np.stack([z_SD[y_S == k].astype(np.float64).mean(0) for k in classes])
    return list(_divide(classes, means))


def _divide(classes: Array, means: Array) -> Iterator[Node]:
    if len(classes) < 2:
        return
    centred = means - means.mean(0)
    direction = np.linalg.svd(centred, full_matrices=False)[2][0]
    left = centred @ direction > 0
    if left.all() or not left.any():
        left = np.arange(len(classes)) < len(classes) // 2
    yield Node(tuple(map(int, classes[left])), tuple(map(int, classes[~left])))
    yield from _divide(classes[left], means[left])
    yield from _divide(classes[~left], means[~left])


def kernel(a_nD: Array, b_mD: Array, how: Gaussian) -> Array:
    """The kernel matrix [n, m]."""
    inner = a_nD @ b_mD.T
    if how.kernel == "linear":
        return np.asarray(inner * (how.output_scale / how.length_scale**2))
    squared = np.square(a_nD).sum(1)[:, None] - 2 * inner + np.square(b_mD).sum(1)
    return np.asarray(how.output_scale * np.exp(-np.maximum(squared, 0) / (2 * how.length_scale**2)))


def _prior_variance(z_nD: Array, how: Gaussian) -> Array:
    """[n]: the kernel of each sample with itself."""
    if how.kernel == "linear":
        return np.asarray(np.square(z_nD).sum(1) * (how.output_scale / how.length_scale**2))
    return np.full(len(z_nD), how.output_scale)


def augmentation(k_SS: Array, side_S: Array, steps: int) -> Array:
    """ω [S] after ``steps`` updates from 1/4, its value for f = 0. side_S: 1 or −1."""
    omega = np.full(len(side_S), 0.25)
    for _ in range(steps):
        whitening, alpha = _posterior(k_SS, side_S, omega)
        explained = np.square(whitening @ k_SS).sum(0)
        square = np.square(k_SS @ alpha) + np.maximum(np.diag(k_SS) - explained, 0)
        c = np.sqrt(np.maximum(square, 1e-12))
        omega = np.tanh(c / 2) / (2 * c)
    return omega


def _posterior(k_SS: Array, side_S: Array, omega_S: Array) -> tuple[Array, Array]:
    """(the whitening, α); the posterior mean of f is K α."""
    root_S = np.sqrt(omega_S)
    lower = np.linalg.cholesky(np.eye(len(root_S)) + root_S[:, None] * k_SS * root_S)
    whitening = np.linalg.inv(lower) * root_S
    return whitening, whitening.T @ (whitening @ (side_S / (2 * omega_S)))


def _sigmoid(value: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(value / 2)))
