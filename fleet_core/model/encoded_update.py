"""An update on its way to the aggregator, and what its device keeps if it is counted; fleet and simulation use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet_core.algorithms import freezing
from fleet_core.algorithms.interface import ClientState, Method, Payload
from fleet_core.base import trees
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.codecs.interface import Seed
from fleet_core.codecs.kinds.common_scale import exponent_of, sent_as
from fleet_core.model import payloads
from fleet_core.model.layout import Layout
from fleet_core.model.skipped_updates import is_note
from fleet_core.privacy.gaussian import Private

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
    layout: Layout, round_number: float, seed: Seed, least_norm: float = 0.0, moving: Moving = EVERYTHING,
    private: Private | None = None, weight: float = 1.0,
) -> EncodedUpdate:
    """Encodes ``update``, and computes the device's state that follows from what the codec lost.

    pending: the method's state after the round. before: the device's state before it, whose residual is added to the
    update. layout: of what crosses the wire. seed: of a codec that draws. least_norm: below it the update is skipped.
    moving: the arrays that the update has; the residual of the others stays. With error feedback the loss is the next
    residual; without, the method corrects its state for it (``ClientRule.after_loss``). Clipping and noise
    (``private``) come before the codec, so codec and residual see the noised update alone; the method corrects its
    state for them likewise. weight: by which the update is scaled on its way. Raises CodecError for values that are
    not finite.
    """
    part, owed = layout.part(moving), before.get(RESIDUAL)
    own = part.ordered(update.groups)
    due = None if owed is None else trees.merged(trees.zeros_like(own), moving.of(owed))
    given = own if private is None else private.of(own)
    if weight != 1.0:
        given = trees.scale(given, weight)
    sent = payloads.send(codec, given, due, part, method.shared, seed, least_norm)
    state = dict(pending)
    errors = [] if private is None else [trees.subtract(own, given)]
    for error in (*errors, *([] if sent.error is None else [sent.error])):
        moved = method.client.after_loss(freezing.part_of(state, moving), error, hyper, round_number)
        state = dict(freezing.completed(moved, state, moving))
    if sent.residual is not None or moving.rest(owed or {}):
        state[RESIDUAL] = trees.merged(moving.rest(owed or {}), sent.residual or {})
    decoded = sent.decoded if weight == 1.0 else trees.scale(sent.decoded, 1 / weight)
    common = exponent_of(codec) is not None
    scalars = {name: sent_as(value) for name, value in update.scalars.items()} if common else update.scalars
    return EncodedUpdate(sent.data, Payload(part.ordered(decoded), scalars), state, sent.left, sent.codec)
