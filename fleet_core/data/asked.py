"""Samples that are asked about: they need no labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.data.samples import LIMIT_BYTES
from fleet_core.errors import DataError
from fleet_core.layout import InputSpec

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
FORMS = "a .npy array, a .npz with x, a .csv, an image or a folder of images; labels are passed over"


def load(path: Path, spec: InputSpec, *, limit_bytes: int = LIMIT_BYTES) -> NDArray[Any]:
    """Raw samples [n, *spec.shape] of spec.dtype: all of a file or folder, or the single one that a .npy has. Grey
    images are of equal colours where the model takes colours. Raises DataError for anything that is not that."""
    x = _read(path, spec, limit_bytes)
    if x.shape == tuple(spec.shape):
        x = x[None]
    if x.shape[1:] != tuple(spec.shape) or not len(x):
        expected = f"[n, {', '.join(map(str, spec.shape))}]"
        raise DataError(f"has shape {list(x.shape)}", where=str(path), expected=expected)
    if x.dtype.kind not in "biuf" or not np.isfinite(x).all():
        raise DataError("holds what is no finite number", where=str(path), expected=f"{spec.dtype} values")
    with np.errstate(all="ignore"):
        wanted = x.astype(spec.dtype)
    if not np.isfinite(wanted).all() or (wanted.dtype.kind in "iu" and not np.array_equal(wanted, x)):
        raise DataError(f"holds {x.dtype} values that are no {spec.dtype}", where=str(path))
    return wanted


def _read(path: Path, spec: InputSpec, limit_bytes: int) -> NDArray[Any]:
    kind = path.suffix.lower()
    if kind == ".npy":
        return _array(path)
    from fleet_core.data import readers  # most questions are arrays, and small devices answer them

    if not path.exists():
        raise DataError("does not exist", where=str(path), expected=FORMS)
    if path.is_dir() or kind in IMAGES:
        _check_bytes(path, spec)
        x = readers.read_unsorted(path, limit_bytes)
        return np.repeat(x, spec.shape[0], axis=1) if x.shape[1] == 1 and len(spec.shape) == 3 else x
    if kind == ".npz":
        return readers.read_npz(path, limit_bytes, labelled=False).x
    if kind == ".csv":
        return readers.read_csv(path, limit_bytes, labelled=False).x
    raise DataError(f"has an unknown form '{path.suffix}'", where=str(path), expected=FORMS)


def _check_bytes(path: Path, spec: InputSpec) -> None:
    """Raises DataError for images where the model takes no bytes."""
    if spec.dtype != "uint8":
        raise DataError(f"has bytes, and the model takes {spec.dtype}", where=str(path),
                        hint="a .npy array with the values that this fleet learns from")


def _array(path: Path) -> NDArray[Any]:
    try:
        return np.array(np.load(path, allow_pickle=False, mmap_mode="r"))
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot be read: {reason}", where=str(path), expected="a .npy array of numbers") from error
