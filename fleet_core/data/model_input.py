"""How raw samples become a model's input, where nobody has said it, and what to do with those that do not fit it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fleet_core.base.errors import DataError
from fleet_core.model.layout import InputSpec

if TYPE_CHECKING:
    from fleet_core.data.samples import Samples

MAX_CHANNELS = 256  # whose mean and deviation are written out
COLOURS = (1, 3, 4)
LIM_PIXELS = 7  # on each side, of the least image that lenet-lim takes
FAR = 10.0  # from 0, of what a model takes as it is: initial weights and usual rates are for values near 1


def models_for(shape: Sequence[int], dtype: str) -> tuple[str, ...]:
    """The named models to take for samples of this shape and dtype, where nobody has named one: the first is the
    default, the others are worth a trial (``benchmarks/own_data``)."""
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
    if channels_last(shape):
        return [f"x is read as images of {shape[0]} channels, {shape[1]} by {shape[2]} pixels: {turned}"]
    if len(shape) == 2 and shape[0] > shape[1]:
        return [f"x is read as series of {shape[0]} channels and {shape[1]} steps: {turned}"]
    if x.dtype == np.int64:
        return ["x is read as text, for its whole numbers are all below the number of classes; if they are readings, "
                "save them as float32"]
    return []


def channels_last(shape: Sequence[int]) -> bool:
    """Whether samples of this shape look like images whose colours come last."""
    return len(shape) == 3 and shape[2] in COLOURS and shape[0] not in COLOURS


def unscaled(samples: Samples, spec: InputSpec) -> list[str]:
    """What to say where a model gets readings on a scale on which it hardly learns."""
    if samples.x.dtype != np.float32 or spec.mean or spec.std:
        return []
    mean, deviation = float(samples.x.mean(dtype=np.float64)), float(samples.x.std(dtype=np.float64))
    if max(abs(mean), deviation) * spec.scale <= FAR:
        return []
    return [f"the samples are taken as they are, {mean:.4g} ± {deviation:.4g}: give data.mean and data.std, as "
            "'metafleet init' writes them for a fleet, or data.standardize"]


# Samples that do not fit ----------------------------------------------------------------------------------------------

BYTES = "give the values on the scale that the fleet learned from, as floats: x.astype(np.float32)"


def check(x: np.ndarray[Any, Any], spec: InputSpec, where: str | None = None) -> None:
    """Raises DataError, with the way to convert them, where x is not one or more samples [n, *shape] of the dtype."""
    check_shape(x, spec.shape, where)
    if x.dtype != spec.dtype:
        raise DataError(f"has {x.dtype} values, and the model takes {spec.dtype}", where=where,
                        hint=bytes_hint(x.dtype.name, spec.dtype))


def check_shape(x: np.ndarray[Any, Any], shape: Sequence[int], where: str | None = None) -> None:
    """As ``check``, whatever the dtype."""
    if not len(x) or x.shape[1:] != tuple(shape):
        raise DataError(f"has shape {list(x.shape)}", where=where, expected=f"[n, {', '.join(map(str, shape))}]",
                        hint=conversion(x.shape, shape))


def hint(x: np.ndarray[Any, Any], spec: InputSpec) -> str | None:
    """How an array x becomes samples of the model's input; None where it is, or nobody can tell."""
    return conversion(x.shape, spec.shape) or bytes_hint(x.dtype.name, spec.dtype)


def bytes_hint(found: str, wanted: str) -> str | None:
    """What to do with bytes where the model takes floats: nobody knows on what scale they are."""
    return BYTES if (found, wanted) == ("uint8", "float32") else None


def conversion(found: Sequence[int], wanted: Sequence[int]) -> str | None:
    """How an array x of the shape ``found`` becomes samples [n, *wanted]; None where it fits or nobody can tell."""
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
        return (f"x.reshape(-1, {sizes}), where a row has one channel after the other; in a .csv, columns of windows: "
                f"a_0 … a_{wanted[1] - 1} for each of {wanted[0]} channels")
    if flat or [n for n in found[1:] if n != 1] == [n for n in wanted if n != 1]:
        return f"x.reshape(-1, {sizes})"
    if len(wanted) == 1 and math.prod(found[1:]) == size:
        return f"x.reshape(-1, {sizes})"
    if len(found) == 3 and len(wanted) == 2 and found[1] == wanted[0]:
        return f"windows of {wanted[1]} steps, not {found[2]}: cut them anew, as from a .csv of readings"
    if len(found) == 2 and len(wanted) == 2 and wanted[0] in found:
        return (f"readings are cut into windows of {wanted[1]}: write them as a .csv with one column for each of "
                f"{wanted[0]} channels")
    return None
