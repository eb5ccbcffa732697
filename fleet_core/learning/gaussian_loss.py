"""The loss that trains a representation for Gaussian processes: −log p(query | support) on embedded samples.

The processes are those of ``fleet_core.personalization.gaussian_process``. Their trees and augmentation variables are
constants for the gradient, as in Achituve et al. 2021.

Shapes: S support samples, n query samples, D embedding width.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fleet_core.algorithms.methods.pfedgp import Gaussian
from fleet_core.personalization import gaussian_process


def loss(z_SD: Tensor, y_S: Tensor, z_nD: Tensor, y_n: Tensor, how: Gaussian) -> Tensor:
    """The mean over query samples whose class is in the support; 0 when the support has a single class."""
    y, asked = y_S.cpu().numpy(), y_n.cpu().numpy()
    held = z_SD.detach().double().cpu().numpy()
    total = z_nD.sum() * 0
    for node in gaussian_process.tree(held, y):
        own, query = (np.flatnonzero(np.isin(labels, node.left + node.right)) for labels in (y, asked))
        if not len(query):
            continue
        side, wanted = (_side(labels, node, z_SD) for labels in (y[own], asked[query]))
        omega = gaussian_process.augmentation(gaussian_process.kernel(held[own], held[own], how), side.cpu().numpy(),
                                      how.augmentation_steps)
        mean, variance = posterior(z_SD[own], side, z_nD[query], torch.as_tensor(omega).to(z_SD), how)
        total = total - log_likelihood(mean, variance, wanted).sum()
    known = int(np.isin(asked, y).sum())
    return total / max(known, 1)


def posterior(
    z_SD: Tensor, side_S: Tensor, z_nD: Tensor, omega_S: Tensor, how: Gaussian
) -> tuple[Tensor, Tensor]:
    """Mean [n] and variance [n] of f at the query samples, given ω."""
    root = omega_S.sqrt()
    k_SS, k_nS = kernel(z_SD, z_SD, how), kernel(z_nD, z_SD, how)
    b_SS = torch.eye(len(root), dtype=root.dtype, device=root.device) + root[:, None] * k_SS * root
    lower = torch.linalg.cholesky(b_SS)
    inner = torch.cholesky_solve((side_S / (2 * root))[:, None], lower)[:, 0]
    known = torch.linalg.solve_triangular(lower, root[:, None] * k_nS.T, upper=False)
    own = z_nD.square().sum(1) / how.length_scale**2 if how.kernel == "linear" else torch.ones_like(z_nD[:, 0])
    return k_nS @ (root * inner), (how.output_scale * own - known.square().sum(0)).clamp(min=1e-9)


def log_likelihood(mean_n: Tensor, variance_n: Tensor, side_n: Tensor) -> Tensor:
    """log E σ(side · f) [n], by Gauss-Hermite quadrature."""
    points, heights = (torch.as_tensor(a).to(mean_n) for a in (gaussian_process.POINTS, gaussian_process.HEIGHTS))
    f = side_n[:, None] * (mean_n[:, None] + (2 * variance_n).sqrt()[:, None] * points)
    return torch.logsumexp(torch.nn.functional.logsigmoid(f) + heights.log(), 1) - math.log(math.pi) / 2


def kernel(a_nD: Tensor, b_mD: Tensor, how: Gaussian) -> Tensor:
    """The kernel matrix [n, m]."""
    if how.kernel == "linear":
        return a_nD @ b_mD.T * (how.output_scale / how.length_scale**2)
    squared = (a_nD[:, None] - b_mD).square().sum(2)
    return how.output_scale * torch.exp(-squared / (2 * how.length_scale**2))


def _side(labels: np.ndarray[tuple[int, ...], np.dtype[np.int64]], node: gaussian_process.Node, like: Tensor) -> Tensor:
    return torch.as_tensor(np.where(np.isin(labels, node.left), 1.0, -1.0)).to(like)
