"""Encodes what devices receive for training: the model as a delta, a chain of deltas or whole, and what one device
alone receives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cloud_server.broadcast.delta_chain import DeltaChain, Holder, chain_of
from cloud_server.broadcast.open_round import OpenRound
from cloud_server.broker.publisher import Publisher
from cloud_server.records.checkpoint import Checkpoint, Delta
from cloud_server.records.fleet_folder import Fleet
from fleet_core.algorithms.interface import Method, ServerState
from fleet_core.base import trees
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.base.trees import Params
from fleet_core.codecs.kinds import registry
from fleet_core.model import payloads
from fleet_core.model.layout import Layout
from fleet_core.protocol import messages
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import ModelRef, PerDevice


@dataclass(frozen=True)
class Encoded:
    """A training model on its way down. data: its bytes in ``codec``. delta: whether they are a change to the weights
    published before. decoded: float32 weights as devices will hold them. lost: what a codec with feedback left out, or
    None. left: norm of the encoding error, relative to the norm of the change; None for a whole model and for no
    change. moving: the arrays of a delta, which are those that the previous round trained."""

    data: bytes
    codec: str
    delta: bool
    decoded: Params
    lost: Params | None
    left: float | None = None
    moving: Moving = EVERYTHING


def encode_model(
    model: Params, before: Checkpoint, codec: str, layout: Layout, groups: tuple[str, ...], seed: int
) -> Encoded:
    """Encodes ``model`` (float64), plus what was lost ``before``, as a delta to the weights that devices hold; whole in
    the first round. seed: of the fleet or run, for a codec that draws and for first weights drawn from it."""
    held, moving = before.published, before.moving
    target = model
    if before.lost is not None:
        target = trees.add(model, trees.merged(trees.zeros_like(model), before.lost))
    if not held:
        form, data = payloads.encode_whole(target, seed, layout.others(groups))
        return Encoded(data, form, False, payloads.decode(form, data, layout, groups), None)
    part, moved = layout.part(moving), moving.of(target)
    delta = _difference(moved, held)
    data = payloads.encode(codec, delta, (seed, before.round + 1, 0))
    read = delta if registry.codec(codec).lossless else payloads.decode(codec, data, part, groups)
    decoded = payloads.apply_delta(held, read)
    missing = _difference(moved, decoded)
    kept = trees.merged(moving.rest(before.lost or {}), missing if registry.codec(codec).feedback_down else {})
    return Encoded(data, codec, True, decoded, kept or None, payloads.relative(missing, delta), moving)


def _difference(left: Params, right: Params) -> dict[str, dict[str, Any]]:
    """left − right in float64, kept in float32; what float32 cannot hold becomes infinite and is refused later."""
    with np.errstate(over="ignore"):
        return trees.apply(lambda a, b: (a - b).astype(np.float32), left, right)


def moved(method: Method, state: ServerState, published: Params) -> float:
    """Norm of a round's change to the training model, from the ``published`` weights to the ``state`` after the round,
    in the groups that devices receive and send."""
    groups = [group for group in method.shared if group in published]
    after = trees.only(method.server.broadcast(state).groups, groups)
    return payloads.norm(trees.subtract(after, trees.only(published, groups)))


def per_device_models(method: Method, state: ServerState, cohort: Sequence[str]) -> dict[str, Params]:
    """Float32 groups that each device of the cohort alone receives; empty for most methods."""
    if not method.per_device:
        return {}
    return {
        name: trees.apply(lambda a: np.asarray(a, np.float32), method.server.per_device(state, name)) for name in cohort
    }


class ModelsDown:
    """Encodes a fleet's models and hands their blobs to the publisher.

    layout: of what crosses the wire.
    """

    def __init__(self, fleet: Fleet, layout: Layout, publisher: Publisher):
        self._config, self._method = fleet.config, fleet.method
        self._layout, self._publisher = layout, publisher
        self._known: tuple[Params, str] | None = None
        self._per_device: tuple[Mapping[str, Params], Blob, frozenset[str]] | None = None

    def blob(self, data: bytes) -> Blob:
        """Publishes ``data`` in chunks."""
        return self._publisher.blob(Blob.of(data, self._config.link.chunk_bytes), data)

    # The training model -----------------------------------------------------------------------------------------------

    def training(
        self, target: Params, before: Checkpoint, number: int, codec: str,
        lacking: Callable[[str], Collection[Holder]], listening: int,
    ) -> tuple[ModelRef, Encoded, DeltaChain]:
        """Publishes the model of round ``number``, and what asked devices that lack the delta's base
        (``lacking(base)``) need: a chain, or the whole model. If the last round froze arrays, publishes the others too,
        for a device that holds the frozen ones. listening: number of devices that receive the manifest.

        First weights that are sent as a seed have their own id as base, so that agents that know neither ``drawn`` nor
        chains fetch the whole model.
        """
        made = encode_model(
            target, before, codec, self._layout, self._method.down, self._config.fleet.seed
        )
        base = self._identity(before.published) if made.delta and before.published is not None else None
        model = self._identity(made.decoded)
        newest = Delta(number, model, made.codec, base, made.data)
        whole = len(payloads.encode("fp32", made.decoded))
        chain = chain_of(before, newest, whole, self._config.link.chunk_bytes)
        if made.codec in registry.DRAWN:
            base = model
        if not made.moving.everything:
            chain = replace(chain, earlier=())  # a device that holds the frozen arrays fetches the others whole
        reference = ModelRef(model, self.blob(made.data), made.codec, base=base, round=number)
        holders = lacking(base) if base is not None else ()
        ways = chain if chain.pays(holders, listening) else replace(chain, earlier=())
        if ways.earlier:
            reference = replace(reference, chain=self._listed(ways))
        if not all(map(ways.suits, holders)):
            reference = replace(reference, full=self.whole(made.decoded))
        return self.with_part(reference, made.decoded, made.moving), made, chain

    def with_part(self, reference: ModelRef, weights: Params, moving: Moving) -> ModelRef:
        """Adds to ``reference`` which arrays the delta has. If arrays are frozen and the whole model is published, also
        publishes the moving arrays, for a device that holds the frozen ones."""
        if moving.everything:
            return reference
        part = self.whole(moving.of(weights)) if reference.full is not None or reference.base is None else None
        return replace(reference, arrays=self._layout.places(moving), part=part,
                       rest=payloads.identity(moving.rest(weights)))

    def add_way(self, opened: OpenRound, holder: Holder) -> bool:
        """Publishes the round's model for a device that lacks the base of its delta: the chain if the device can use
        it, else the whole model. False if the whole model is published already."""
        if opened.model.base is None or opened.model.full is not None:
            return False
        if opened.model.chain is None and opened.chain.earlier and opened.chain.suits(holder):
            opened.model = replace(opened.model, chain=self._listed(opened.chain))
        else:
            whole = replace(opened.model, full=self.whole(opened.published))
            opened.model = self.with_part(whole, opened.published, self._layout.moving(whole.arrays))
        return True

    def _listed(self, chain: DeltaChain) -> Blob:
        """Publishes the links of a chain, and their list."""
        for link, one in zip(chain.links, chain.earlier, strict=True):
            self._publisher.blob(link.blob, one.data)
        return self.blob(chain.listed)

    def _identity(self, weights: Params) -> str:
        """The weights' id. The last id is cached, because the base of a round is the model of the previous round."""
        if self._known is None or self._known[0] is not weights:
            self._known = weights, payloads.identity(weights)
        return self._known[1]

    def whole(self, decoded: Params) -> Blob:
        """Publishes a whole model."""
        return self.blob(payloads.encode("fp32", decoded))

    # What one device alone receives -----------------------------------------------------------------------------------

    def per_device(self, state: ServerState, cohort: Sequence[str]) -> dict[str, Params]:
        models = per_device_models(self._method, state, cohort)
        return {name: self._layout.ordered(groups) for name, groups in models.items()}

    def publish_per_device(self, models: Mapping[str, Params]) -> tuple[Blob | None, frozenset[str]]:
        """(the list of blobs that a manifest names, the ids of the blobs): each device's own model, whole, in fp32."""
        if not models:
            self._per_device = None
            return None, frozenset()
        if self._per_device is None or self._per_device[0] is not models:
            blobs = {name: self.whole(groups) for name, groups in models.items()}
            listed = messages.encode(PerDevice(tuple(blobs), tuple(blobs.values())))
            self._per_device = models, self.blob(listed), frozenset(blob.id for blob in blobs.values())
        return self._per_device[1:]
