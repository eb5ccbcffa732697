"""Atomic file writes (temporary file, fsync, rename), and named arrays on disk as safetensors.

The safetensors library takes more memory than many models, so it is imported when first used; a process that only
answers reads arrays with ``map_file`` and never loads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import mmap
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
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
    """Writes ``data`` to ``path`` atomically, with permission bits ``mode``. Raises StateError.

    durable: also survives a power cut. False only for files that can be made again and are checked when read.
    """
    write_parts(path, (data,), mode=mode, durable=durable)


def write_arrays(
    path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None, *, mode: int = 0o644,
    durable: bool = True, before_move: bool = False,
) -> None:
    """Writes named arrays as safetensors, as ``write_atomic(path, pack(arrays, metadata))`` but without a copy."""
    largest_first = sorted(arrays, key=lambda name: (-np.asarray(arrays[name]).itemsize, name))
    ordered = {name: np.asarray(arrays[name], order="C") for name in largest_first}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, array in ordered.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # aligns the arrays to eight bytes
    parts = (array.reshape(-1).view(np.uint8).data for array in ordered.values() if array.nbytes)
    head = len(text).to_bytes(8, "little")
    write_parts(path, (head, text, *parts), mode=mode, durable=durable, before_move=before_move)


def write_parts(
    path: Path, parts: Iterable[bytes | memoryview], *, mode: int = 0o644, durable: bool = True,
    before_move: bool = False,
) -> None:
    """Writes the concatenated ``parts`` to ``path``, as ``write_atomic`` does.

    before_move: until the caller renames the file with ``move``, which syncs the folder, a power cut may remove it.
    """
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
        if durable and not before_move:
            sync(path.parent)
    except OSError as error:
        raise StateError(
            f"cannot be written: {error.strerror or error}", where=str(path), hint="check free space and permissions"
        ) from error


def move(path: Path, to: Path) -> None:
    """Renames a file within its folder, atomically and durably. Raises StateError."""
    try:
        os.replace(path, to)
        sync(to.parent)
    except OSError as error:
        raise StateError(f"cannot be written: {error.strerror or error}", where=str(to)) from error


def write_json(path: Path, value: Any, *, mode: int = 0o644, durable: bool = True) -> None:
    """Writes ``value`` to ``path`` as ``write_atomic`` does, as indented JSON. Raises StateError."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    write_atomic(path, text.encode(), mode=mode, durable=durable)


def check_free_space(folder: Path, like: str) -> None:
    """Checks that the disk has room, by writing and deleting a file: of the size of the largest one that matches
    ``like`` below ``folder``, plus 2 MiB. Raises StateError with the cause of the failed write."""
    largest = max((path.stat().st_size for path in folder.rglob(like)), default=0)
    blocks, probe = (largest >> 20) + 2, folder / ".probe"
    try:
        write_parts(probe, itertools.repeat(bytes(1 << 20), blocks))
    except StateError as error:
        hint = f"{blocks} MiB must be free and writable"
        raise StateError(error.what, where=str(folder), hint=hint) from error.__cause__
    probe.unlink()


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Makes the folder and holds the lock of its file ``.lock``, which is not reentrant. wait: for another process to
    release the lock. Raises StateError if the file cannot be opened, BlockingIOError without ``wait``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateError(f"cannot be written: {error.strerror or error}", where=str(folder)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def is_disk_error(error: BaseException) -> bool:
    """Whether the disk caused the error (full, read-only, broken, removed), so that a later attempt may succeed."""
    return isinstance(error.__cause__ if isinstance(error, StateError) else error, OSError)


def read_bytes(path: Path, *, limit: int) -> bytes:
    """The file's bytes. Raises StateError when it cannot be read or is larger than ``limit`` bytes."""
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
            raise StateError(f"array '{key[:80]}' has no group in its name", expected="group/name")
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
    """Named numpy arrays and text metadata as safetensors bytes."""
    from safetensors.numpy import save

    return save({k: np.asarray(v, order="C") for k, v in arrays.items()}, metadata=dict(metadata or {}) or None)


def unpack(data: bytes, *, where: str = "safetensors") -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """(arrays, metadata) of safetensors bytes. Raises StateError when they are not safetensors."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"is not safetensors: {error}", where=where) from error
    return arrays, header.get("__metadata__") or {}


def map_file(path: Path, *, limit: int) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """(arrays, metadata) of a safetensors file, memory-mapped: the arrays are read-only, and their pages take memory on
    first access. The arrays keep their values when the file is replaced by a rename.

    Raises StateError for a file that cannot be read, is larger than ``limit`` bytes or is not safetensors.
    """
    _check_readable(path, limit)
    try:
        with path.open("rb") as file:
            return _views(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise StateError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise StateError(f"is not safetensors: {error}", where=str(path)) from error


def _check_readable(path: Path, limit: int) -> None:
    """Reads the file once, so that a broken disk raises StateError here and not SIGBUS at a later page access."""
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
    """(arrays, metadata) as views of the file's pages. Raises ValueError, KeyError, TypeError … for other formats."""
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
            raise ValueError(f"{name[:80]} has wrong offsets, {first} to {last}")
        flat = np.frombuffer(pages, dtype, math.prod(shape), 8 + size + first) if last > first else np.empty(0, dtype)
        arrays[name], end = flat.reshape(shape), last
    if 8 + size + end != len(pages):
        raise ValueError("its length does not match its header")
    return arrays, metadata


def read_header(path: Path) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """({name: (offset, bytes) in the file}, metadata) of a safetensors file; the arrays are not read. Raises StateError
    for another file."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise StateError(f"a header of {size} bytes", where=str(path), expected=f"at most {MAX_HEADER_BYTES}")
            header = json.loads(file.read(size))
        metadata = header.pop("__metadata__", None) or {}
        places = {name: entry["data_offsets"] for name, entry in header.items()}
        if path.stat().st_size != 8 + size + max((int(end) for _, end in places.values()), default=0):
            raise StateError("is truncated or has extra bytes", where=str(path))
        return {name: (8 + size + int(a), int(b) - int(a)) for name, (a, b) in places.items()}, metadata
    except OSError as error:
        raise StateError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"is not safetensors: {error}", where=str(path)) from error


def sync(path: Path) -> None:
    """Flushes a file or folder to disk (fsync), so that it survives a power cut. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
