"""From a round's training to what is pending: the encoded update and the state that follows if it is counted."""

from __future__ import annotations

from collections.abc import Mapping

from edge_agent.device.manifest_method import hyper_of, method_of, wire
from edge_agent.device.state import DeviceState, state_key
from fleet_core.algorithms.interface import ClientState, Payload
from fleet_core.base import trees
from fleet_core.model import codecs
from fleet_core.model.layout import Layout
from fleet_core.protocol.messages import BEGINS, Blob, Manifest, UploadManifest


def keep(
    home: DeviceState, life: str, manifest: Manifest, layout: Layout, update: Payload, state: ClientState,
    residual: trees.Params | None, *, samples: int, metrics: Mapping[str, float],
) -> None:
    """The update, in the first of the round's codecs that is known here, and ``state`` after it are on disk.

    life: of the agent that asked. residual: what earlier updates left out, or None. metrics: the loss, and
    what else the aggregator is told of the training. Raises CodecError for an update
    that cannot be encoded.
    """
    method = method_of(manifest)
    wired = wire(layout, method)
    name = next((c for c in manifest.up.codecs if c in codecs.CODECS), "fp32")
    sent = codecs.send(name, wired.ordered(update.groups), residual, wired, method.shared)
    after = dict(state)
    if sent.error is not None:
        hyper = hyper_of(method, manifest.method.hyper)
        after = dict(method.client.after_loss(after, sent.error, hyper, manifest.scalars["round"]))
    if sent.residual is not None:
        after["residual"] = sent.residual
    key = state_key(manifest)
    upload = UploadManifest(
        blob=Blob.of(sent.data, manifest.up.chunk),
        codec=name,
        base=manifest.model.model,
        method=method.name,
        layout=layout.hash,
        dual_epoch=manifest.dual_epoch,
        samples=samples,
        scalars=dict(update.scalars),
        metrics=dict(metrics),
        after=home.learned(key) or BEGINS,
    )
    home.leave_made(key, life, manifest.round, upload, sent.data, after)
