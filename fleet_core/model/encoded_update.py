"""An update on its way to the aggregator, and what its device keeps if it is counted; fleet and simulation use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet_core.algorithms.interface import ClientState, Method, Payload
from fleet_core.codecs.interface import Seed
from fleet_core.model import payloads
from fleet_core.model.layout import Layout
from fleet_core.model.skipped_updates import is_note

RESIDUAL = "residual"
"""The role of what lossy codecs left out of earlier updates, beside the roles of the method's own state."""


@dataclass(frozen=True)
class EncodedUpdate:
    """data: the payload's bytes. update: what the aggregator reads from them. state: what the device keeps if the
    update is counted, the residual included. left, codec: as in ``payloads.Sent``."""

    data: bytes
    update: Payload
    state: ClientState
    left: float | None
    codec: str

    @property
    def skipped(self) -> bool:
        return is_note(self.codec)


def method_state(state: ClientState) -> ClientState:
    """The method's own part of a device's state: all but the residual."""
    return {role: params for role, params in state.items() if role != RESIDUAL}


def encode_update(
    codec: str, update: Payload, pending: ClientState, before: ClientState, *, method: Method, hyper: Any,
    layout: Layout, round_number: float, seed: Seed, least_norm: float = 0.0,
) -> EncodedUpdate:
    """Encodes ``update`` and follows up what the codec lost.

    pending: the method's state after the round. before: the device's state before it, whose residual is added to the
    update. layout: of what crosses the wire. seed: of a codec that draws. With error feedback the loss is the next
    residual; without, the method corrects its state for it (``ClientRule.after_loss``). least_norm: below it the update
    is skipped. Raises CodecError for values that are not finite.
    """
    sent = payloads.send(
        codec, layout.ordered(update.groups), before.get(RESIDUAL), layout, method.shared, seed, least_norm
    )
    state = dict(pending)
    if sent.error is not None:
        state = dict(method.client.after_loss(state, sent.error, hyper, round_number))
    if sent.residual is not None:
        state[RESIDUAL] = sent.residual
    return EncodedUpdate(sent.data, Payload(layout.ordered(sent.decoded), update.scalars), state, sent.left, sent.codec)
