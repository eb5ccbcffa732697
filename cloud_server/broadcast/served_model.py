"""The served model, published after a round in the form for which devices fetch the fewest bytes.

Fleet and simulation share it. Each served model is encoded against the aggregator's weights, so errors do not add up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from cloud_server.broadcast.models_down import ModelsDown, encode_model
from cloud_server.broadcast.round_codecs import RoundCodecs
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device, Round
from cloud_server.records.checkpoint import Checkpoint, Checkpoints, ServedModel
from cloud_server.records.fleet_folder import Fleet
from fleet_core.algorithms.interface import Method
from fleet_core.base import trees
from fleet_core.base.moving_arrays import Moving
from fleet_core.base.trees import Params
from fleet_core.model import payloads
from fleet_core.model.layout import Layout
from fleet_core.protocol.round_messages import ModelRef

PRECISION = 2.0**-8
"""Largest distance of a served model from the aggregator's weights, relative to their norm. Both are Euclidean norms
over all values. A codec that loses more is not used."""
FLOAT32 = 2.0**-24
FINER = "int8"
SERVED = 1
"""Third part of the seed of a codec that draws; 0 is the training model."""


@dataclass(frozen=True)
class Audience:
    """Numbers of devices that fetch a served model. everyone: all. members: those that train. trained: those that were
    asked in the round and hold its training model. asked: share of the members that the next round asks, which get its
    training model anyway; 0 after the last round."""

    everyone: int
    members: int
    trained: int
    asked: float


def asked_next(cohort: int, members: int, last: bool) -> float:
    """``Audience.asked`` for cohorts of ``cohort`` members, 0 for all."""
    return 0.0 if last else min(1.0, (cohort or members) / members)


def encode_served(
    method: Method, closed: Checkpoint, before: ServedModel | None, codec: str, layout: Layout, seed: int,
    audience: Audience,
) -> ServedModel:
    """The served model of a closed round, in the form for which the audience fetches the fewest bytes. before: the
    previous served model. codec: of the next round's model. layout: of what crosses the wire. seed: of the fleet or
    run."""
    exact = layout.ordered(trees.only(closed.state.served, method.shared))
    weights = trees.apply(lambda a: np.asarray(a, np.float32), exact)
    source, moving = payloads.identity(weights), closed.moving
    if before is not None and before.weights.keys() == exact.keys():
        moving = _moving(closed, exact, before.weights)
        weights = layout.ordered(trees.merged(weights, moving.rest(before.weights)))
    whole = ServedModel(closed.round, weights, moving=moving)
    size = len(payloads.encode("fp32", weights if before is None else moving.of(weights)))
    cheapest, least = whole, float(audience.everyone * size)
    for offer, have, need in _offers(method, closed, before, codec, layout, seed, audience, exact):
        total = need * len(offer.data) + (audience.everyone - have) * size
        if total < least:
            cheapest, least = offer, total
    return replace(cheapest, source=source)


def _offers(
    method: Method, closed: Checkpoint, before: ServedModel | None, codec: str, layout: Layout, seed: int,
    audience: Audience, exact: Params,
) -> Iterator[tuple[ServedModel, float, float]]:
    """Forms with a delta: (the served model, how many devices need not fetch it whole, how many of these fetch the
    delta)."""
    published = trees.only(closed.published or {}, method.shared)
    has_base = bool(exact) and published.keys() == exact.keys()
    following = _next_training_model(method, closed, codec, layout, seed, exact)
    if following is not None:
        at_once = audience.asked * audience.members
        later = (1 - audience.asked) * audience.trained if following.base else 0.0
        yield following, at_once + later, later
    if has_base and (following is None or following.base is None):
        delta = _delta(closed, exact, published, codec, layout, seed)
        if delta is not None:
            yield delta, audience.trained, audience.trained
    if before is not None and before.weights.keys() == exact.keys() and exact:
        delta = _delta(closed, exact, before.weights, codec, layout, seed)
        if delta is not None:
            yield delta, audience.everyone, audience.everyone


def _next_training_model(
    method: Method, closed: Checkpoint, codec: str, layout: Layout, seed: int, exact: Params
) -> ServedModel | None:
    """The next round's training model, if it is the model to serve: devices that train then fetch nothing more. None
    if the two differ. If the training model has groups that are not served, devices that do not train get no delta."""
    groups = method.server.broadcast(closed.state).groups
    same = trees.only(groups, method.shared)
    if not closed.published or same.keys() != exact.keys() or _distance(same, exact) > FLOAT32:
        return None
    made = encode_model(groups, closed, codec, layout, method.down, seed)
    weights = layout.ordered(trees.only(made.decoded, method.shared))
    if _distance(weights, exact) > PRECISION:
        return None
    if not made.delta or method.down != method.shared:
        return ServedModel(closed.round, weights, following=True, moving=made.moving)
    base = payloads.identity(closed.published)
    return ServedModel(closed.round, weights, made.codec, base, made.data, following=True, moving=made.moving)


def _delta(
    closed: Checkpoint, exact: Params, base: Params, codec: str, layout: Layout, seed: int
) -> ServedModel | None:
    """A delta to ``base`` in ``codec``, or in a finer codec if that one loses too much; None if no codec is fine
    enough."""
    moving = _moving(closed, exact, base)
    part, moved = layout.part(moving), moving.of(exact)
    change = trees.apply(lambda a, b: np.asarray(a - b, np.float32), moved, base)
    for name in dict.fromkeys((codec, FINER)):
        data = payloads.encode(name, change, (seed, closed.round, SERVED))
        weights = payloads.apply_delta(base, payloads.decode(name, data, part, tuple(exact)))
        if _distance(weights, exact) <= PRECISION:
            identity = payloads.identity(base)
            return ServedModel(closed.round, layout.ordered(weights), name, identity, data, moving=moving)
    return None


def _moving(closed: Checkpoint, exact: Params, base: Params) -> Moving:
    """The arrays that a delta to ``base`` has to contain: those that the closed round trained, and frozen ones that
    differ from ``base`` by more than the precision."""
    frozen = closed.moving.rest(exact)
    return Moving(frozenset(
        f"{g}/{n}" for g, named in frozen.items() for n, array in named.items()
        if _distance({g: {n: base[g][n]}}, {g: {n: array}}) <= PRECISION
    ))


def fetched_bytes(
    made: ServedModel, before: ServedModel | None, everyone: Collection[str], trained: Collection[str],
    asked: Collection[str], holding: Collection[str] = (),
) -> int:
    """Payload bytes of all devices for a new served model. trained: devices that hold the training model of its round.
    asked: devices in the next round. holding: devices whose training model has the same frozen arrays."""
    whole, part = (len(payloads.encode("fp32", weights)) for weights in (made.weights, made.moving.of(made.weights)))
    known = before is not None and payloads.identity(before.weights) == made.base
    held = everyone if before is not None and same_rest(made.moving, before.weights, made.weights) else holding
    free = set(asked) if made.following else set[str]()
    if made.base == payloads.identity(made.weights):  # the round changed nothing
        free |= set(trained)
    return sum(
        len(made.data) if made.base is not None and (known or name in trained) else part if name in held else whole
        for name in everyone if name not in free
    )


def same_rest(moving: Moving, left: Params, right: Params) -> bool:
    """Whether there are frozen arrays and they have the same bits in both models."""
    rest = moving.rest(right)
    return bool(rest) and payloads.identity(moving.rest(left)) == payloads.identity(rest)


def is_new(made: ServedModel, before: ServedModel, min_change: float, *, last: bool) -> bool:
    """Whether devices should get ``made`` in place of ``before``. last: no other served model follows."""
    if made.source == before.source or payloads.identity(made.weights) == payloads.identity(before.weights):
        return False
    return last or made.weights.keys() != before.weights.keys() or (
        _distance(made.weights, before.weights) >= min_change)


def _distance(left: Params, right: Params) -> float:
    """‖left − right‖ / ‖right‖; 0 if both are equal, infinite if only ``right`` is zero."""
    apart = trees.norm(trees.apply(lambda a, b: np.asarray(a, np.float64) - b, left, right))
    return float(apart / scale) if (scale := trees.norm(trees.widened(right))) else (np.inf if apart else 0.0)


class ServedModels:
    """Publishes a fleet's served models and keeps the last one for a restart.

    layout: of what crosses the wire. ``reference``: the served model that stays published, None before there is one.
    """

    def __init__(
        self, fleet: Fleet, layout: Layout, ledger: Ledger, checkpoints: Checkpoints, models: ModelsDown,
        codecs: RoundCodecs,
    ):
        self._config, self._method, self._codecs = fleet.config.fleet, fleet.method, codecs
        self._layout, self._ledger, self._checkpoints, self._models = layout, ledger, checkpoints, models
        self._kept: ServedModel | None = None
        self.reference: ModelRef | None = None

    def resume(self, closed: Checkpoint) -> None:
        """After a restart: serves what was published before, or was about to be."""
        kept = self._checkpoints.served()
        if kept is not None and kept.round <= closed.round:
            self._publish(replace(kept, weights=self._layout.ordered(kept.weights)))
            self._note()
        if closed.round and (self._kept is None or self._kept.round < closed.round):
            self.serve_if_due(closed)

    def serve_if_due(self, closed: Checkpoint) -> None:
        if self._last(closed) or closed.round % self._config.serve_every == 0:
            self.serve(closed, last=self._last(closed))

    def serve(self, closed: Checkpoint, *, last: bool = False) -> None:
        """Publishes the served model of a closed round, unless it differs too little from the previous one. last: no
        further round opens."""
        kept, codec = self._kept, self._codecs.of_round(closed.round + 1)["down"].codec
        made = encode_served(
            self._method, closed, kept, codec, self._layout, self._config.seed, self._audience(closed, last)
        )
        if kept is not None and not is_new(made, kept, self._config.serve_min_change, last=last):
            if not self._method.keeps_weights:
                return
            made = replace(kept, round=closed.round)  # the weights that devices keep themselves are new
        self._checkpoints.keep_served_round(closed.round)
        self._checkpoints.save_served(made)
        self._publish(made)
        self._note()

    def _note(self) -> None:
        """Writes the id of the published model to its round's row, unless that round is folded."""
        assert self.reference is not None
        for row in self._ledger.rows(Round, round=self.reference.round):
            if row.served_id != self.reference.model:
                self._ledger.put(replace(row, served_id=self.reference.model))

    def _last(self, closed: Checkpoint) -> bool:
        return closed.round >= self._config.rounds

    def _audience(self, closed: Checkpoint, last: bool) -> Audience:
        row = self._ledger.rows(Round, round=closed.round)[0]
        members = max(1, row.members)
        everyone = sum(device.status == "enrolled" for device in self._ledger.each(Device))
        return Audience(everyone, members, len(row.cohort), asked_next(self._config.cohort, members, last))

    def _publish(self, served: ServedModel) -> None:
        model, whole = payloads.identity(served.weights), self._models.whole(served.weights)
        reference = ModelRef(model, whole, "fp32", round=served.round)
        if served.base is not None:
            delta = self._models.blob(served.data)
            reference = ModelRef(model, delta, served.codec, served.base, whole, served.round)
        self._kept, self.reference = served, self._models.with_part(reference, served.weights, served.moving)
