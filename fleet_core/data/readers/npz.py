"""Reads samples from a .npz file of numpy, without unpickling."""

from __future__ import annotations

import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base import schema
from fleet_core.base.errors import DataError
from fleet_core.data.readers.raw import Raw, bound, row_number

UNLABELLED = "a fleet that learns without labels detects anomalies: metafleet init --task anomaly"
ARRAYS = ("x", "y", "client", "time", "classes", "outputs")


def read_npz(path: Path, limit_bytes: int, *, labelled: bool = True, labels: bool = False) -> Raw:
    """Reads the arrays x, y and, if present, client, time, classes and outputs; others are ignored. labelled: False
    allows y to be absent. labels: the array ``labels`` may stand for outputs.

    Raises DataError for other files, object arrays, and arrays of more than ``limit_bytes`` unpacked.
    """
    needed = ("x", "y") if labelled else ("x",)
    with _opened(path, needed, (*ARRAYS, "labels") if labels else ARRAYS, limit_bytes) as (archive, wanted):
        arrays = {name: _read_member(archive, info, f"{path}: {name}") for name, info in wanted.items()}
    y = arrays.get("y", np.empty(0, np.int64))
    outputs = tuple(map(str, arrays.get("labels", arrays.get("outputs", np.empty(0))).ravel()))
    return Raw(arrays["x"], y, arrays.get("client"), arrays.get("time"), arrays.get("classes"), row_number,
               outputs=outputs)


def rows_and_classes(path: Path, limit_bytes: int) -> tuple[int, NDArray[Any] | None]:
    """The number of samples, and the array ``classes`` if there is one, without reading the samples. Raises DataError
    as ``read_npz`` does."""
    with _opened(path, ("y",), ("y", "classes"), limit_bytes) as (archive, wanted):
        shape, _ = _member_header(archive, wanted["y"], f"{path}: y")
        classes = wanted.get("classes")
        found = None if classes is None else _read_member(archive, classes, f"{path}: classes")
    return shape[0] if shape else 0, found


@contextmanager
def _opened(
    path: Path, needed: tuple[str, ...], names: tuple[str, ...], limit_bytes: int
) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """The archive, and those of ``names`` that it has, which must include ``needed``."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            _require(members, path, needed)
            wanted = {name: members[name] for name in names if name in members}
            bound(sum(info.file_size for info in wanted.values()), limit_bytes, path)
            _known_compression(wanted, path)
            yield archive, wanted
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error, struct.error) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), expected="a .npz file of numpy.savez") from error


def _require(members: dict[str, zipfile.ZipInfo], path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if name not in members:
            found = ", ".join(list(members)[:20]) or "none"
            raise DataError(
                f"has no array '{name}'{schema.did_you_mean(name, members)}",
                where=str(path),
                expected=f"{'arrays x [N, ...] and y [N]' if 'y' in names else 'an array x [N, ...]'}, found {found}",
                hint=UNLABELLED if name == "y" else None,
            )


def _known_compression(members: dict[str, zipfile.ZipInfo], path: Path) -> None:
    for name, info in members.items():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
            raise DataError("is encrypted, or compressed in a way that numpy does not use", where=f"{path}: {name}")


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> NDArray[Any]:
    _member_header(archive, info, where)
    try:
        with archive.open(info) as member:
            return np.asarray(np.lib.format.read_array(member, allow_pickle=False))
    except (ValueError, SyntaxError, TypeError, tokenize.TokenError, RecursionError) as error:
        raise DataError(f"is not an array: {error}", where=where) from error


def _member_header(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> tuple[tuple[int, ...], Any]:
    """(shape, dtype) of an array. Checks that its header does not claim more bytes than the member has, because numpy
    allocates what the header says."""
    try:
        with archive.open(info) as member:
            shape, dtype = _header(member)
    except (ValueError, SyntaxError, TypeError, tokenize.TokenError, RecursionError) as error:
        raise DataError(f"is not an array: {error}", where=where) from error
    if dtype.hasobject or dtype.fields is not None:
        raise DataError("holds Python objects or records", where=where, expected="numbers or text")
    if dtype.itemsize == 0:
        raise DataError("has only empty text", where=where)
    if math.prod(shape) * dtype.itemsize > info.file_size:
        raise DataError(f"claims shape {shape}, more than the file has", where=where)
    return shape, dtype


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"npy version {version}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(member)
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape {shape}")
    return shape, dtype
