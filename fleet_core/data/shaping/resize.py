"""Brings images to a fleet's size, with the same bits on every machine and from every kind of input.

Each axis is resampled by a triangle filter, widened by the factor by which the axis shrinks: bilinear interpolation if
it grows, a weighted mean of all pixels below the filter if it shrinks. Sums are float64 in a fixed order, without BLAS,
so that they do not depend on the processor. Pillow only decodes files.

n: images. C: channels. H, W: height and width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError

Array = NDArray[Any]

MAX_SIDE = 65_536
"""The longest side of an image that is resized."""
SIZE = r"([1-9][0-9]{0,3})(?:x([1-9][0-9]{0,3}))?"


def size_of(text: str | None, fit: str | None) -> tuple[tuple[int, int] | None, str]:
    """((height, width), fit) of the options ``64`` or ``96x64``, width by height, and ``fit``. Without a size images
    keep theirs; with a size and without ``fit`` they are letterboxed. Raises DataError."""
    if text is None:
        return None, fit or "refuse"
    match = re.fullmatch(SIZE, text)
    if match is None:
        raise DataError(f"'{text[:40]}' is not an image size", expected="pixels, as 64, or width by height, as 96x64")
    return (int(match[2] or match[1]), int(match[1])), fit or "letterbox"


def fitted(x: Array, shape: Sequence[int], fit: str, where: str | None = None) -> Array:
    """Images x [n, C, H, W] at the size of ``shape`` [C, H', W'], in the dtype of x; float64 becomes float32.

    fit: ``stretch`` scales both axes to the size; ``letterbox`` keeps the proportions and fills the borders with zeros;
    ``refuse`` returns x as it is; so do both others if x fits, or is not images of C channels. Raises DataError.
    """
    shape = tuple(shape)
    images = len(shape) == 3 and x.ndim == 4 and x.shape[1] == shape[0] and x.dtype.kind in "uif"
    if fit == "refuse" or not images or x.shape[1:] == shape:
        return x
    if not 0 < min(x.shape[2:]) <= max(x.shape[2:]) <= MAX_SIDE:
        raise DataError(f"has images of {x.shape[3]} by {x.shape[2]} pixels", where=where,
                        expected=f"sides of 1 to {MAX_SIDE} pixels")
    found = np.zeros((len(x), *shape), np.float32 if x.dtype.kind == "f" else x.dtype)
    height, width = shape[1:] if fit == "stretch" else _inside(x.shape[2], x.shape[3], shape[1], shape[2])
    top, left = (shape[1] - height) // 2, (shape[2] - width) // 2
    with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are refused elsewhere
        for number, image in enumerate(x):
            narrow = resampled(resampled(image.astype(np.float32), 2, width), 1, height)
            whole = narrow if x.dtype.kind == "f" else np.rint(narrow)
            found[number, :, top : top + height, left : left + width] = whole
    return found


def _inside(height: int, width: int, most_high: int, most_wide: int) -> tuple[int, int]:
    """The largest (height, width) of the same proportions, rounded, that fits inside."""
    if most_high * width <= most_wide * height:
        return most_high, max(1, (2 * width * most_high + height) // (2 * height))
    return max(1, (2 * height * most_wide + width) // (2 * width)), most_wide


def resampled(x: Array, axis: int, size: int) -> Array:
    """x with ``size`` values along ``axis``; float64, or x itself if it has that size."""
    if x.shape[axis] == size:
        return x
    return summed(x, axis, *taps(x.shape[axis], size, x.shape[axis] / size))


def summed(x: Array, axis: int, places_KS: NDArray[np.int64], weights_KS: NDArray[np.float64]) -> Array:
    """The float64 sums over K of the values of x along ``axis`` at these places, times the weights."""
    along = [1] * x.ndim
    along[axis] = places_KS.shape[1]
    total = np.zeros([along[axis] if k == axis else n for k, n in enumerate(x.shape)])
    for place_S, weight_S in zip(places_KS, weights_KS, strict=True):
        total += np.take(x, place_S, axis) * weight_S.reshape(along)
    return total


def taps(length: int, size: int, factor: float, first: int = 0) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(places, weights) [K, S] of the outputs ``first`` to ``size``, which are ``factor`` of ``length`` inputs apart:
    output s is the sum over K of the input at place times weight. Weights sum to 1."""
    reach = max(1.0, factor)
    centre_S = (np.arange(first, size) + 0.5) * factor - 0.5
    first_S = np.floor(centre_S - reach).astype(np.int64) + 1
    places_KS = first_S + np.arange(math.ceil(2 * reach) + 1)[:, None]
    weights_KS = np.maximum(0.0, 1 - np.abs(places_KS - centre_S) / reach)
    weights_KS[(places_KS < 0) | (places_KS >= length)] = 0
    total_S = np.zeros(weights_KS.shape[1])
    for weight_S in weights_KS:  # numpy's own sum has another order if there is one output
        total_S += weight_S
    return np.clip(places_KS, 0, length - 1), weights_KS / total_S
