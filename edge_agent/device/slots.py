"""Two slots (A/B) for the models that answer, and a pointer to one of them that is replaced by one rename.

    slots/a, slots/b     serve.safetensors     a served model's weights, with its method, hyper-parameters and graph
                         personal.safetensors  its personalization, if any
                         int8.safetensors      its quantized encoder, if a bundle brought one
    slots/serving.json   the slot that answers, the model that was rolled back, the graph that was checked here
    slots/way.json       how the user wants to personalize; overrides [personalize] of device.toml

New weights go to the slot that does not answer and are personalized there; then the pointer is switched. A process that
is killed at any moment leaves one slot or the other answering. Within a slot the personalization is replaced by a
rename too.

Several processes may write (the agent, a server, ``edge-agent personalize``): each takes a lock before it reads the
pointer, until it has written. The idea is from RAUC's slots, which mark a system good or bad (rauc.readthedocs.io).
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edge_agent.device.state import FORMAT, DeviceState, Weights
from fleet_core.base import schema, storage
from fleet_core.base.errors import StateError
from fleet_core.board.device_settings import Personalize

T = TypeVar("T")

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
    """slot: the slot that answers, empty for none. checked: graph and onnxruntime version of the last golden check that
    passed."""

    slot: str = field(default="", metadata={"choices": ("", *NAMES)})
    checked: str = ""
    rolled_back: RolledBack | None = None


class Slots:
    """The slots in one device's home."""

    def __init__(self, home: DeviceState):
        self._home = home
        self.folder = home.folder / "slots"

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Holds the lock of the slots. Raises StateError if the lock file cannot be opened."""
        return storage.locked(self.folder)

    # The pointer ------------------------------------------------------------------------------------------------------

    def pointer(self) -> Pointer:
        """The content of ``serving.json``; an empty pointer if it is absent or damaged."""
        return _read(Pointer, self.folder / "serving.json") or Pointer()

    def point(self, pointer: Pointer) -> None:
        """Replaces the pointer. Raises StateError."""
        storage.write_json(self.folder / "serving.json", schema.plain(pointer), mode=0o600)

    def in_order(self) -> list[str]:
        """The slots that hold weights; the slot that answers comes first."""
        answers = self.pointer().slot
        filled = [name for name in NAMES if self.path(name, "serve").exists()]
        return sorted(filled, key=lambda name: name != answers)

    def other(self) -> str:
        """The slot that does not answer."""
        return "b" if self.pointer().slot == "a" else "a"

    # Contents of a slot -----------------------------------------------------------------------------------------------

    def path(self, slot: str, kind: str) -> Path:
        """kind: serve, personal or int8."""
        return self.folder / slot / f"{kind}.safetensors"

    def stage(self, slot: str, weights: Weights, int8: bytes = b"") -> None:
        """Stores ``weights``, unpersonalized, in a slot that does not answer. int8: their quantized encoder, ONNX.
        Raises StateError."""
        self.drop_personal(slot)
        self.path(slot, "int8").unlink(missing_ok=True)
        self._home.save_weights(f"slots/{slot}/serve", weights)
        if int8:
            facts = {"format": str(FORMAT), "weights": weights.model, "crc32": str(zlib.crc32(int8))}
            storage.write_arrays(self.path(slot, "int8"), {"embed": np.frombuffer(int8, np.uint8)}, facts)

    def int8(self, slot: str) -> bytes:
        """The quantized encoder (ONNX) of the weights in ``slot``; empty if it is absent or damaged."""
        try:
            arrays, facts = storage.unpack(storage.read_bytes(self.path(slot, "int8"), limit=MAX_INT8_BYTES))
            data = arrays["embed"].tobytes()
            intact = facts["crc32"] == str(zlib.crc32(data))
            return data if intact and facts["weights"] == self._home.held(f"slots/{slot}/serve") else b""
        except (StateError, KeyError):
            return b""

    def drop_personal(self, slot: str) -> None:
        self.path(slot, "personal").unlink(missing_ok=True)

    def weights(self, slot: str = "") -> Weights | None:
        """The weights in ``slot``, or in the slot that answers."""
        slot = slot or self.pointer().slot
        return self._home.weights(f"slots/{slot}/serve") if slot else None

    def slot_of(self, model: str) -> str:
        """The slot with the weights ``model``, preferably the slot that answers; empty for none."""
        return next((name for name in self.in_order() if self._home.held(f"slots/{name}/serve") == model), "")

    def models(self) -> set[str]:
        """Ids of the stored weights."""
        return {self._home.held(f"slots/{name}/serve") for name in self.in_order()} - {""}

    def graphs(self) -> set[str]:
        """Ids of the graphs that the stored weights fit."""
        return {self._home.facts(f"slots/{name}/serve").get("graph", "") for name in self.in_order()} - {""}

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Changes whenever another process switches the model that answers or its personalization."""
        slot = self.pointer().slot
        paths = [self.folder / "serving.json", *([self.path(slot, "personal")] if slot else [])]
        stamps = []
        for path in paths:
            with contextlib.suppress(OSError):
                stat = path.stat()
                stamps.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
        return tuple(stamps)

    # The user's choice of a personalizer ------------------------------------------------------------------------------

    def choice(self) -> Personalize | None:
        """What was chosen at the command line; None if device.toml decides."""
        return _read(Personalize, self.folder / "way.json")

    def set_choice(self, choice: Personalize | None) -> None:
        path = self.folder / "way.json"
        if choice is None:
            path.unlink(missing_ok=True)
        else:
            storage.write_json(path, schema.plain(choice))


def facts_of(method: str, hyper: Mapping[str, Any], graph: str) -> dict[str, str]:
    """The facts stored with a served model's weights: method name, hyper-parameters, and the graph that they fit."""
    return {"method": method, "hyper": json.dumps(dict(hyper), sort_keys=True), "graph": graph}


def _read(cls: type[T], path: Path) -> T | None:
    """None if the file is absent or damaged."""
    try:
        data = json.loads(storage.read_bytes(path, limit=MAX_POINTER_BYTES))
    except (StateError, ValueError, RecursionError):
        return None
    return schema.read(cls, data, unknown="ignore")[0]
