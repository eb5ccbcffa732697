"""Files that are whole or absent: temporary name, fsync, rename; and named arrays on disk as safetensors."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fleet_core.algorithms.trees import Params
from fleet_core.errors import StateError


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """``data`` at ``path``, whole or not at all, with permission bits ``mode``. Raises StateError.

    durable: survives a power cut as well as the death of the process; leave it out only for what can be had again and
    is checked when it is read.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
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
            _sync_folder(path.parent)
    except OSError as error:
        raise StateError(
            f"cannot be written: {error.strerror or error}", where=str(path), hint="check free space and permissions"
        ) from error


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """``value`` as indented JSON at ``path``, whole or not at all."""
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode(), mode=mode)


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
    return save({k: np.asarray(v, order="C") for k, v in arrays.items()}, metadata=dict(metadata or {}) or None)


def unpack(data: bytes, *, where: str = "safetensors") -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """(arrays, metadata) of safetensors bytes. Raises StateError for anything else."""
    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(f"is no safetensors: {error}", where=where) from error
    return arrays, header.get("__metadata__") or {}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
