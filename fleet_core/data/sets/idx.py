"""MNIST with its writers and Fashion-MNIST, from idx files.

MNIST: LeCun, Cortes, Burges. Writers: Yadav and Bottou, "Cold Case: The Lost MNIST Digits" (NeurIPS 2019): the labels
of QMNIST are in MNIST's order, eight int32 per digit; column 0 is the class and column 2 the NIST writer; the first
10,000 of its test part are MNIST's. Fashion-MNIST: Xiao, Rasul, Vollgraf 2017, in the same format.

The writers of the train and the test part are different people. A client is a writer's NIST number, four digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.samples import Samples
from fleet_core.data.sets.archives import gunzip

TYPES: dict[int, np.dtype[Any]] = {0x08: np.dtype(np.uint8), 0x0C: np.dtype(">i4")}
LIMIT_BYTES = 64 << 20
DIGITS = tuple("0123456789")
ARTICLES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CLASS, WRITER, COLUMNS = 0, 2, 8
MAX_WRITER = 9999


def parse_idx(data: bytes, where: str) -> NDArray[Any]:
    """Parses an idx file of uint8 or big-endian int32. Raises DataError."""
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in TYPES or not 1 <= data[3] <= 4:
        raise DataError("is not an idx file of bytes or integers", where=where, expected="00 00, 08 or 0c, 1 to 4 axes")
    dtype, axes = TYPES[data[2]], data[3]
    start = 4 + 4 * axes
    if len(data) < start:
        raise DataError("has a truncated header", where=where)
    shape = tuple(int.from_bytes(data[4 + 4 * k : 8 + 4 * k], "big") for k in range(axes))
    size_bytes = math.prod(shape) * dtype.itemsize
    if len(data) - start != size_bytes:
        raise DataError(f"claims shape {shape} and has {len(data) - start} bytes", where=where,
                        expected=f"{size_bytes} bytes")
    array: NDArray[Any] = np.frombuffer(data, dtype, offset=start).reshape(shape)
    return array if array.dtype == np.uint8 else array.astype(np.int64)


def mnist(files: Mapping[str, Path]) -> tuple[Samples, Samples]:
    """x uint8 [N, 1, 28, 28], y int64 [N], client: the writer."""
    train, test = _parts(files, DIGITS)
    return (_with_writers(train, files["qmnist-train-labels-idx2-int.gz"]),
            _with_writers(test, files["qmnist-test-labels-idx2-int.gz"]))


def fashion_mnist(files: Mapping[str, Path]) -> tuple[Samples, Samples]:
    """x uint8 [N, 1, 28, 28], y int64 [N]."""
    return _parts(files, ARTICLES)


def _parts(files: Mapping[str, Path], classes: tuple[str, ...]) -> tuple[Samples, Samples]:
    return _part(files, "train", classes), _part(files, "t10k", classes)


def _part(files: Mapping[str, Path], part: str, classes: tuple[str, ...]) -> Samples:
    images, labels = (files[f"{part}-{kind}-ubyte.gz"] for kind in ("images-idx3", "labels-idx1"))
    x = parse_idx(gunzip(images, LIMIT_BYTES), str(images))
    y = parse_idx(gunzip(labels, LIMIT_BYTES), str(labels))
    if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
        raise DataError(f"images {x.shape} and labels {y.shape} do not belong together", where=str(images))
    return Samples(x[:, None], y.astype(np.int64), classes=classes)


def _with_writers(samples: Samples, path: Path) -> Samples:
    labels = parse_idx(gunzip(path, LIMIT_BYTES), str(path))
    if labels.ndim != 2 or labels.shape[1] != COLUMNS or len(labels) < len(samples):
        raise DataError(f"has shape {labels.shape}", where=str(path), expected=f"[{len(samples)} or more, {COLUMNS}]")
    labels = labels[: len(samples)]
    if not np.array_equal(labels[:, CLASS], samples.y):
        raise DataError("has the labels of other digits", where=str(path), expected="MNIST's classes in its order")
    writer = labels[:, WRITER]
    if writer.min() < 0 or writer.max() > MAX_WRITER:
        raise DataError("has a writer out of range", where=str(path), expected=f"0 to {MAX_WRITER}")
    return Samples(samples.x, samples.y, np.char.zfill(writer.astype(np.str_), 4), classes=samples.classes)
