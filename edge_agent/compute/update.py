"""Leaves a trained update on the disk, encoded, with the state that follows if it is counted."""

from __future__ import annotations

from collections.abc import Mapping

from edge_agent.device.manifest_method import hyper_of, method_of, wire
from edge_agent.device.state import DeviceState, state_key
from fleet_core.algorithms.interface import ClientState, Payload
from fleet_core.codecs.interface import Seed
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.model.encoded_update import encode_update
from fleet_core.model.layout import Layout
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import MAX_NORM, NO_UPDATE, Manifest, UploadManifest


def keep(
    home: DeviceState, life: str, manifest: Manifest, layout: Layout, update: Payload, pending: ClientState,
    before: ClientState, *, samples: int, metrics: Mapping[str, float], seed: Seed,
) -> None:
    """Writes the update, in the first of the round's codecs that this device knows, or the note that it is too small to
    send, and the state after it.

    life: of the agent that asked for it. pending: the method's state after the round; before: the device's state before
    it. metrics: what the aggregator is told of the training, the loss above all. seed: of a codec that draws. Raises
    CodecError for values that are not finite.
    """
    method = method_of(manifest)
    name = next((c for c in manifest.up.codecs if c in CODECS), "fp32")
    made = encode_update(
        name, update, pending, before, method=method, hyper=hyper_of(method, manifest.method.hyper),
        layout=wire(layout, method), round_number=manifest.scalars["round"], seed=seed,
        moving=layout.moving(manifest.train),
        least_norm=manifest.up.least_norm,
    )
    key = state_key(manifest)
    upload = UploadManifest(
        blob=Blob.of(made.data, manifest.up.chunk),
        codec=made.codec,
        base=manifest.model.model,
        method=method.name,
        layout=layout.hash,
        dual_epoch=manifest.dual_epoch,
        samples=samples,
        scalars=dict(update.scalars),
        metrics=dict(metrics),
        after=home.learned(key) or NO_UPDATE,
        residual=None if made.left is None else min(made.left, MAX_NORM),
        train=manifest.train,
    )
    home.leave_made(key, life, manifest.round, upload, made.data, made.state)
