"""How raw samples become a model's input, where nobody has said it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fleet_core.data.samples import Samples
from fleet_core.layout import InputSpec

MAX_CHANNELS = 256  # whose mean and deviation are written out
COLOURS = (1, 3, 4)
FAR = 10.0  # from 0, of what a model takes as it is: initial weights and usual rates are for values near 1


def plain(samples: Samples) -> InputSpec:
    """The samples as they are, bytes from 0 to 1."""
    return InputSpec(samples.x.shape[1:], samples.x.dtype.name, 1 / 255 if samples.x.dtype == np.uint8 else 1.0)


def standardized(samples: Samples) -> InputSpec:
    """Every channel less its mean over the samples, over its standard deviation; bytes and tokens are as in ``plain``,
    and so are samples of over 256 channels."""
    x = samples.x
    if x.dtype != np.float32 or x.shape[1] > MAX_CHANNELS:
        return plain(samples)
    rows = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1).astype(np.float64)
    mean, deviation = rows.mean(1), rows.std(1)
    moves = deviation > 1e-6 * np.abs(mean)
    return replace(plain(samples), mean=_written(mean), std=_written(np.where(moves, deviation, 1.0)))


def _written(values: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """As a person reads them in a file, whatever the unit: nine digits, more than float32 has."""
    return tuple(float(f"{value:.9g}") for value in values)


def remarks(x: np.ndarray[Any, Any]) -> list[str]:
    """What a person may not have meant, of samples x [N, ...]."""
    shape = x.shape[1:]
    turned = "channels come first, [N, channels, …]; where yours come last, np.moveaxis(x, -1, 1) turns them"
    if len(shape) == 3 and shape[2] in COLOURS and shape[0] not in COLOURS:
        return [f"x is read as images of {shape[0]} channels, {shape[1]} by {shape[2]} pixels: {turned}"]
    if len(shape) == 2 and shape[0] > shape[1]:
        return [f"x is read as series of {shape[0]} channels and {shape[1]} steps: {turned}"]
    if x.dtype == np.int64:
        return ["x is read as text, for its whole numbers are all below the number of classes; if they are readings, "
                "save them as float32"]
    return []


def unscaled(samples: Samples, spec: InputSpec) -> list[str]:
    """What to say where a model gets readings on a scale on which it hardly learns."""
    if samples.x.dtype != np.float32 or spec.mean or spec.std:
        return []
    mean, deviation = float(samples.x.mean(dtype=np.float64)), float(samples.x.std(dtype=np.float64))
    if max(abs(mean), deviation) * spec.scale <= FAR:
        return []
    return [f"the samples are taken as they are, {mean:.4g} ± {deviation:.4g}: give data.mean and data.std, as "
            "'metafleet init' writes them for a fleet, or data.standardize"]
