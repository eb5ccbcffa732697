"""What a device keeps on its disk: weights, its own training state, what is pending, and the last signed time.

    graph-{id}.safetensors               graphs, layout, golden outputs, as published
    model.safetensors, serve.safetensors the last training model and the last served one, with their ids
    personal.safetensors                 prototypes or adapted weights; never leave the device
    methods/{key}/state.safetensors      the client state (duals, residuals, personal arrays)
    methods/{key}/pending.safetensors    the state that follows if the update is counted, and the update itself
    clock.json                           the highest sequence number and signed time seen

Training state is keyed by fleet, method, version, layout and dual epoch; another key is set aside, never mixed. A file
that is damaged is set aside too (``*.damaged``): the device goes on without it, and the aggregator learns that state
was lost.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fleet_core import messages, schema, storage
from fleet_core.algorithms.seam import ClientState
from fleet_core.errors import FleetError, StateError
from fleet_core.messages import Blob, Manifest, UploadManifest

MAX_STATE_BYTES = 1 << 33
UPLOAD = "upload"


@dataclass(frozen=True)
class Pending:
    """An update whose fate is open: the state to commit when it was counted, and what to offer again meanwhile."""

    key: str
    round: int
    upload: UploadManifest
    data: bytes
    state: ClientState


@dataclass(frozen=True)
class Weights:
    """Weights on disk. model: id of the arrays. round: of the meta-model."""

    model: str
    round: int
    params: dict[str, dict[str, Any]]


def state_key(manifest: Manifest) -> str:
    """The folder that a round's training state belongs to; the dot is in no fleet's name."""
    method = manifest.method
    return f"{manifest.fleet}.{method.name}-v{method.version}-{manifest.layout}-e{manifest.dual_epoch}"


class Home:
    """The files under one folder. One agent at a time: a lock file refuses a second one."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock: int | None = None
        self._trained: int | None = None

    def lock(self) -> None:
        """Raises StateError when another agent uses this folder."""
        import fcntl

        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StateError("another agent is running here", where=str(self.folder), hint="stop it first") from error
        for torn in self.folder.rglob(".*.safetensors.*"):
            torn.unlink(missing_ok=True)  # a write that a power cut ended

    # Signed time ------------------------------------------------------------------------------------------------------

    def clock(self) -> tuple[int, int]:
        """(highest seq, latest signed time in Unix ms) seen so far; zeros on a new device."""
        path = self.folder / "clock.json"
        if not path.exists():
            return 0, 0
        try:
            data = json.loads(storage.read_bytes(path, limit=4096))
            return int(data["seq"]), int(data["time"])
        except (ValueError, KeyError, TypeError) as error:
            raise StateError("is damaged", where=str(path), hint="delete it to accept the next round") from error

    def set_clock(self, seq: int, time_ms: int) -> None:
        storage.write_json(self.folder / "clock.json", {"seq": seq, "time": time_ms}, mode=0o600)

    # Graphs and weights -----------------------------------------------------------------------------------------------

    def graph_path(self, blob_id: str) -> Path:
        return self.folder / f"graph-{blob_id}.safetensors"

    def graph(self, blob: Blob) -> bytes | None:
        """The published graph, whole and as announced, or None."""
        try:
            data = storage.read_bytes(self.graph_path(blob.id), limit=blob.size)
        except StateError:
            return None
        return data if data and Blob.of(data, blob.chunk) == blob else None

    def save_graph(self, blob_id: str, data: bytes) -> None:
        storage.write_atomic(self.graph_path(blob_id), data)
        for old in self.folder.glob("graph-*.safetensors"):
            if old != self.graph_path(blob_id):
                old.unlink()

    def latest_graph(self) -> Path | None:
        return next(iter(sorted(self.folder.glob("graph-*.safetensors"))), None)

    def save_weights(self, name: str, weights: Weights) -> None:
        """``name``: model or serve."""
        metadata = {"model": weights.model, "round": str(weights.round)}
        storage.write_atomic(
            self.folder / f"{name}.safetensors", storage.pack(storage.flatten(weights.params), metadata)
        )

    def weights(self, name: str) -> Weights | None:
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return None
        try:
            arrays, metadata = storage.unpack(storage.read_bytes(path, limit=MAX_STATE_BYTES), where=str(path))
            return Weights(metadata["model"], int(metadata["round"]), storage.unflatten(arrays))
        except (StateError, ValueError, KeyError):
            _set_aside(path)
            return None

    # Training state ---------------------------------------------------------------------------------------------------

    def state(self, key: str) -> ClientState | None:
        """The committed state under ``key``, or None for a device that never took part under it."""
        path = self._method(key) / "state.safetensors"
        if not path.exists():
            return None
        arrays, _ = storage.unpack(storage.read_bytes(path, limit=MAX_STATE_BYTES), where=str(path))
        return storage.unflatten_roles(arrays)

    def trained(self) -> int:
        """The latest round whose training is committed here, under any key; 0 for none."""
        if self._trained is None:
            rounds = [_round_of(path) for path in sorted(self.folder.glob("methods/*/state.safetensors"))]
            self._trained = max(rounds, default=0)
        return self._trained

    def pending(self) -> Pending | None:
        """What is pending, under any key; at most one."""
        for path in sorted(self.folder.glob("methods/*/pending.safetensors")):
            try:
                return _read_pending(path)
            except (FleetError, ValueError, KeyError):
                _set_aside(path)
        return None

    def save_pending(self, pending: Pending) -> None:
        arrays = storage.flatten_roles(pending.state)
        arrays[UPLOAD] = np.frombuffer(pending.data, dtype=np.uint8)
        metadata = {"round": str(pending.round), "upload": json.dumps(schema.plain(pending.upload))}
        storage.write_atomic(
            self._method(pending.key) / "pending.safetensors", storage.pack(arrays, metadata), mode=0o600
        )

    def commit(self, pending: Pending) -> None:
        """The update was counted: its state becomes the device's."""
        arrays = storage.flatten_roles(pending.state)
        metadata = {"round": str(pending.round), "update": pending.upload.id}
        path = self._method(pending.key) / "state.safetensors"
        storage.write_atomic(path, storage.pack(arrays, metadata), mode=0o600)
        self._trained = max(self.trained(), pending.round)
        self.discard(pending)

    def discard(self, pending: Pending) -> None:
        """The update was not counted: what it would have changed is forgotten."""
        (self._method(pending.key) / "pending.safetensors").unlink(missing_ok=True)

    def _method(self, key: str) -> Path:
        return self.folder / "methods" / key


def _read_pending(path: Path) -> Pending:
    arrays, metadata = storage.unpack(storage.read_bytes(path, limit=MAX_STATE_BYTES), where=str(path))
    upload = messages.decode(UploadManifest, metadata["upload"].encode(), limit=1 << 26)
    data = arrays.pop(UPLOAD).tobytes()
    if Blob.of(data, upload.blob.chunk) != upload.blob:
        raise StateError("holds another update than it says", where=str(path))
    return Pending(path.parent.name, int(metadata["round"]), upload, data, storage.unflatten_roles(arrays))


def _round_of(path: Path) -> int:
    """The round of a committed state; 0 for a damaged one, which is set aside."""
    try:
        _, metadata = storage.unpack(storage.read_bytes(path, limit=MAX_STATE_BYTES), where=str(path))
        return int(metadata["round"])
    except (StateError, ValueError, KeyError):
        _set_aside(path)
        return 0


def _set_aside(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.replace(path.with_suffix(".damaged"))
