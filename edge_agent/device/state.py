"""What a device keeps on its disk: weights, training state, the pending update, the last signed time.

    graph-{id}.safetensors               graphs, layout, golden outputs, as published
    steps-{id}.safetensors               the graph with which this device trains without torch, as published
    backbone-{id}.safetensors            the frozen backbone; beside it its features of this device's samples, and what
                                         computes it here (``fleet_core.backbone.features``)
    model.safetensors                    the last training model, with its id
    slots/                               the models that answer, with the personalization; never leaves the device
    methods/{key}/state.safetensors      the client state (duals, residuals, personal arrays)
    methods/{key}/made-{boot}.safetensors    an update that the trainer made, until the agent takes it
    methods/{key}/pending.safetensors    the pending update and the state after it; becomes the state by one rename
                                         when the update is counted
    training.json                        how often this round was begun, while the engine onnx trains it
    secure.json                          the sum for which this device last revealed shares
    clock.json                           the highest sequence number and signed time seen

Training state is keyed by fleet, method, version, layout and dual epoch; states of different keys never mix. A damaged
file is set aside (``*.damaged``): the device goes on without it and the aggregator learns that state was lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fleet_core.algorithms.interface import ClientState
from fleet_core.base import schema, storage
from fleet_core.base.errors import FleetError, StateError
from fleet_core.protocol import messages
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import Manifest, UpdateRef, UploadManifest

FORMAT = 1
MAX_STATE_BYTES = 1 << 33
UPLOAD, VALUES = "upload", "values"
"""Arrays beside the state: the bytes that are sent; what was masked to make them."""


@dataclass(frozen=True)
class Pending:
    """An update that may or may not have been counted. Its bytes, from byte ``start`` of ``path`` on, and the state to
    commit stay on disk."""

    key: str
    round: int
    upload: UploadManifest
    path: Path
    start: int

    def chunk(self, k: int) -> bytes:
        """Chunk ``k`` of the update, from the disk. Raises StateError."""
        blob = self.upload.blob
        try:
            with self.path.open("rb") as file:
                file.seek(self.start + k * blob.chunk)
                return file.read(blob.length(k))
        except OSError as error:
            raise StateError(f"cannot be read: {error.strerror or error}", where=str(self.path)) from error


@dataclass(frozen=True)
class Weights:
    """Weights on disk. model: id of the arrays. round: of the model. facts: other metadata of the file."""

    model: str
    round: int
    params: dict[str, dict[str, Any]]
    facts: Mapping[str, str] = field(default_factory=dict)


def state_key(manifest: Manifest) -> str:
    """The folder of a round's training state. No fleet's name has a dot."""
    method = manifest.method
    return f"{manifest.fleet}.{method.name}-v{method.version}-{manifest.layout}-e{manifest.dual_epoch}"


def _parts(key: str) -> tuple[str, int]:
    """(all but the dual epoch, dual epoch) of a state's key; epoch 0 for a folder that is none."""
    found = re.fullmatch(r"(.+)-e([0-9]+)", key)
    return (found[1], int(found[2])) if found else (key, 0)


class DeviceState:
    """The files under one folder. One agent at a time: a lock file refuses a second one."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock: int | None = None

    def lock(self) -> None:
        """Raises StateError when another agent uses this folder."""
        import fcntl

        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StateError("another agent is running here", where=str(self.folder), hint="stop it first") from error
        for left in (*self.folder.rglob(".*.safetensors.*"), *self.folder.glob("methods/*/made-*.safetensors")):
            left.unlink(missing_ok=True)  # a write that a power cut ended; a trainer's whose agent died

    def check_formats(self) -> None:
        """Raises StateError for weights or training state of a newer metafleet, which must not be set aside."""
        below = ("*.safetensors", "methods/*/*.safetensors", "slots/*/*.safetensors")
        for path in (path for pattern in below for path in self.folder.glob(pattern)):
            found = _format(path)
            if found > FORMAT:
                raise StateError(
                    f"was made by a newer metafleet: version {found}, this one reads up to {FORMAT}", where=str(path),
                    hint="update this agent",
                )

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

    def graph_path(self, blob_id: str, kind: str = "graph") -> Path:
        return self.folder / f"{kind}-{blob_id}.safetensors"

    def graph(self, blob: Blob, kind: str = "graph") -> bytes | None:
        """The published graph, whole and as announced, or None. kind: ``graph``, or ``steps`` for that of training."""
        try:
            data = storage.read_bytes(self.graph_path(blob.id, kind), limit=blob.size)
        except StateError:
            return None
        return data if data and Blob.of(data, blob.chunk) == blob else None

    def save_graph(self, blob_id: str, data: bytes, *, keep: Collection[str] = (), kind: str = "graph") -> None:
        """Stores a graph and removes all others of its kind, except those with an id in ``keep``."""
        storage.write_atomic(self.graph_path(blob_id, kind), data)
        kept = {self.graph_path(name, kind) for name in (blob_id, *keep)}
        for old in self.folder.glob(f"{kind}-*.safetensors"):
            if old not in kept:
                old.unlink()

    def latest_graph(self) -> Path | None:
        """The newest graph."""
        found = sorted(self.folder.glob("graph-*.safetensors"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        return found[-1] if found else None

    def save_weights(self, name: str, weights: Weights, *, durable: bool = True) -> None:
        """``name``: model, or slots/a/serve. durable: also against a power cut."""
        metadata = {**weights.facts, "format": str(FORMAT), "model": weights.model, "round": str(weights.round)}
        storage.write_arrays(self._weights(name), storage.flatten(weights.params), metadata, durable=durable)

    def held(self, name: str) -> str:
        """The id of the weights on disk; empty for none."""
        return self.facts(name).get("model", "")

    def facts(self, name: str) -> dict[str, str]:
        """The metadata of the weights on disk; empty where there are none."""
        try:
            return storage.read_header(self._weights(name))[1]
        except StateError:
            return {}

    def weights(self, name: str) -> Weights | None:
        """The weights on disk, or None; a damaged file is set aside."""
        path = self._weights(name)
        if not path.exists():
            return None
        try:
            arrays, metadata = storage.map_file(path, limit=MAX_STATE_BYTES)
            return Weights(metadata["model"], int(metadata["round"]), storage.unflatten(arrays), metadata)
        except (StateError, ValueError, KeyError):
            _set_aside(path)
            return None

    def drop_weights(self, name: str) -> None:
        """Sets aside weights whose content does not match their id."""
        _set_aside(self._weights(name))

    def _weights(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def trained_by(self, method: str) -> bool:
        """Whether this device has committed training state of ``method``."""
        return any(self.folder.glob(f"methods/*.{method}-v*/state.safetensors"))

    # Training state ---------------------------------------------------------------------------------------------------

    def state(self, key: str) -> ClientState | None:
        """The committed state under ``key``; None for a device that never took part under it, or whose state is damaged
        and set aside. Raises StateError."""
        return read_state(self._method(key) / "state.safetensors") if self.learned(key) else None

    def learned(self, key: str) -> UpdateRef | None:
        """The update that the committed state under ``key`` came with, or None. A damaged state is set aside. Raises
        StateError."""
        path = self._method(key) / "state.safetensors"
        return _learned(path) if path.exists() else None

    def last_round(self) -> int:
        """The latest round whose training is committed here, under any key; 0 for none."""
        return max((last.round for path in self.folder.glob("methods/*/state.safetensors") if (last := _learned(path))),
                   default=0)

    def pending(self) -> Pending | None:
        """The pending update, under any key; there is one at most. A damaged one is set aside."""
        for path in sorted(self.folder.glob("methods/*/pending.safetensors")):
            try:
                return _checked(_read_pending(path))
            except (FleetError, ValueError, KeyError):
                _set_aside(path)
        return None

    def leave_made(
        self, key: str, boot: str, round_number: int, upload: UploadManifest, data: bytes, state: ClientState
    ) -> None:
        """Stores the trainer's encoded update, with the state after it, until the agent's ``boot`` takes it."""
        arrays = storage.flatten_roles(state)
        arrays[UPLOAD] = np.frombuffer(data, dtype=np.uint8)
        upload_text = json.dumps(schema.plain(upload))
        metadata = {"format": str(FORMAT), "round": str(round_number), "upload": upload_text}
        storage.write_arrays(self._made(key, boot), arrays, metadata, mode=0o600, before_move=True)

    def take_made(self, key: str, boot: str) -> Pending:
        """Makes the update that the trainer left the pending one. Raises StateError."""
        path = self._method(key) / "pending.safetensors"
        storage.move(self._made(key, boot), path)
        return _read_pending(path)

    def values(self, pending: Pending) -> bytes:
        """The payload of a pending update before it was masked, if it was. Raises StateError."""
        arrays, _ = storage.unpack(storage.read_bytes(pending.path, limit=MAX_STATE_BYTES), where=str(pending.path))
        return arrays.get(VALUES, arrays[UPLOAD]).tobytes()

    def mask(self, pending: Pending, upload: UploadManifest, masked: bytes) -> Pending:
        """Replaces the pending update's bytes by the masked ones. The unmasked values stay, for another session. Raises
        StateError."""
        path = pending.path
        arrays, metadata = storage.unpack(storage.read_bytes(path, limit=MAX_STATE_BYTES), where=str(path))
        arrays = {VALUES: arrays[UPLOAD], **arrays, UPLOAD: np.frombuffer(masked, dtype=np.uint8)}
        metadata = {**metadata, "upload": json.dumps(schema.plain(upload))}
        storage.write_arrays(path, arrays, metadata, mode=0o600)
        return _read_pending(path)

    def revealed(self) -> str:
        """The session in which this device last revealed shares; empty for none."""
        path = self.folder / "secure.json"
        if not path.exists():
            return ""
        try:
            return str(json.loads(storage.read_bytes(path, limit=4096))["session"])
        except (ValueError, KeyError, TypeError) as error:
            raise StateError("is damaged", where=str(path), hint="delete it to take part in sums again") from error

    def set_revealed(self, session: str) -> None:
        storage.write_json(self.folder / "secure.json", {"session": session}, mode=0o600)

    def drop_made(self, key: str, boot: str) -> None:
        """Deletes what the trainer left."""
        self._made(key, boot).unlink(missing_ok=True)

    def commit(self, pending: Pending) -> None:
        """The update was counted: its file becomes the device's state by one rename, which keeps the update's id with
        the state. States of earlier dual epochs are deleted."""
        storage.move(pending.path, self._method(pending.key) / "state.safetensors")
        line, epoch = _parts(pending.key)
        for other in self.folder.glob("methods/*/state.safetensors"):
            same, earlier = _parts(other.parent.name)
            if same == line and earlier < epoch:
                other.unlink(missing_ok=True)

    def discard(self, pending: Pending) -> None:
        """The update was not counted: deletes it and the state after it."""
        pending.path.unlink(missing_ok=True)

    def _method(self, key: str) -> Path:
        return self.folder / "methods" / key

    def _made(self, key: str, boot: str) -> Path:
        """The file is named by the agent's start, because a trainer may outlive its agent."""
        return self._method(key) / f"made-{boot}.safetensors"


def _read_pending(path: Path) -> Pending:
    places, metadata = storage.read_header(path)
    if UPLOAD not in places or not {"round", "upload"} <= metadata.keys():
        raise StateError("holds no update", where=str(path))
    upload = messages.decode(UploadManifest, metadata["upload"].encode(), limit=1 << 26)
    return Pending(path.parent.name, int(metadata["round"]), upload, path, places[UPLOAD][0])


def _checked(pending: Pending) -> Pending:
    blob = pending.upload.blob
    if Blob.of(b"".join(pending.chunk(k) for k in range(blob.n)), blob.chunk) != blob:
        raise StateError("holds another update than it says", where=str(pending.path))
    return pending


def read_state(path: Path) -> ClientState:
    """The training state in a file of either kind, without the update beside it. Raises StateError."""
    arrays, _ = storage.unpack(storage.read_bytes(path, limit=MAX_STATE_BYTES), where=str(path))
    return storage.unflatten_roles({name: array for name, array in arrays.items() if name not in (UPLOAD, VALUES)})


def _format(path: Path) -> int:
    """The version of a file's format; 0 for a damaged one."""
    try:
        return int(storage.read_header(path)[1].get("format", "1"))
    except (StateError, ValueError):
        return 0


def _learned(path: Path) -> UpdateRef | None:
    """The update that a committed state came with; None for a damaged one, which is set aside. Raises StateError if the
    disk cannot be read now."""
    try:
        counted = _read_pending(path)
    except (FleetError, ValueError, KeyError) as error:
        if storage.is_disk_error(error):
            raise
        _set_aside(path)
        return None
    return UpdateRef(counted.round, counted.upload.id)


def _set_aside(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.replace(path.with_suffix(".damaged"))
