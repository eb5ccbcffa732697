"""Files that are whole or absent: temporary name, fsync, rename; and named arrays on disk as safetensors.

A process that only answers reads its arrays by ``mapped``: the libraries that write and unpack are imported at their
first use, because together they hold more memory than many a model.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fleet_core.base.errors import StateError
from fleet_core.base.trees import Params

MAX_HEADER_BYTES = 1 << 26
DTYPES = {
    "float64": "F64", "float32": "F32", "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}
_OF_SAFETENSORS = {name: dtype for dtype, name in DTYPES.items()}


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """``data`` at ``path``, whole or not at all, with permission bits ``mode``. Raises StateError.

    durable: survives a power cut as well as the death of the process; leave it out only for what can be had again and
    is checked when it is read.
    """
    write_parts(path, (data,), mode=mode, durable=durable)


def write_arrays(
    path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None, *, mode: int = 0o644,
    durable: bool = True,
) -> None:
    """What ``pack`` makes, at ``path`` as by ``write_atomic``, without a copy of the arrays in memory."""
    ordered = {name: np.asarray(arrays[name], order="C") for name in sorted(arrays, key=lambda n: _rank(arrays[n], n))}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, array in ordered.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # arrays are aligned to eight bytes
    parts = (array.reshape(-1).view(np.uint8).data for array in ordered.values() if array.nbytes)
    write_parts(path, (len(text).to_bytes(8, "little"), text, *parts), mode=mode, durable=durable)


def _rank(array: Any, name: str) -> tuple[int, str]:
    return -np.asarray(array).itemsize, name


def write_parts(path: Path, parts: Iterable[bytes | memoryview], *, mode: int = 0o644, durable: bool = True) -> None:
    """The ``parts`` one after the other, as by ``write_atomic``."""
    import tempfile

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fchmod(file.fileno(), mode)
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if durable:
            sync(path.parent)
    except OSError as error:
        raise StateError(
            f"cannot be written: {error.strerror or error}", where=str(path), hint="check free space and permissions"
        ) from error


def move(path: Path, to: Path) -> None:
    """Renames a durable file within its folder, at once and for good. Raises StateError."""
    try:
        os.replace(path, to)
        sync(to.parent)
    except OSError as error:
        raise StateError(f"cannot be written: {error.strerror or error}", where=str(to)) from error


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """``value`` as indented JSON at ``path``, whole or not at all."""
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode(), mode=mode)


def try_room(folder: Path, like: str) -> None:
    """Writes a file as large as the largest one ``like`` this below ``folder``, and up to 2 MiB more, and deletes it
    again. Raises StateError, caused as the write's was, when that cannot be."""
    largest = max((path.stat().st_size for path in folder.rglob(like)), default=0)
    blocks, probe = (largest >> 20) + 2, folder / ".probe"
    try:
        write_parts(probe, itertools.repeat(bytes(1 << 20), blocks))
    except StateError as error:
        hint = f"{blocks} MiB must be free, and writable"
        raise StateError(error.what, where=str(folder), hint=hint) from error.__cause__
    probe.unlink()


def is_of_the_disk(error: BaseException) -> bool:
    """Whether the disk refused (full, read-only, broken, taken away), so that the same may succeed later."""
    return isinstance(error.__cause__ if isinstance(error, StateError) else error, OSError)


def read_bytes(path: Path, *, limit: int) -> bytes:
    """The file's bytes. Raises StateError when it is absent, unreadable or larger than ``limit`` bytes."""
    try:
        if path.stat().st_size > limit:
            raise StateError(f"{path.stat().st_size} bytes are over the limit of {limit}", where=str(path))
        return path.read_bytes()
    except OSError as error:
        raise StateError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def flatten(params: Params) -> dict[str, Any]:
    """{group: {name: array}} as {"group/name": array}."""
    return {f"{group}/{name}": array for group, named in params.items() for name, array in named.items()}


def unflatten(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The inverse of ``flatten``. Raises StateError for a key without a group."""
    tree: dict[str, dict[str, Any]] = {}
    for key, array in flat.items():
        group, slash, name = key.partition("/")
        if not slash or not name:
            raise StateError(f"array '{key[:80]}' names no group", expected="group/name")
        tree.setdefault(group, {})[name] = array
    return tree


def flatten_roles(state: Mapping[str, Params]) -> dict[str, Any]:
    """{role: {group: {name: array}}} as {"role/group/name": array}."""
    return {f"{role}/{key}": array for role, tree in state.items() for key, array in flatten(tree).items()}


def unflatten_roles(flat: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """The inverse of ``flatten_roles``."""
    roles: dict[str, dict[str, Any]] = {}
    for name, array in flat.items():
        role, _, key = name.partition("/")
        roles.setdefault(role, {})[key] = array
    return {role: unflatten(tree) for role, tree in roles.items()}


def pack(arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Named numpy arrays as safetensors bytes."""
    from safetensors.numpy import save

    return save({k: np.asarray(v, order="C") for k, v in arrays.items()}, metadata=dict(metadata or {}) or None)


def unpack(data: bytes, *, where: str = "safetensors") -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """(arrays, metadata) of safetensors bytes. Raises StateError for anything else."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"is no safetensors: {error}", where=where) from error
    return arrays, header.get("__metadata__") or {}


def mapped(path: Path, *, limit: int) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """(arrays, metadata) of a safetensors file, without a copy: the arrays are read-only views of the file's pages,
    which take memory when they are first looked at. A file that is replaced by a rename stays as it was for them.

    Raises StateError for a file that is absent, cannot be read, is larger than ``limit`` bytes or is no safetensors.
    """
    _check_readable(path, limit)
    try:
        with path.open("rb") as file:
            return _views(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise StateError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise StateError(f"is no safetensors: {error}", where=str(path)) from error


def _check_readable(path: Path, limit: int) -> None:
    """Reads it once: a disk that is broken says so here, where it can be told, and not when a page is looked at."""
    part = bytearray(1 << 16)
    try:
        size = path.stat().st_size
        if size > limit:
            raise StateError(f"{size} bytes are over the limit of {limit}", where=str(path))
        with path.open("rb", buffering=0) as file:
            while file.readinto(part):
                pass
    except OSError as error:
        raise StateError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def _views(pages: mmap.mmap) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """Raises ValueError, KeyError, TypeError … for what is no safetensors."""
    size = int.from_bytes(pages[:8], "little")
    if size > min(len(pages) - 8, MAX_HEADER_BYTES):
        raise ValueError(f"a header of {size} bytes")
    header = json.loads(pages[8 : 8 + size])
    metadata = {str(key): str(value) for key, value in (header.pop("__metadata__", None) or {}).items()}
    arrays, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        dtype, (first, last) = np.dtype(_OF_SAFETENSORS[entry["dtype"]]), entry["data_offsets"]
        shape = [operator.index(side) for side in entry["shape"]]
        if first != end or min(shape, default=0) < 0 or last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name[:80]} lies at {first} to {last}")
        flat = np.frombuffer(pages, dtype, math.prod(shape), 8 + size + first) if last > first else np.empty(0, dtype)
        arrays[name], end = flat.reshape(shape), last
    if 8 + size + end != len(pages):
        raise ValueError("it is cut short, or goes on")
    return arrays, metadata


def head(path: Path) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """({name: (first byte, bytes) in the file}, metadata) of a safetensors file, without its arrays. Raises StateError
    for a file that is none."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise StateError(f"a header of {size} bytes", where=str(path), expected=f"at most {MAX_HEADER_BYTES}")
            header = json.loads(file.read(size))
        metadata = header.pop("__metadata__", None) or {}
        places = {name: entry["data_offsets"] for name, entry in header.items()}
        if path.stat().st_size != 8 + size + max((int(end) for _, end in places.values()), default=0):
            raise StateError("is cut short", where=str(path))
        return {name: (8 + size + int(a), int(b) - int(a)) for name, (a, b) in places.items()}, metadata
    except OSError as error:
        raise StateError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"is no safetensors: {error}", where=str(path)) from error


def sync(path: Path) -> None:
    """What a file holds, or a folder names, survives a power cut from here on. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
