"""The aggregator's state after each closed round, whole or absent: one safetensors file per round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleet_core import storage
from fleet_core.algorithms.seam import ServerState
from fleet_core.algorithms.trees import Params
from fleet_core.errors import StateError

KEPT = 3
MAX_BYTES = 1 << 34


@dataclass(frozen=True)
class Checkpoint:
    """What the next round starts from.

    round: the last closed round, 0 before the first. state: arrays float64. published: the decoded float32 weights that
    devices hold, or None before the first round. lost: what the lossy model of that round left out, or None.
    """

    round: int
    state: ServerState
    published: Params | None = None
    lost: Params | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


class Checkpoints:
    """``{folder}/round-{n}.safetensors``, the last three; ``{folder}/served.safetensors``, the last served model."""

    def __init__(self, folder: Path):
        self._folder = folder

    def path(self, round_number: int) -> Path:
        return self._folder / f"round-{round_number:09d}.safetensors"

    def save(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        roles: dict[str, Params] = {"model": state.model, "judged": state.judged}
        roles |= {f"memory.{name}": tree for name, tree in state.memory.items()}
        if checkpoint.published is not None:
            roles["published"] = checkpoint.published
        if checkpoint.lost is not None:
            roles["lost"] = checkpoint.lost
        metadata = {"round": str(checkpoint.round), "dual_epoch": str(state.dual_epoch), **checkpoint.facts}
        storage.write_atomic(self.path(checkpoint.round), storage.pack(storage.flatten_roles(roles), metadata))
        for old in sorted(self._folder.glob("round-*.safetensors"))[:-KEPT]:
            old.unlink(missing_ok=True)

    def exists(self, round_number: int) -> bool:
        return self.path(round_number).exists()

    def save_served(self, round_number: int, params: Params) -> None:
        """The judged model that was published after ``round_number``."""
        data = storage.pack(storage.flatten(params), {"round": str(round_number)})
        storage.write_atomic(self._folder / "served.safetensors", data)

    def served(self) -> tuple[int, Params] | None:
        """(round, float32 params) of the last served model, or None."""
        path = self._folder / "served.safetensors"
        if not path.exists():
            return None
        arrays, metadata = storage.unpack(storage.read_bytes(path, limit=MAX_BYTES), where=str(path))
        return int(metadata.get("round", "0")), storage.unflatten(arrays)

    def load(self, round_number: int, order: Params) -> Checkpoint:
        """The checkpoint after ``round_number``, arrays in the order of ``order``. Raises StateError."""
        path = self.path(round_number)
        arrays, metadata = storage.unpack(storage.read_bytes(path, limit=MAX_BYTES), where=str(path))
        roles = {
            role: {g: {n: tree[g][n] for n in named} for g, named in order.items() if g in tree}
            for role, tree in storage.unflatten_roles(arrays).items()
        }
        if not {"model", "judged"} <= roles.keys() or metadata.get("round") != str(round_number):
            raise StateError("is no checkpoint of this round", where=str(path), hint="restore it from a backup")
        memory = {role[len("memory."):]: tree for role, tree in roles.items() if role.startswith("memory.")}
        state = ServerState(roles["model"], roles["judged"], memory, int(metadata.get("dual_epoch", "0")))
        facts = {key: value for key, value in metadata.items() if key not in ("round", "dual_epoch")}
        return Checkpoint(round_number, state, roles.get("published"), roles.get("lost"), facts)
