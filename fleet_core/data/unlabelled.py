"""Loads samples to be answered, which need no labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data import model_input
from fleet_core.data.prepare import prepared, takes
from fleet_core.data.samples import LIMIT_BYTES
from fleet_core.model.layout import InputSpec

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
FORMS = (
    "a .npy array, a .npz with x, a .csv, a .ndjson, an image, a .wav file, or a folder of either; labels are ignored"
)


def load(
    path: Path, spec: InputSpec, *, stride: int | None = None, limit_bytes: int = LIMIT_BYTES,
    say: Callable[[str], None] = lambda text: None, outputs: Sequence[str] | None = None,
) -> NDArray[Any]:  # fmt: skip
    """Loads raw samples [n, *spec.shape] of spec.dtype from a file or folder; a .npy may also hold a single sample.
    Grey images are converted to colour if the model takes colours. Images of another size and sound are prepared as
    ``spec`` says.

    stride: readings between the starts of two windows of a table; None: as ``spec`` says. say: called with notes about
    how the file was read. outputs: columns of targets, ignored as labels are. Raises DataError for samples that do not
    fit.
    """
    x = _read(path, spec, stride or spec.stride or None, limit_bytes, say, outputs)
    if x.shape == tuple(spec.shape) or takes(x.shape, spec):
        x = x[None]
    x = prepared(x, spec, str(path))
    model_input.check_shape(x, spec.shape, str(path))
    if x.dtype.kind not in "biuf" or not np.isfinite(x).all():
        raise DataError("has a value that is not a finite number", where=str(path), expected=f"{spec.dtype} values")
    if x.dtype == np.uint8:
        _check_bytes(path, spec)
    with np.errstate(all="ignore"):
        wanted = x.astype(spec.dtype)
    if not np.isfinite(wanted).all() or (wanted.dtype.kind in "iu" and not np.array_equal(wanted, x)):
        raise DataError(f"has {x.dtype} values that {spec.dtype} cannot represent", where=str(path))
    return wanted


def _read(
    path: Path, spec: InputSpec, stride: int | None, limit_bytes: int, say: Callable[[str], None],
    outputs: Sequence[str] | None,
) -> NDArray[Any]:
    kind = path.suffix.lower()
    if kind == ".npy":
        return _array(path)
    from fleet_core.data import readers  # takes memory, and most questions are arrays

    if (path.is_dir() or (kind == ".wav" and path.exists())) and readers.is_sound(path):
        return _sound(path, spec, stride, limit_bytes, say)
    if path.is_dir() or (kind in IMAGES and path.exists()):
        _check_bytes(path, spec)
        return readers.read_unsorted(path, limit_bytes, readers.Cut(tuple(spec.shape), fit=spec.fit))
    cut = readers.Cut(spec.shape, stride=stride, outputs=None if outputs is None else tuple(outputs))
    raw = readers.read(path, limit_bytes, cut, expected=FORMS, labelled=False)
    for note in raw.notes:
        say(note)
    return raw.x


def _sound(
    path: Path, spec: InputSpec, stride: int | None, limit_bytes: int, say: Callable[[str], None]
) -> NDArray[Any]:
    from fleet_core.data import readers

    if not spec.sound_hz:
        raise DataError("is sound, from which this fleet does not learn", where=str(path),
                        expected=f"samples {list(spec.shape)}")
    cut = readers.Cut(tuple(spec.shape), stride=stride, rate_hz=spec.sound_hz)
    raw = readers.read_sounds(path, limit_bytes, cut, labelled=False)
    for note in raw.notes:
        say(note)
    return raw.x


def _check_bytes(path: Path, spec: InputSpec) -> None:
    """Raises DataError for bytes when the model takes floats."""
    hint = model_input.bytes_hint("uint8", spec.dtype)
    if hint:
        raise DataError(f"has bytes, and the model takes {spec.dtype}", where=str(path), hint=hint)


def _array(path: Path) -> NDArray[Any]:
    try:
        return np.array(np.load(path, allow_pickle=False, mmap_mode="r"))
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot be read: {reason}", where=str(path), expected="a .npy array of numbers") from error
