"""Leaves a trained update on the disk, encoded, with the state that follows if it is counted."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from edge_agent.device.manifest_method import hyper_of, method_of, wire
from edge_agent.device.state import DeviceState, state_key
from fleet_core.algorithms.interface import ClientState, Payload
from fleet_core.codecs.interface import Seed
from fleet_core.codecs.kinds import common_scale
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.model.encoded_update import encode_update
from fleet_core.model.layout import Layout
from fleet_core.privacy import gaussian
from fleet_core.privacy.gaussian import Private
from fleet_core.privacy.settings import LOCAL
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import MAX_NORM, NO_UPDATE, Manifest, PrivacyRules, UploadManifest

LOSS = "loss"


def keep(
    home: DeviceState, boot: str, manifest: Manifest, layout: Layout, update: Payload, pending: ClientState,
    before: ClientState, *, samples: int, metrics: Mapping[str, float], seed: Seed,
) -> None:
    """Writes the update, in the first of the round's codecs that this device knows, or the note that it is too small to
    send, and the state after it.

    boot: of the agent that asked for it. pending: the method's state after the round; before: the device's state before
    it. metrics: what the aggregator is told of the training, the loss above all. seed: of a codec that draws. Raises
    CodecError for values that are not finite.

    Noise of a private update is drawn once, before the update is written: an agent that starts again offers the same
    bytes.
    """
    method, privacy, secure = method_of(manifest), manifest.up.privacy, manifest.up.secure
    hidden = secure is not None or (privacy is not None and privacy.mode == LOCAL)
    name = next((c for c in manifest.up.codecs if c in CODECS), "fp32")
    weight = 1.0
    if secure is not None:
        name = common_scale.name_of(secure.exponent)
        weight = secure.weight(samples)
    made = encode_update(
        name, update, pending, before, method=method, hyper=hyper_of(method, manifest.method.hyper),
        layout=wire(layout, method), round_number=manifest.scalars["round"], seed=seed,
        moving=layout.moving(manifest.train),
        least_norm=manifest.up.least_norm, private=None if privacy is None else _private(privacy),
        weight=weight,
    )
    data = made.data
    if secure is not None:
        weights = [weight * common_scale.FULL] if secure.most_samples else []
        data = common_scale.with_numbers(data, [*(update.scalars[one] for one in method.up_scalars), *weights])
    key = state_key(manifest)
    upload = UploadManifest(
        blob=Blob.of(data, manifest.up.chunk),
        codec=made.codec,
        base=manifest.model.model,
        method=method.name,
        layout=layout.hash,
        dual_epoch=manifest.dual_epoch,
        samples=0 if hidden else samples,
        scalars={} if secure is not None else dict(update.scalars),
        metrics={name: value for name, value in metrics.items() if not (hidden and name == LOSS)},
        after=home.learned(key) or NO_UPDATE,
        residual=None if made.left is None or secure is not None else min(made.left, MAX_NORM),
        train=manifest.train,
        privacy="" if privacy is None else str(privacy),
    )
    home.leave_made(key, boot, manifest.round, upload, data, made.state)


def _private(rules: PrivacyRules) -> Private:
    noise = rules.noise if rules.mode == LOCAL else 0.0
    return Private(rules.clip, noise, secrets.token_bytes(gaussian.KEY_BYTES))
