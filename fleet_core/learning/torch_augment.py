"""Augments training images in torch, with the kinds and random draws of ``fleet_core.training.augment``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fleet_core.training.augment import PADDING, places


def augmented(kind: str, x: Tensor, rng: np.random.Generator) -> Tensor:
    """Augments raw samples [N, *shape] by ``kind``; ``none`` returns them as they are. Raises ConfigError for samples
    that are not images."""
    drawn = places(kind, tuple(x.shape), rng)
    if drawn is None:
        return x
    around = torch.nn.functional.pad(x, (PADDING,) * 4)
    rows_NH, columns_NW = (torch.from_numpy(np.ascontiguousarray(index)).to(x.device) for index in drawn)
    number = torch.arange(len(x), device=x.device)[:, None, None]
    return around[number, :, rows_NH[:, :, None], columns_NW[:, None, :]].permute(0, 3, 1, 2)
