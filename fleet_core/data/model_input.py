"""A model's input: defaults for raw samples, and checks with hints how to convert samples that do not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fleet_core.base.errors import DataError
from fleet_core.model.layout import InputSpec

TOKENS = frozenset({"char-lstm"})
"""Named models that take int64 tokens; the others take numbers."""

MAX_CHANNELS = 256  # more channels are not standardized, as means and deviations are written to a file
COLOURS = (1, 3, 4)
LIM_PIXELS = 7  # the smallest side of an image for lenet-lim
FAR = 10.0  # values farther from 0 should be standardized: initial weights and usual rates are for values near 1


def models_for(shape: Sequence[int], dtype: str) -> tuple[str, ...]:
    """Named models for samples of this shape and dtype: the default first, then others that are worth a trial
    (``benchmarks/own_data``)."""
    if dtype == "int64":
        return ("char-lstm",)
    if len(shape) == 2:
        return "ds-cnn", "cnn1d", "mlp"
    if len(shape) == 3:
        return ("ds-cnn", "lenet-lim") if min(shape[1:]) >= LIM_PIXELS else ("ds-cnn", "mlp")
    return "mlp", "logistic"


def default_model(shape: Sequence[int], dtype: str) -> str:
    """The first of ``models_for``."""
    return models_for(shape, dtype)[0]


def plain(x: np.ndarray[Any, Any]) -> InputSpec:
    """The input of a model that takes samples x [N, ...] unchanged; bytes are scaled to 0…1."""
    return InputSpec(x.shape[1:], x.dtype.name, 1 / 255 if x.dtype == np.uint8 else 1.0)


def standardized(x: np.ndarray[Any, Any], fit: str = "refuse", sound_hz: int = 0) -> InputSpec:
    """The input of a model that standardizes each channel of samples x [N, ...]. Bytes, tokens and samples with more
    than ``MAX_CHANNELS`` channels are as in ``plain``. fit, sound_hz: as in ``InputSpec``."""
    spec = replace(plain(x), fit=fit, sound_hz=sound_hz)
    if x.dtype != np.float32 or x.shape[1] > MAX_CHANNELS:
        return spec
    rows = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1).astype(np.float64)
    mean, deviation = rows.mean(1), rows.std(1)
    varies = deviation > 1e-6 * np.abs(mean)
    return replace(spec, mean=_nine_digits(mean), std=_nine_digits(np.where(varies, deviation, 1.0)))


def _nine_digits(values: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """Readable in a file, and still more digits than float32 has."""
    return tuple(float(f"{value:.9g}") for value in values)


def remarks(x: np.ndarray[Any, Any]) -> list[str]:
    """How samples x [N, ...] are interpreted, when the user may have meant something else."""
    shape = x.shape[1:]
    turned = "channels come first, [N, channels, …]; if yours come last, convert with np.moveaxis(x, -1, 1)"
    if channels_last(shape):
        return [f"x is read as images of {shape[0]} channels, {shape[1]} by {shape[2]} pixels: {turned}"]
    if len(shape) == 2 and shape[0] > shape[1]:
        return [f"x is read as series of {shape[0]} channels and {shape[1]} steps: {turned}"]
    if x.dtype == np.int64:
        return ["x is read as text, because its whole numbers are all below the number of classes; if they are "
                "readings, save them as float32"]
    return []


def channels_last(shape: Sequence[int]) -> bool:
    """Whether samples of this shape look like images with the colour axis last."""
    return len(shape) == 3 and shape[2] in COLOURS and shape[0] not in COLOURS


def unscaled(x: np.ndarray[Any, Any], spec: InputSpec) -> list[str]:
    """A remark when a model gets readings x [N, ...] on a scale on which it hardly learns."""
    if x.dtype != np.float32 or spec.mean or spec.std:
        return []
    mean, deviation = float(x.mean(dtype=np.float64)), float(x.std(dtype=np.float64))
    if max(abs(mean), deviation) * spec.scale <= FAR:
        return []
    return [f"the samples are not standardized, {mean:.4g} ± {deviation:.4g}: give data.mean and data.std, as "
            "'metafleet init' writes them for a fleet, or data.standardize"]


# Samples that do not fit ----------------------------------------------------------------------------------------------

BYTES = "give the values on the scale that the fleet learned from, as floats: x.astype(np.float32)"


def check(x: np.ndarray[Any, Any], spec: InputSpec, where: str | None = None) -> None:
    """Raises DataError, with a hint how to convert x, unless x is one or more samples [n, *shape] of the dtype."""
    check_shape(x, spec.shape, where)
    if x.dtype != spec.dtype:
        raise DataError(f"has {x.dtype} values, and the model takes {spec.dtype}", where=where,
                        hint=bytes_hint(x.dtype.name, spec.dtype))


def check_shape(x: np.ndarray[Any, Any], shape: Sequence[int], where: str | None = None) -> None:
    """Like ``check``, for any dtype."""
    if not len(x) or x.shape[1:] != tuple(shape):
        raise DataError(f"has shape {list(x.shape)}", where=where, expected=f"[n, {', '.join(map(str, shape))}]",
                        hint=conversion(x.shape, shape))


def hint(x: np.ndarray[Any, Any], spec: InputSpec) -> str | None:
    """How to convert an array x to samples of the model's input; None when it fits or the way is unknown."""
    return conversion(x.shape, spec.shape) or bytes_hint(x.dtype.name, spec.dtype)


def bytes_hint(found: str, wanted: str) -> str | None:
    """What to do with bytes when the model takes floats, because the scale of the bytes is unknown."""
    return BYTES if (found, wanted) == ("uint8", "float32") else None


def conversion(found: Sequence[int], wanted: Sequence[int]) -> str | None:
    """How to convert an array x of shape ``found`` to samples [n, *wanted]; None when it fits or the way is unknown."""
    found, wanted = tuple(found), tuple(wanted)
    if found[1:] == wanted or not wanted:
        return None
    size, sizes = math.prod(wanted), ", ".join(map(str, wanted))
    if found == wanted:
        return "one sample is a batch of one: x[None]"
    turned = (*wanted[1:], wanted[0])
    if found[1:] == turned:
        return "channels come first: np.moveaxis(x, -1, 1)"
    if found == turned:
        return "channels come first, and one sample is a batch of one: np.moveaxis(x, -1, 0)[None]"
    flat = len(found) < 3 and size and len(wanted) > 1 and found and found[-1] == size
    if flat and len(wanted) == 2:
        return (f"x.reshape(-1, {sizes}), if a row has one channel after the other; in a .csv, columns of windows: "
                f"a_0 … a_{wanted[1] - 1} for each of {wanted[0]} channels")
    if flat or [n for n in found[1:] if n != 1] == [n for n in wanted if n != 1]:
        return f"x.reshape(-1, {sizes})"
    if len(wanted) == 1 and math.prod(found[1:]) == size:
        return f"x.reshape(-1, {sizes})"
    if len(found) == 3 and len(wanted) == 2 and found[1] == wanted[0]:
        return f"windows of {wanted[1]} steps, not {found[2]}: cut them again, for example from a .csv of readings"
    if len(found) == 2 and len(wanted) == 2 and wanted[0] in found:
        return (f"readings are cut into windows of {wanted[1]}: write them as a .csv with one column for each of "
                f"{wanted[0]} channels")
    return None
