"""Training on this device: a job for the trainer, and from its result the update and the state that follows from it."""

from __future__ import annotations

import zlib
from typing import Any

from edge_agent.accounts import Accounts
from edge_agent.home import Home, Pending, Weights, state_key
from edge_agent.models import method_of
from edge_agent.service import Service
from edge_agent.settings import Settings
from edge_agent.worker import Done, Job, Trainer
from fleet_core import codecs, cohort, schema, storage
from fleet_core.algorithms import trees
from fleet_core.messages import Blob, Manifest, UploadManifest


class LocalTraining:
    """One round's training at a time. Without a trainer this device takes part in none."""

    def __init__(self, settings: Settings, home: Home, service: Service, accounts: Accounts, trainer: Trainer | None):
        self._settings, self._home, self._service = settings, home, service
        self._accounts, self._trainer = accounts, trainer
        self._name = settings.device.name
        self._seen: tuple[int, str, str] | None = None
        self._begun: Manifest | None = None

    def wanted(self, manifest: Manifest) -> bool:
        """Whether this device trains in the open round and has not yet begun."""
        return (
            manifest.open
            and self._settings.train.enabled
            and self._trainer is not None
            and not self._trainer.busy
            and self._seen != identity(manifest)
            and cohort.includes(manifest.cohort, manifest.round, self._name)
        )

    def forget(self) -> None:
        """The same round may be begun again."""
        self._seen = None

    def begin(self, manifest: Manifest, model: Weights) -> None:
        if self._trainer is None:
            return
        self._seen, self._begun = identity(manifest), manifest
        state = dict(self._home.state(state_key(manifest)) or {})
        state.pop("residual", None)
        flat = {f"broadcast/{key}": array for key, array in storage.flatten(model.params).items()}
        seed = [int(manifest.scalars.get("seed", 0)), manifest.round, zlib.crc32(self._name.encode())]
        header = {**self.header(manifest), "seed": seed, "scalars": dict(manifest.scalars)}
        self._accounts.begin("train")
        self._trainer.submit(Job("train", header, {**flat, **storage.flatten_roles(state)}))

    def header(self, manifest: Manifest) -> dict[str, Any]:
        """What every job of the trainer is told: method, hyperparameters, layout and where the samples are."""
        data = self._settings.data
        split = {"train_fraction": data.train_fraction, "support_seconds": data.support_seconds}
        path = str(self._home.folder / data.samples)
        return {
            "method": manifest.method.name,
            "hyper": dict(manifest.method.hyper),
            "layout": self._service.layout.to_json(),
            "round": manifest.round,
            "data": {"path": path, "split": split},
        }

    def ended(self, done: Done, manifest: Manifest | None) -> bool:
        """Books the job; whether ``manifest``, the current one, still asks for what it was begun for."""
        self._accounts.end("train", done.header.get("flops"))
        begun, self._begun = self._begun, None
        if manifest is None or begun is None:
            return False
        return manifest.open and identity(manifest) == identity(begun)

    def encode(self, manifest: Manifest, done: Done) -> Pending:
        """The update in the first of the round's codecs that is known here, and the state if it is counted."""
        method, layout = method_of(manifest), self._service.layout
        roles = storage.unflatten_roles(done.arrays)
        own = layout.ordered(roles.pop("update"))
        name = next((c for c in manifest.up.codecs if c in codecs.CODECS), "fp32")
        before = self._home.state(state_key(manifest)) or {}
        sent = codecs.send(name, own, before.get("residual"), layout, method.shared)
        state: dict[str, trees.Params] = dict(roles)
        if sent.error is not None:
            hyper, _ = schema.read(method.hyper, manifest.method.hyper)
            state = dict(method.client.settle(state, sent.error, hyper))
        if sent.residual is not None:
            state["residual"] = sent.residual
        upload = UploadManifest(
            blob=Blob.of(sent.data, manifest.up.chunk),
            codec=name,
            base=manifest.model.model,
            method=method.name,
            layout=layout.hash,
            dual_epoch=manifest.dual_epoch,
            samples=int(done.header["samples"]),
            scalars=done.header.get("scalars", {}),
            metrics={"loss": float(done.header["loss"])},
            cost=self._accounts.cost(len(sent.data), done.header),
        )
        return Pending(state_key(manifest), manifest.round, upload, sent.data, state)


def identity(manifest: Manifest) -> tuple[int, str, str]:
    """What makes a round the same one: number, key of the training state, weights to train from."""
    return manifest.round, state_key(manifest), manifest.model.model
