"""The aggregator's state after each closed round: one safetensors file per round, written atomically.

A checkpoint is on the disk before the ledger marks its round as closed, so no crash leaves a closed round without one.
A damaged checkpoint is refused, and an earlier one does not replace it: the devices have committed the duals of every
closed round, and with an older state their updates would count twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fleet_core.algorithms.interface import ServerState
from fleet_core.base import storage
from fleet_core.base.errors import StateError
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.base.trees import Params

KEPT = 3
SERVED_KEPT = 3
MAX_BYTES = 1 << 34
FORMAT, PART_FORMAT = 1, 2  # PART_FORMAT: the round trained a part of the model
SERVED_FORMAT, SERVED_PART_FORMAT = 2, 3  # a served model's file with a delta; with frozen arrays
DELTA = "delta"  # name of the delta's array in a served model's file
METADATA = ("format", "sha256", "round", "dual_epoch", "scalars", "answers", "deltas", "frozen")
"""Keys of a checkpoint's metadata; all other keys are facts."""
RESTORE = "put the whole fleet folder back from a backup: ledger and state belong together"


@dataclass(frozen=True)
class ServedModel:
    """A served model as it is published. round: the closed round that it came from. weights: float32, as devices decode
    them. data: a delta to the weights with the id ``base``, encoded with ``codec``; empty without a delta. source: id
    of the aggregator's weights in float32. following: whether the next round's training model has these weights; not
    stored. moving: the arrays of the delta; the other arrays are those of the previous served model."""

    round: int
    weights: Params
    codec: str = "fp32"
    base: str | None = None
    data: bytes = b""
    source: str = ""
    following: bool = False
    moving: Moving = EVERYTHING


@dataclass(frozen=True)
class Delta:
    """The published delta of the training model of ``round``. model: id of the model's weights. data: a delta to the
    weights with the id ``base``, encoded with ``codec``; base is None for first weights."""

    round: int
    model: str
    codec: str
    base: str | None
    data: bytes


@dataclass(frozen=True)
class Checkpoint:
    """What the next round starts from.

    round: the last closed round, 0 before the first. state: its arrays are float64. published: the decoded float32
    weights that devices have, or None before the first round. lost: what the lossy codec left out of that round's
    model, or None. answers: in a simulation, the served model that devices have, without its delta; a fleet stores it
    in another file. deltas: those of the last rounds, oldest first, each from the previous round's model; the last one
    leads to ``published``. moving: the arrays that the round trained. robust: arrays that the robust rule keeps.
    """

    round: int
    state: ServerState
    published: Params | None = None
    lost: Params | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    answers: ServedModel | None = None
    deltas: tuple[Delta, ...] = ()
    moving: Moving = EVERYTHING
    robust: Params = field(default_factory=dict)


class Checkpoints:
    """``{folder}/round-{n}.safetensors``, the last three; ``{folder}/served.safetensors``, the last served model;
    ``{folder}/served-at-{n}.safetensors``, the checkpoints of the last three rounds whose model was served.

    Use it only while holding the fleet's lock: it deletes the temporary files of interrupted writes.
    """

    def __init__(self, folder: Path, log: Callable[[str], None] = lambda line: None):
        self._folder, self._log = folder, log
        self._served = folder / "served.safetensors"
        for temporary in folder.glob(".*"):
            with contextlib.suppress(OSError):
                temporary.unlink()

    def path(self, round_number: int) -> Path:
        return self._folder / file_name(round_number)

    def save(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        roles: dict[str, Params] = {"model": state.model}
        if state.served is not state.model:
            roles["served"] = state.served
        roles |= {f"memory.{name}": tree for name, tree in state.memory.items()}
        if checkpoint.published is not None:
            roles["published"] = checkpoint.published
        if checkpoint.lost is not None:
            roles["lost"] = checkpoint.lost
        if checkpoint.robust:
            roles["robust"] = checkpoint.robust
        metadata = {
            "round": str(checkpoint.round), "dual_epoch": str(state.dual_epoch),
            "scalars": json.dumps(dict(state.scalars), sort_keys=True), **checkpoint.facts,
        }
        if checkpoint.answers is not None:
            roles["answers"] = checkpoint.answers.weights
            metadata["answers"] = f"{checkpoint.answers.round} {checkpoint.answers.source}"
        if checkpoint.deltas:
            roles["deltas"] = {"data": {f"{k:03}": np.frombuffer(d.data, np.uint8)
                                        for k, d in enumerate(checkpoint.deltas)}}
            metadata["deltas"] = json.dumps([(d.round, d.model, d.codec, d.base) for d in checkpoint.deltas])
        metadata |= _of_moving(checkpoint.moving)
        version = FORMAT if checkpoint.moving.everything else PART_FORMAT
        _write(self.path(checkpoint.round), storage.flatten_roles(roles), metadata, version)
        for old in sorted(self._folder.glob("round-*.safetensors"))[:-KEPT]:
            old.unlink(missing_ok=True)

    def exists(self, round_number: int) -> bool:
        return self.path(round_number).exists()

    def save_served(self, served: ServedModel) -> None:
        """Stores the served model that is published from now on."""
        metadata = {"round": str(served.round), "source": served.source}
        arrays = storage.flatten(served.weights)
        if served.base is not None:
            metadata |= {"codec": served.codec, "base": served.base}
            arrays[DELTA] = np.frombuffer(served.data, np.uint8)
        metadata |= _of_moving(served.moving)
        version = FORMAT if served.base is None else SERVED_FORMAT
        _write(self._served, arrays, metadata, version if served.moving.everything else SERVED_PART_FORMAT)

    def keep_served_round(self, number: int) -> None:
        """Keeps the checkpoint of a round whose model is served, so that training can roll back to it."""
        path = served_at(self._folder, number)
        temporary = path.with_name(f".{path.name}")
        temporary.unlink(missing_ok=True)
        try:
            os.link(self.path(number), temporary)
        except OSError:  # the file system has no links
            shutil.copyfile(self.path(number), temporary)
        temporary.replace(path)
        for old in served_rounds(self._folder)[:-SERVED_KEPT]:
            served_at(self._folder, old).unlink(missing_ok=True)

    def drop_served_rounds(self, after: int) -> None:
        """Deletes the kept checkpoints of rounds after ``after``."""
        for number in served_rounds(self._folder):
            if number > after:
                served_at(self._folder, number).unlink(missing_ok=True)

    def served_rounds(self) -> list[int]:
        """The rounds that training can go back to, the oldest first."""
        return served_rounds(self._folder)

    def served_round(self, number: int, order: Params) -> Checkpoint:
        """The kept checkpoint of a round whose model was served. Raises StateError."""
        if number not in (kept := self.served_rounds()):
            raise StateError(f"no checkpoint of round {number} is kept", where=str(self._folder),
                             expected=", ".join(map(str, kept)) or "a round whose model was served")
        return self._loaded(served_at(self._folder, number), number, order)

    def served(self) -> ServedModel | None:
        """The last served model, or None. A damaged file is renamed, and devices keep their model until the next one.
        Raises StateError if a newer version wrote the file."""
        if not self._served.exists():
            return None
        found = _read(self._served, SERVED_PART_FORMAT)
        if found is None:
            aside = self._served.with_suffix(".damaged")
            self._served.replace(aside)
            self._log(f"{self._served} is damaged: set aside as {aside.name}; the next served model takes its place")
            return None
        arrays, metadata = found
        delta = arrays.pop(DELTA, None)
        return ServedModel(
            int(metadata["round"]), storage.unflatten(arrays), metadata.get("codec", "fp32"), metadata.get("base"),
            b"" if delta is None else delta.tobytes(), metadata.get("source", ""), moving=_moving(metadata),
        )

    def load(self, round_number: int, order: Params) -> Checkpoint:
        """The checkpoint after ``round_number``, with arrays in the order of ``order``. Groups that ``order`` lacks,
        which only the server rule uses, are sorted by name. Raises StateError if it is missing or damaged."""
        path = self.path(round_number)
        if not path.exists():
            raise StateError(f"is missing, and round {round_number} is closed", where=str(path), hint=RESTORE)
        return self._loaded(path, round_number, order)

    def _loaded(self, path: Path, round_number: int, order: Params) -> Checkpoint:
        found = _read(path)
        if found is None:
            raise StateError("is damaged", where=str(path), hint=RESTORE)
        arrays, metadata = found
        roles = {role: _ordered(tree, order) for role, tree in storage.unflatten_roles(arrays).items()}
        if "dual_epoch" not in metadata or metadata["round"] != str(round_number):
            raise StateError("is not the checkpoint of this round", where=str(path), hint=RESTORE)
        memory = {role[len("memory."):]: tree for role, tree in roles.items() if role.startswith("memory.")}
        model = roles.get("model", {})  # a method that shares nothing has none
        scalars = json.loads(metadata.get("scalars", "{}"))
        state = ServerState(
            model, _served(roles), memory, int(metadata["dual_epoch"]), scalars, round_number
        )
        facts = {key: value for key, value in metadata.items() if key not in METADATA}
        return Checkpoint(
            round_number, state, roles.get("published"), roles.get("lost"), facts, _answers(roles, metadata),
            _deltas(roles, metadata), _moving(metadata), roles.get("robust", {}),
        )


def _of_moving(moving: Moving) -> dict[str, str]:
    """The frozen arrays as metadata."""
    return {} if moving.everything else {"frozen": json.dumps(sorted(moving.frozen))}


def _moving(metadata: Mapping[str, str]) -> Moving:
    return Moving(frozenset(json.loads(metadata.get("frozen", "[]"))))


def _answers(roles: Mapping[str, Params], metadata: Mapping[str, str]) -> ServedModel | None:
    if "answers" not in metadata:
        return None
    number, source = metadata["answers"].split()
    return ServedModel(int(number), roles.get("answers", {}), source=source)


def _deltas(roles: Mapping[str, Params], metadata: Mapping[str, str]) -> tuple[Delta, ...]:
    """Empty if a version without deltas has kept only their metadata."""
    if "deltas" not in roles:
        return ()
    data, known = roles["deltas"]["data"], json.loads(metadata["deltas"])
    return tuple(
        Delta(number, model, codec, base, data[f"{k:03}"].tobytes())
        for k, (number, model, codec, base) in enumerate(known)
    )


def file_name(round_number: int) -> str:
    return f"round-{round_number:09d}.safetensors"


def served_at(folder: Path, round_number: int) -> Path:
    return folder / f"served-at-{round_number:09d}.safetensors"


def served_rounds(folder: Path) -> list[int]:
    """The rounds that training can go back to, the oldest first; ``folder`` is the folder of the checkpoints."""
    return sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob("served-at-*.safetensors"))


def facts(path: Path) -> dict[str, str]:
    """A checkpoint's metadata. Raises StateError if it is damaged."""
    found = _read(path)
    if found is None:
        raise StateError("is damaged", where=str(path), hint=RESTORE)
    return found[1]


def served(path: Path) -> tuple[int, Params]:
    """(round, served model) of a checkpoint, float64, or of a served model's file, float32. Safe while an aggregator
    runs. Raises StateError."""
    found = _read(path, SERVED_PART_FORMAT)
    if found is None:
        raise StateError("is damaged, or not a checkpoint", where=str(path))
    arrays, metadata = found
    arrays.pop(DELTA, None)
    if "dual_epoch" not in metadata:
        return int(metadata["round"]), storage.unflatten(arrays)
    roles = storage.unflatten_roles(arrays)
    return int(metadata["round"]), _served(roles)


def _ordered(tree: Params, order: Params) -> Params:
    """The arrays in the order of ``order``. A role may have only the arrays that have moved so far."""
    known = {g: {n: tree[g][n] for n in named if n in tree[g]} for g, named in order.items() if g in tree}
    return known | {g: {n: tree[g][n] for n in sorted(tree[g])} for g in sorted(tree) if g not in order}


def _write(path: Path, arrays: Mapping[str, Any], metadata: Mapping[str, str], version: int = FORMAT) -> None:
    known = {**metadata, "format": str(version)}
    storage.write_arrays(path, arrays, {**known, "sha256": _digest(arrays, known)})


def _read(path: Path, newest: int = PART_FORMAT) -> tuple[dict[str, Any], dict[str, str]] | None:
    """(arrays, metadata) as written; None for a damaged file. Raises StateError if it cannot be read now, or a newer
    version wrote it."""
    data = storage.read_bytes(path, limit=MAX_BYTES)
    try:
        arrays, metadata = storage.unpack(data, where=str(path))
        version = int(metadata["format"])
    except (StateError, KeyError, ValueError):
        return None
    if version > newest:
        raise StateError(
            f"was made by a newer metafleet: version {version}, this one reads up to {newest}", where=str(path),
            hint="update metafleet",
        )
    return (arrays, metadata) if metadata.pop("sha256", None) == _digest(arrays, metadata) else None


def _digest(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    """sha256 over names, types, values and metadata, because safetensors has no checksum."""
    digest = hashlib.sha256(repr(sorted(metadata.items())).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()


def _served(roles: Mapping[str, Params]) -> Params:
    """The served model, which is the training model if none is stored. Version 0.1 called the role ``judged``."""
    return roles.get("served", roles.get("judged", roles.get("model", {})))
