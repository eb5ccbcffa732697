"""Augmentation of training images.

``crop-flip``: a random crop of the original size after padding with 4 black pixels, and a horizontal flip with
probability 1/2 (the runs of Acar et al., ICML 2021, on CIFAR).

Shapes: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fleet_core.base.errors import ConfigError

Array = np.ndarray[Any, Any]
PADDING = 4


def places(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Array, Array] | None:
    """Of samples [N, *shape] that ``kind`` augments, the rows [N, H] and columns [N, W] of the padded image that each
    takes; None if it takes none. Raises ConfigError for samples that are not images."""
    if kind == "none" or not shape[0]:
        return None
    if len(shape) != 4:
        raise ConfigError(f"augment '{kind}' is for images", expected="samples [C, H, W]", hint='augment = "none"')
    n, _, height, width = shape
    corner = rng.integers(0, 2 * PADDING + 1, size=(2, n, 1))
    rows, columns = corner[0] + np.arange(height), corner[1] + np.arange(width)
    return rows, np.where(rng.random((n, 1)) < 0.5, columns[:, ::-1], columns)


def augmented(kind: str, x: Array, rng: np.random.Generator) -> Array:
    """Augments raw samples [N, *shape] by ``kind``; ``none`` returns them as they are. Raises ConfigError."""
    place = places(kind, x.shape, rng)
    if place is None:
        return x
    rows_NH, columns_NW = place
    around = np.pad(x, [(0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)])
    number = np.arange(len(x))[:, None, None]
    return np.ascontiguousarray(around[number, :, rows_NH[:, :, None], columns_NW[:, None, :]].transpose(0, 3, 1, 2))
