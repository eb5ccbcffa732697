"""Jobs for the trainer: one round's training, which leaves the update on the disk.

Only plain values pass between the two processes. The trainer reads weights and state from the device's folder and
writes the update and the state after it there (``edge_agent.compute.trained_update``); the agent never holds them
in memory.
"""

from __future__ import annotations

import json
from typing import Any

from edge_agent.compute.worker import Done, Job, Trainer
from edge_agent.device.agent_costs import AgentCosts
from edge_agent.device.state import DeviceState, state_key
from edge_agent.inference.service import Service
from fleet_core.base import schema, storage
from fleet_core.base.errors import RoundError, StateError
from fleet_core.board.device_settings import Settings
from fleet_core.board.limits import Limits
from fleet_core.model.layout import MODEL_GROUPS
from fleet_core.protocol import cohort
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import Manifest

ATTEMPTS = 5
"""An agent that died this often while it trained a round skips the round, which may need more memory than there is."""

Identity = tuple[int, str, str, str | None]
"""Number of a round, key of the training state, weights to train from, arrays to train."""


class TrainJobs:
    """One round's training at a time; none without a trainer or beyond the board's limits."""

    def __init__(
        self,
        settings: Settings,
        boot: str,
        home: DeviceState,
        service: Service,
        accounts: AgentCosts,
        trainer: Trainer | None,
        limits: Limits,
    ):
        self._settings, self._boot, self._home, self._service = settings, boot, home, service
        self._accounts, self._trainer, self._limits = accounts, trainer, limits
        self._name = settings.device.name
        self._seen: Identity | None = None
        self._begun: Manifest | None = None
        self._here = ""  # id of the graph that was found on the disk

    def wanted(self, manifest: Manifest) -> bool:
        """Whether this device trains in the open round and has not yet begun."""
        return (
            manifest.open
            and self._settings.train.enabled
            and self._trainer is not None
            and not self._trainer.busy
            and self._seen != identity(manifest)
            and cohort.includes(manifest.cohort, manifest.round, self._name)
            and not self._limits.refuses(self._service.layout.parameters(MODEL_GROUPS))
            and bool(self.engine(manifest))
        )

    def engine(self, manifest: Manifest) -> str:
        """The engine of this manifest's jobs; empty if none can do them: without torch, training needs the fleet's
        graph."""
        able = (e for e in self._limits.engines if e == "torch" or manifest.steps is not None)
        return "" if self._trainer is None else next(able, "")

    def lacks(self, manifest: Manifest) -> Blob | None:
        """The graph that this device needs for training and does not have on the disk, or None."""
        needed = manifest.steps is not None and self.engine(manifest) == "onnx"
        if not needed or manifest.steps is None or manifest.steps.id == self._here:
            return None
        if self._home.graph(manifest.steps, "steps") is None:
            return manifest.steps
        self._here = manifest.steps.id
        return None

    def forget(self) -> None:
        """Allows the same round to be started again."""
        self._seen = None

    def begin(self, manifest: Manifest, per_device: str = "") -> None:
        """Starts the training; the training model is on the disk. per_device: id of the weights that this device alone
        received, or empty. Raises RoundError."""
        if self._trainer is None:
            return
        self._seen, self._begun = identity(manifest), manifest
        if self.engine(manifest) == "onnx":
            self._count_attempt(manifest)
        self._accounts.begin("train")
        self._trainer.submit(Job("train", {**self.header(manifest), "given": per_device}))

    def header(self, manifest: Manifest) -> dict[str, Any]:
        """The header of every job: the round, the layout, and where weights, state and samples are."""
        data = self._settings.data
        return {
            "boot": self._boot,
            "manifest": schema.plain(manifest),
            "layout": self._service.layout.to_json(),
            "device": self._name,
            "home": str(self._home.folder),
            "samples": data.samples,
            "max_batch": self._limits.max_batch,
            "split": schema.plain(data),
            "engine": self.engine(manifest),
            "graph": self._service.graph_id or "",
            "steps": "" if manifest.steps is None else manifest.steps.id,
        }

    def _count_attempt(self, manifest: Manifest) -> None:
        """Counts the attempts of the engine onnx, which trains in the agent's process. The count outlives the process,
        not a power cut. Raises RoundError after ``ATTEMPTS``."""
        path, asked = self._home.folder / "training.json", list(identity(manifest))
        try:
            held = json.loads(storage.read_bytes(path, limit=4096))
            before = int(held["attempts"]) if held["round"] == asked else 0
        except (StateError, ValueError, KeyError, TypeError):
            before = 0
        if before >= ATTEMPTS:
            raise RoundError(f"the agent ended {before} times while it trained this round: is there too little memory?",
                             hint="[train] max_batch and max_parameters in device.toml")
        storage.write_json(path, {"round": asked, "attempts": before + 1}, mode=0o600, durable=False)

    def ended(self, done: Done) -> Manifest | None:
        """Adds up the job's costs; returns the manifest that it was started for."""
        self._accounts.end("train", done.header.get("flops"))
        (self._home.folder / "training.json").unlink(missing_ok=True)
        begun, self._begun = self._begun, None
        return begun


def identity(manifest: Manifest) -> Identity:
    """What tells rounds apart: two with the same identity are the same round."""
    return manifest.round, state_key(manifest), manifest.model.model, manifest.train


def still_asked(begun: Manifest, manifest: Manifest | None) -> bool:
    """Whether the current manifest still asks for the round ``begun``."""
    return manifest is not None and manifest.open and identity(manifest) == identity(begun)
