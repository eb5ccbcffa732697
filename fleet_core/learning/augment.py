"""Augmentation of training images.

``crop-flip``: a random crop of the original size after padding with 4 black pixels, and a horizontal flip with
probability 1/2 (the runs of Acar et al., ICML 2021, on CIFAR).

Shapes: N samples, C channels, H height, W width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fleet_core.base.errors import ConfigError

PADDING = 4


def augmented(kind: str, x: Tensor, rng: np.random.Generator) -> Tensor:
    """Augments raw samples [N, *shape] by ``kind``; ``none`` returns them as they are. Raises ConfigError for samples
    that are not images."""
    if kind == "none" or not len(x):
        return x
    if x.ndim != 4:
        raise ConfigError(f"augment '{kind}' is for images", expected="samples [C, H, W]", hint='augment = "none"')
    return crop_flip(x, rng)


def crop_flip(x_NCHW: Tensor, rng: np.random.Generator) -> Tensor:
    n, _, height, width = x_NCHW.shape
    around = torch.nn.functional.pad(x_NCHW, (PADDING,) * 4)
    corner = rng.integers(0, 2 * PADDING + 1, size=(2, n, 1))
    rows, columns = corner[0] + np.arange(height), corner[1] + np.arange(width)
    columns = np.where(rng.random((n, 1)) < 0.5, columns[:, ::-1], columns)
    place = (torch.from_numpy(np.ascontiguousarray(index)).to(x_NCHW.device) for index in (rows, columns))
    rows_NH, columns_NW = place
    number = torch.arange(n, device=x_NCHW.device)[:, None, None]
    return around[number, :, rows_NH[:, :, None], columns_NW[:, None, :]].permute(0, 3, 1, 2)
