"""Two slots for what a device answers with, and a pointer that is turned by one rename.

    slots/a, slots/b     serve.safetensors     a served model's weights, with its method, hyper-parameters and graph
                         personal.safetensors  what makes the answers the device's own; absent where nothing does
                         int8.safetensors      their encoder, quantized; absent where no bundle brought one
    slots/serving.json   which of the two answers, the model that was rolled back, the graph that was checked here
    slots/way.json       how a person wants to personalize, in place of device.toml's word

A new round's weights go to the slot that does not answer and are made the device's own there; then the pointer is
turned. A process that is killed at any moment leaves one slot or the other answering, whole. Within a slot the
personalization is replaced by a rename as well.

Several processes may write (the agent, a server, ``edge-agent personalize``): each write, from reading the pointer on,
holds a lock. Source of the idea: RAUC's slots, which mark a system good or bad (rauc.readthedocs.io).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.device.state import FORMAT, DeviceState, Weights
from fleet_core.base import schema, storage
from fleet_core.base.errors import StateError
from fleet_core.board.device_settings import Personalize

NAMES = ("a", "b")
MAX_POINTER_BYTES = 1 << 16
MAX_INT8_BYTES = 1 << 29


@dataclass(frozen=True)
class RolledBack:
    """A served model that was tried and is not tried again, and why."""

    model: str
    round: int
    why: str


@dataclass(frozen=True)
class Pointer:
    """slot: that answers, empty for none. checked: graph and onnxruntime of the last golden check that was passed."""

    slot: str = field(default="", metadata={"choices": ("", *NAMES)})
    checked: str = ""
    rolled_back: RolledBack | None = None


class Slots:
    """The slots below one device's home."""

    def __init__(self, home: DeviceState):
        self._home = home
        self.folder = home.folder / "slots"

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """No other process writes meanwhile. Raises StateError where there can be no lock."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(f"cannot be written: {error.strerror or error}", where=str(self.folder)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # The pointer ------------------------------------------------------------------------------------------------------

    def pointer(self) -> Pointer:
        """What ``serving.json`` says; nothing where it is absent or damaged."""
        found = _read(Pointer, self.folder / "serving.json")
        return found if isinstance(found, Pointer) else Pointer()

    def point(self, pointer: Pointer) -> None:
        """Turns the pointer. Raises StateError."""
        storage.write_json(self.folder / "serving.json", schema.plain(pointer), mode=0o600)

    def in_order(self) -> list[str]:
        """The slots that hold weights, the one that answers first."""
        answers = self.pointer().slot
        held = [name for name in NAMES if self.path(name, "serve").exists()]
        return sorted(held, key=lambda name: name != answers)

    def other(self) -> str:
        """The slot that does not answer."""
        return "b" if self.pointer().slot == "a" else "a"

    # What lies in a slot ----------------------------------------------------------------------------------------------

    def path(self, slot: str, kind: str) -> Path:
        """kind: serve, personal or int8."""
        return self.folder / slot / f"{kind}.safetensors"

    def stage(self, slot: str, weights: Weights, int8: bytes = b"") -> None:
        """``weights`` in a slot that does not answer, without a personalization. int8: their quantized encoder, ONNX.
        Raises StateError."""
        self.drop_personal(slot)
        self.path(slot, "int8").unlink(missing_ok=True)
        self._home.save_weights(f"slots/{slot}/serve", weights)
        if int8:
            facts = {"format": str(FORMAT), "weights": weights.model, "crc32": str(zlib.crc32(int8))}
            storage.write_arrays(self.path(slot, "int8"), {"embed": np.frombuffer(int8, np.uint8)}, facts)

    def int8(self, slot: str) -> bytes:
        """The quantized encoder (ONNX) of the weights in ``slot``; empty where there is none, or a damaged one."""
        try:
            arrays, facts = storage.unpack(storage.read_bytes(self.path(slot, "int8"), limit=MAX_INT8_BYTES))
            data = arrays["embed"].tobytes()
            whole = facts["crc32"] == str(zlib.crc32(data))
            return data if whole and facts["weights"] == self._home.held(f"slots/{slot}/serve") else b""
        except (StateError, KeyError):
            return b""

    def drop_personal(self, slot: str) -> None:
        self.path(slot, "personal").unlink(missing_ok=True)

    def weights(self, slot: str = "") -> Weights | None:
        """The weights in ``slot``, or in the one that answers."""
        slot = slot or self.pointer().slot
        return self._home.weights(f"slots/{slot}/serve") if slot else None

    def slot_of(self, model: str) -> str:
        """The slot with the weights ``model``, the one that answers first; empty for none."""
        return next((name for name in self.in_order() if self._home.held(f"slots/{name}/serve") == model), "")

    def graphs(self) -> set[str]:
        """The graphs that the weights here fit."""
        return {self._home.facts(f"slots/{name}/serve").get("graph", "") for name in self.in_order()} - {""}

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Changes whenever another process turns the pointer or personalizes."""
        slot = self.pointer().slot
        paths = [self.folder / "serving.json", *([self.path(slot, "personal")] if slot else [])]
        found = []
        for path in paths:
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
        return tuple(found)

    # How a person wants to personalize --------------------------------------------------------------------------------

    def way(self) -> Personalize | None:
        """What was chosen at the command line, or None where device.toml decides."""
        found = _read(Personalize, self.folder / "way.json")
        return found if isinstance(found, Personalize) else None

    def set_way(self, way: Personalize | None) -> None:
        path = self.folder / "way.json"
        if way is None:
            path.unlink(missing_ok=True)
        else:
            storage.write_json(path, schema.plain(way))


def facts_of(method: str, hyper: Mapping[str, Any], graph: str) -> dict[str, str]:
    """What lies beside a served model's weights: its method's name and hyper-parameters, and the graph that it fits."""
    return {"method": method, "hyper": json.dumps(dict(hyper), sort_keys=True), "graph": graph}


def _read(cls: type[Any], path: Path) -> Any:
    try:
        data = json.loads(storage.read_bytes(path, limit=MAX_POINTER_BYTES))
    except (StateError, ValueError, RecursionError):
        return None
    return schema.read(cls, data, unknown="ignore")[0]
