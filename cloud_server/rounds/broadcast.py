"""What the aggregator publishes: the training model as a delta or whole, the served model, and the signed manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cloud_server.broker.publisher import Publisher
from cloud_server.records.checkpoint import Checkpoint, Checkpoints
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.ledger import Ledger
from cloud_server.records.ledger_tables import Round, Update
from cloud_server.rounds.open_round import OpenRound
from fleet_core.algorithms.interface import ServerState
from fleet_core.base import schema, trees
from fleet_core.base.trees import Params
from fleet_core.model import codecs
from fleet_core.model.layout import Layout
from fleet_core.protocol import cohort, messages
from fleet_core.protocol.messages import Blob, Cohort, Counted, Manifest, MethodRef, ModelRef, PerDevice, UploadRules

EXPIRY_MS = 30 * 24 * 3600 * 1000
COUNTED_ROUNDS = 4
LISTED_IDS = 200


@dataclass(frozen=True)
class Encoded:
    """A training model on its way down. data: in ``codec``. delta: it is one, to the weights published before. decoded:
    float32 weights as devices will hold them. lost: what a codec with feedback left out, or None."""

    data: bytes
    codec: str
    delta: bool
    decoded: Params
    lost: Params | None


def encode_model(model: Params, before: Checkpoint, codec: str, layout: Layout, groups: tuple[str, ...]) -> Encoded:
    """``model`` (float64) and what was lost ``before``: a delta to what devices hold, or the whole at the start."""
    held = before.published
    target = model if before.lost is None else trees.add(model, before.lost)
    if not held:
        data = codecs.encode("fp32", target)
        return Encoded(data, "fp32", False, codecs.decode("fp32", data, layout, groups), None)
    delta = _difference(target, held)
    data = codecs.encode(codec, delta)
    read = codecs.decode(codec, data, layout, groups) if codecs.codec(codec).lossy else delta
    decoded = codecs.moved(held, read)
    lost = _difference(target, decoded) if codecs.codec(codec).feedback else None
    return Encoded(data, codec, True, decoded, lost)


def _difference(left: Params, right: Params) -> dict[str, dict[str, Any]]:
    """left − right, computed in float64 and kept in float32: what that cannot hold is infinite, and refused later."""
    with np.errstate(over="ignore"):
        return trees.apply(lambda a, b: (a - b).astype(np.float32), left, right)


class Broadcast:
    """Makes references and manifests of one fleet and hands them to its publisher.

    layout: of what crosses the wire; layout_hash: of the model. upload_limit: bytes of the largest update. next_seq: of
    the next manifest. now: Unix seconds. ``served``: the served model that stays published, None before one was made.
    """

    def __init__(
        self, fleet: Fleet, layout: Layout, layout_hash: str, graph: bytes, ledger: Ledger, checkpoints: Checkpoints,
        publisher: Publisher, *, upload_limit: int, next_seq: Callable[[], int], now: Callable[[], float],
    ):
        self._config, self._method = fleet.config, fleet.method
        self._codec_up, self._codec_down = fleet.codec_up, fleet.codec_down
        self._hyper = schema.plain(fleet.hyper)
        self._signer = fleet.signer()
        self._layout, self._layout_hash, self._graph = layout, layout_hash, graph
        self._ledger, self._checkpoints, self._publisher = ledger, checkpoints, publisher
        self._upload_limit, self._next_seq, self._now = upload_limit, next_seq, now
        self._known: tuple[Params, str] | None = None
        self._per_device: tuple[Mapping[str, Params], Blob, frozenset[str]] | None = None
        self.served: ModelRef | None = None

    # The training model -----------------------------------------------------------------------------------------------

    def model(
        self, target: Params, before: Checkpoint, number: int, lacks: Callable[[str], bool]
    ) -> tuple[ModelRef, Encoded]:
        """The model of round ``number``; whole as well when somebody ``lacks(base)`` the base of its delta."""
        made = encode_model(target, before, self._codec_down, self._layout, self._method.down)
        base = self._identity(before.published) if made.delta and before.published is not None else None
        full = self._whole(made.decoded) if base is not None and lacks(base) else None
        model = self._identity(made.decoded)
        return ModelRef(model, self._blob(made.data), made.codec, base=base, full=full, round=number), made

    def _identity(self, weights: Params) -> str:
        """The base of a round is the model of the last one: its id is known."""
        if self._known is None or self._known[0] is not weights:
            self._known = weights, codecs.identity(weights)
        return self._known[1]

    def whole(self, opened: OpenRound, after: Checkpoint) -> None:
        """A device lacks the base of the round's delta: the same model whole, and the manifest that names it."""
        if opened.model.base is not None and opened.model.full is None:
            opened.model = replace(opened.model, full=self._whole(opened.published))
            self.round(opened, after)

    def _whole(self, decoded: Params) -> Blob:
        return self._blob(codecs.encode("fp32", decoded))

    def _blob(self, data: bytes) -> Blob:
        return self._publisher.blob(Blob.of(data, self._config.link.chunk_bytes), data)

    def per_device(self, state: ServerState, cohort: Sequence[str]) -> dict[str, Params]:
        """What each device of the cohort alone receives, float32; empty where the method has nothing of the kind."""
        if not self._method.per_device:
            return {}
        rule = self._method.server
        return {
            name: self._layout.ordered(trees.apply(lambda a: a.astype(np.float32), rule.per_device(state, name)))
            for name in cohort
        }

    def _published_per_device(self, per_device: Mapping[str, Params]) -> tuple[Blob | None, frozenset[str]]:
        """(the list that a manifest names, the ids of the blobs in it): each device's own, whole and in fp32."""
        if not per_device:
            self._per_device = None
            return None, frozenset()
        if self._per_device is None or self._per_device[0] is not per_device:
            blobs = {name: self._blob(codecs.encode("fp32", groups)) for name, groups in per_device.items()}
            listed = messages.encode(PerDevice(tuple(blobs), tuple(blobs.values())))
            self._per_device = per_device, self._blob(listed), frozenset(blob.id for blob in blobs.values())
        return self._per_device[1:]

    # The manifest -----------------------------------------------------------------------------------------------------

    def round(self, opened: OpenRound, after: Checkpoint) -> None:
        """Announces the open round that follows ``after``."""
        chosen = cohort.announce(self._config.fleet.seed, opened.number, list(opened.cohort))
        self._manifest(
            after, opened.number, chosen, opened.model, opened.scalars, is_open=True, per_device=opened.per_device
        )

    def idle(self, after: Checkpoint) -> None:
        """While nobody is asked to train: what was counted, and the served model."""
        if after.round:
            self.served = self.served or self._serve_reference_of(after)
            self._manifest(after, after.round, Cohort(devices=()), self.served, {}, is_open=False)

    def _manifest(
        self, after: Checkpoint, number: int, chosen: Cohort, model: ModelRef, scalars: Mapping[str, float], *,
        is_open: bool, per_device: Mapping[str, Params] | None = None,
    ) -> None:
        fleet, link = self._config.fleet, self._config.link
        own, theirs = self._published_per_device(per_device or {})
        graph = self._blob(self._graph)
        manifest = Manifest(
            v=messages.PROTOCOL,
            fleet=fleet.name,
            round=number,
            seq=self._next_seq(),
            exp=int(self._now() * 1000) + EXPIRY_MS,
            deadline_s=fleet.deadline_s,
            method=MethodRef(self._method.name, self._method.version, self._hyper),
            cohort=chosen,
            model=model,
            graph=graph,
            serve=self.served,
            layout=self._layout_hash,
            scalars={**scalars, "round": float(number), "seed": float(fleet.seed)},
            dual_epoch=after.state.dual_epoch,
            counted=self._counted(after.round),
            up=UploadRules(self._upload_limit, link.chunk_bytes, (self._codec_up,)),
            open=is_open,
            per_device=own,
        )
        keep = {blob.id for blob in manifest.blobs()} | theirs
        self._publisher.manifest(self._signer.sign(messages.encode(manifest)), keep)

    def _counted(self, closed: int) -> tuple[Counted, ...]:
        """Which updates the last closed rounds counted; older ones are answered when a device asks."""
        records = []
        for number in range(max(1, closed - COUNTED_ROUNDS + 1), closed + 1):
            rows = self._ledger.rows(Update, round=number, status="counted")
            marks = tuple(messages.mark(number, u.device, u.update_id) for u in rows)
            if len(marks) <= LISTED_IDS:
                records.append(Counted(number, ids=marks))
            else:
                records.append(Counted(number, blob=self._blob("\n".join(marks).encode())))
        return tuple(records)

    # The served model -------------------------------------------------------------------------------------------------

    def resume(self, closed: Checkpoint) -> None:
        """Serves what an earlier life of this aggregator had published, or was about to."""
        kept = self._checkpoints.served()
        if closed.round and self._is_served(closed.round) and (kept is None or kept[0] < closed.round):
            self.served = self._serve_reference_of(closed)
        elif kept is not None and kept[0] <= closed.round:
            self.served = self._serve_reference(*kept)

    def serve_if_due(self, closed: Checkpoint) -> None:
        if self._is_served(closed.round):
            self.served = self._serve_reference_of(closed)

    def _is_served(self, number: int) -> bool:
        return number % self._config.fleet.serve_every == 0 or number >= self._config.fleet.rounds

    def _serve_reference_of(self, closed: Checkpoint) -> ModelRef:
        """The served model of the last closed round, from now on the served one; kept for a restart."""
        decoded = trees.apply(lambda a: a.astype("float32"), closed.state.served)
        self._checkpoints.save_served(closed.round, decoded)
        reference = self._serve_reference(closed.round, decoded)
        row = self._ledger.rows(Round, round=closed.round)[0]
        self._ledger.put(replace(row, served_id=reference.model))
        return reference

    def _serve_reference(self, number: int, params: Params) -> ModelRef:
        """Whole and in full precision: it is what answers."""
        ordered = self._layout.ordered(params)
        return ModelRef(codecs.identity(ordered), self._blob(codecs.encode("fp32", ordered)), "fp32", round=number)
