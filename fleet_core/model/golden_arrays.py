"""Golden arrays as an ``.npz`` without compression, so that reading takes no more memory than the file has bytes."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from fleet_core.base.errors import BundleError

MAX_ARRAYS = 16
DTYPES = ("float32", "uint8", "int64")


def pack(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """Named arrays as ``.npz`` bytes; equal arrays give equal bytes."""
    buffer = io.BytesIO()
    ordered: dict[str, Any] = {name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}
    np.savez(buffer, **ordered)
    return buffer.getvalue()


def unpack(data: bytes, where: str) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of ``.npz`` bytes. Raises BundleError unless they are at most ``MAX_ARRAYS`` arrays of ``DTYPES``,
    without compression."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            if not stored or len(entries) > MAX_ARRAYS or sum(entry.file_size for entry in entries) > len(data):
                expected = f"at most {MAX_ARRAYS}, not compressed"
                raise BundleError(f"holds {len(entries)} entries", where=where, expected=expected)
            return {entry.filename.removesuffix(".npy"): _array(archive.read(entry), where) for entry in entries}
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, RuntimeError, OverflowError, struct.error) as error:
        raise BundleError(f"is not an .npz file: {error}", where=where) from error


def _array(data: bytes, where: str) -> np.ndarray[Any, Any]:
    """The array in the bytes of a ``.npy`` file of version 1."""
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise BundleError("holds an array in a version of .npy other than 1.0", where=where)
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    values = data[file.tell() :]
    if str(dtype) not in DTYPES or fortran_order or min(shape, default=1) < 0:
        raise BundleError(f"holds an array {dtype} {list(shape)}", where=where, expected=", ".join(DTYPES))
    return np.frombuffer(values, dtype).reshape(shape)
