"""A run's folder: its settings, its state after every round, its figures, its result.

    run.json            experiment, method, hyper-parameters, seed; a run continues only with the same
    state/              the server's last checkpoints
    clients/ID/         a device's state after each round that it took part in: round-N.safetensors
    rounds.jsonl        one line of figures per round
    result.json         the result, once the run has ended

A round counts when its checkpoint, or a later one, is on the disk. Files that a killed run wrote after that are dropped
when the run continues, so that it computes what an uninterrupted one does, bit for bit. (After a power cut a device's
state may be missing although its round counts; only a fleet survives that.)
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from cloud_server.laboratory.plan.experiment import SEVERAL, Experiment
from cloud_server.records.checkpoint import Checkpoint, Checkpoints
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import schema, storage
from fleet_core.base.errors import ConfigError, StateError
from fleet_core.base.trees import Params

MAX_JSON_BYTES = 1 << 26
MAX_STATE_BYTES = 1 << 33
MAX_ROUNDS_BYTES = 1 << 32


OTHER_MODELS = "other-models"


class Clients:
    """The devices' states on disk. The processes of a run share them; only one at a time writes a device's state."""

    def __init__(self, folder: Path):
        self._folder = folder / "clients"

    def load(self, client: str, after: int) -> dict[str, Params]:
        """The state of ``client`` after its last round up to ``after``; empty if it never took part."""
        found = [path for number, path in _files(self._of(client)) if number <= after]
        if not found:
            return {}
        arrays, _ = storage.unpack(storage.read_bytes(found[-1], limit=MAX_STATE_BYTES), where=str(found[-1]))
        return dict[str, Params](storage.unflatten_roles(arrays))

    def save(self, client: str, number: int, state: Mapping[str, Params]) -> None:
        """Writes the state after round ``number``. The previous state stays until ``drop_older``."""
        path = self._of(client) / f"round-{number:09d}.safetensors"
        storage.write_arrays(path, storage.flatten_roles(state), durable=False)

    def drop_older(self, client: str, number: int) -> None:
        """Call it when the rounds up to ``number`` count. Deletes all states up to ``number`` but the last."""
        for _, path in [found for found in _files(self._of(client)) if found[0] <= number][:-1]:
            path.unlink(missing_ok=True)

    def forget(self, client: str, number: int) -> None:
        """Deletes the state that ``save`` wrote for a round in which the device's update does not count."""
        (self._of(client) / f"round-{number:09d}.safetensors").unlink(missing_ok=True)

    def forget_after(self, number: int) -> None:
        """Deletes the states of rounds after ``number``, which do not count."""
        for folder in self._folder.glob("*"):
            for torn in folder.glob(".*"):
                torn.unlink(missing_ok=True)
            for later, path in _files(folder):
                if later > number:
                    path.unlink(missing_ok=True)

    def _of(self, client: str) -> Path:
        """The client's folder, named by a hash because a client's name may be any text."""
        return self._folder / hashlib.sha256(client.encode()).hexdigest()[:32]


def _files(folder: Path) -> list[tuple[int, Path]]:
    """(round, path) of each state, in order of rounds."""
    return [(int(path.stem.partition("-")[2]), path) for path in sorted(folder.glob("round-*.safetensors"))]


class Store:
    """The files of one run below ``folder``."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.clients = Clients(folder)

    def check(self, asked: Mapping[str, Any]) -> None:
        """Raises ConfigError if the folder holds another run or other files."""
        if (self.folder / "run.json").exists():
            if settled(self.asked()) != json.loads(json.dumps(asked)):
                raise ConfigError("holds a run with other settings", where=str(self.folder), hint="give another --out")
        elif self.folder.exists() and any(not path.name.startswith(".") for path in self.folder.iterdir()):
            raise ConfigError("is not empty and holds no run", where=str(self.folder), hint="give another --out")

    @contextlib.contextmanager
    def begun(self, asked: Mapping[str, Any]) -> Iterator[None]:
        """A context in which this process alone begins or continues the run. Raises ConfigError as ``check`` does, and
        StateError if another process runs it."""
        self.check(asked)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StateError("another simulation is running here", where=str(self.folder)) from error
            if not (self.folder / "run.json").exists():
                storage.write_json(self.folder / "run.json", asked)
            yield

    def asked(self) -> dict[str, Any]:
        """The run's settings. Raises StateError if they cannot be read."""
        return read_table(self.folder / "run.json")

    @property
    def done(self) -> bool:
        return (self.folder / "result.json").exists()

    # Rounds -----------------------------------------------------------------------------------------------------------

    def resume(self, first: Params) -> Checkpoint | None:
        """The checkpoint of the last round that counts, or None. Drops everything that was written after it."""
        for torn in self.folder.glob(".*.json*"):
            torn.unlink(missing_ok=True)
        checkpoints, kept = self._checkpoints(), _files(self.folder / "state")
        number = kept[-1][0] if kept else 0
        self.clients.forget_after(number)
        lines = [figures for figures in self.rounds() if figures["round"] <= number]
        text = "".join(json.dumps(figures, allow_nan=False) + "\n" for figures in lines)
        storage.write_atomic(self.folder / "rounds.jsonl", text.encode())
        return checkpoints.load(number, first) if kept else None

    def _checkpoints(self) -> Checkpoints:
        """Use it only while holding the lock: it deletes the files of interrupted writes."""
        return Checkpoints(self.folder / "state")

    def add(self, figures: Mapping[str, Any]) -> None:
        """Writes a round's figures. Call it before the round's checkpoint is saved."""
        path = self.folder / "rounds.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(figures, allow_nan=False) + "\n")
        except OSError as error:
            raise StateError(f"cannot be written: {error.strerror or error}", where=str(path)) from error

    def save(self, checkpoint: Checkpoint, taken: Collection[str]) -> None:
        """Writes a checkpoint: from now on all rounds up to it count. taken: devices that wrote a state since the last
        checkpoint."""
        self._checkpoints().save(checkpoint)
        for client in taken:
            self.clients.drop_older(client, checkpoint.round)

    def rounds(self) -> list[dict[str, Any]]:
        """The figures of the rounds that count."""
        path = self.folder / "rounds.jsonl"
        if not path.exists():
            return []
        found = []
        for line in storage.read_bytes(path, limit=MAX_ROUNDS_BYTES).decode("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    # The end ----------------------------------------------------------------------------------------------------------

    def end(self, result: Mapping[str, Any]) -> None:
        storage.write_json(self.folder / "result.json", result)

    def result(self) -> dict[str, Any]:
        """The content of result.json. Raises StateError if it cannot be read."""
        return read_table(self.folder / "result.json")

    def forget_clients(self) -> None:
        """Deletes the devices' states and models, which an ended run does not need."""
        for name in ("clients", OTHER_MODELS):
            shutil.rmtree(self.folder / name, ignore_errors=True)


def read_table(path: Path) -> dict[str, Any]:
    """A JSON file that holds a table. Raises StateError."""
    try:
        found = json.loads(storage.read_bytes(path, limit=MAX_JSON_BYTES))
    except ValueError as error:
        raise StateError(f"is not JSON: {error}", where=str(path)) from error
    if not isinstance(found, dict):
        raise StateError("holds no table", where=str(path))
    return found


def settled(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run (``run.json``), with defaults for keys that it is too old to have. Unreadable settings are
    returned unchanged."""
    method = METHODS.get(str(asked.get("method")))
    experiment, hyper = asked.get("experiment"), asked.get("hyper")
    if method is None or not isinstance(experiment, Mapping):
        return dict(asked)
    found, _ = schema.read(Experiment, {**experiment, "method": []})
    read_hyper, _ = schema.read(method.hyper, hyper)
    if found is None or read_hyper is None:
        return dict(asked)
    plain = {key: value for key, value in schema.plain(found).items() if key not in SEVERAL}
    return dict(json.loads(json.dumps({**asked, "experiment": plain, "hyper": schema.plain(read_hyper)})))
