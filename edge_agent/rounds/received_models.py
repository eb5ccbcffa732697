"""The models that a manifest names: weights that this device holds, and new ones from a blob."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edge_agent.device.manifest_method import method_of, wire
from edge_agent.device.state import DeviceState, Weights
from edge_agent.inference.service import Service
from fleet_core.base import trees
from fleet_core.base.errors import CodecError, FleetError
from fleet_core.codecs.kinds.registry import DRAWN
from fleet_core.model import payloads
from fleet_core.protocol.chain_message import MAX_CHAIN_BYTES, Chain
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import Manifest, ModelRef

MAX_MODEL_BYTES = 1 << 30

Tree = dict[str, dict[str, Any]]


class Models:
    """``base``: id of the training model on disk, or empty. ``served``: weights to serve next, or None."""

    def __init__(self, home: DeviceState, service: Service, log: Callable[[str], None]):
        self._home, self._service, self._log = home, service, log
        self.base = self._sound_base()
        self.served: Weights | None = None
        self._part: tuple[str, tuple[str, ...], str] = ("", (), "")  # training model, groups, their id
        self._misfits = set[str]()  # ids of deltas and parts that did not fit what is held here
        self._rest: tuple[Any, bool] = (None, False)  # the last question to ``_has_rest``, and its answer
        self._chain: tuple[str, tuple[ModelRef, ...]] = ("", ())  # id of the last list of links, and its usable links

    def _sound_base(self) -> str:
        """Drops a training model that a power cut damaged; it is fetched again."""
        weights = self._home.weights("model")
        if weights is not None and payloads.identity(weights.params) == weights.model:
            return weights.model
        self._home.drop_weights("model")
        return ""

    def weights(self, model: str, groups: tuple[str, ...]) -> Weights | None:
        """The weights with this id, if the device has them: a served model, the training model, or its ``groups``."""
        if self.served is not None and self.served.model == model:
            return self.served
        slot = self._service.slots.slot_of(model)
        if slot:
            return self._service.slots.weights(slot)
        return self._training(groups) if self._is_training(model, groups) else None

    def _training(self, groups: tuple[str, ...]) -> Weights | None:
        held = self._home.weights("model") if self.base else None
        return None if held is None else replace(held, params=trees.only(held.params, groups))

    def _is_training(self, model: str, groups: tuple[str, ...]) -> bool:
        """Whether this is the id of the training model or of its ``groups``."""
        if not self.base or model == self.base:
            return model == self.base != ""
        if self._part[:2] != (self.base, groups):
            self._part = self.base, groups, self._id_of(groups)
        return model == self._part[2]

    def _id_of(self, groups: tuple[str, ...]) -> str:
        """The id of the training model's ``groups``; empty without a training model."""
        whole = self._home.weights("model")
        if whole is None:
            return ""
        part = trees.only(whole.params, groups)
        return whole.model if part.keys() == whole.params.keys() else payloads.identity(part)

    def blob_for(self, ref: ModelRef, groups: tuple[str, ...]) -> Blob | None:
        """The delta if the device holds its base, or first weights as a seed; else the moving part, if it holds the
        rest; else the whole model, or None. groups: of the model."""
        if ref.codec in DRAWN or self._fits(ref, groups):
            return ref.blob
        if ref.part is not None and ref.part.id not in self._misfits and self._has_rest(ref, groups):
            return ref.part
        return ref.blob if ref.base is None else ref.full

    def _at_once(self, ref: ModelRef, groups: tuple[str, ...]) -> bool:
        return ref.codec in DRAWN or ref.base is None or self._fits(ref, groups)

    def _fits(self, ref: ModelRef, groups: tuple[str, ...]) -> bool:
        return ref.base is not None and ref.blob.id not in self._misfits and self._holds(ref.base, groups)

    def _holds(self, model: str, groups: tuple[str, ...]) -> bool:
        """Whether the device has the weights; of the training model only the file's header is read."""
        is_here = model == self.base and self._home.held("model") == model
        return is_here or self.weights(model, groups) is not None

    def _has_rest(self, ref: ModelRef, groups: tuple[str, ...]) -> bool:
        served = None if self.served is None else self.served.model
        asked = ref.rest, ref.arrays, groups, self.base, served, self._service.model
        if self._rest[0] != asked:
            self._rest = asked, self._with_rest(ref, groups) is not None
        return self._rest[1]

    def _with_rest(self, ref: ModelRef, groups: tuple[str, ...]) -> Tree | None:
        """Weights held here that have the frozen arrays of ``ref``, or None."""
        moving = self._service.layout.moving(ref.arrays)
        for held in (self._training(groups), self.served, self._service.slots.weights()):
            if held is not None and payloads.identity(moving.rest(held.params)) == ref.rest:
                return held.params
        return None

    def needs_training_base(self, manifest: Manifest, ref: ModelRef) -> bool:
        """Whether the served model is a delta to the training model held here. It must be fetched before the next
        training model replaces its base."""
        groups = method_of(manifest).shared
        if ref.base is None or ref.model == manifest.model.model or ref.blob in manifest.model.blobs():
            return False
        held = self.weights(ref.model, groups) is not None
        return not held and self._is_training(ref.base, groups) and self._fits(ref, groups)

    def next_blob(self, manifest: Manifest) -> Blob | None:
        """The blob to fetch next for the training model: if its base is not here, the list of its chain, then each link
        in turn; else what ``blob_for`` gives."""
        ref, groups = manifest.model, method_of(manifest).down
        chain = self._chain_of(ref, groups)
        if chain is not None and self._chain[0] != chain.id:
            return chain
        link = self._link(manifest)
        return self.blob_for(ref, groups) if link is None else link.blob

    def _chain_of(self, ref: ModelRef, groups: tuple[str, ...]) -> Blob | None:
        """The list of the links to the base, if the base is not here and the list may help."""
        if ref.chain is None or ref.chain.size > MAX_CHAIN_BYTES or ref.blob.id in self._misfits:
            return None
        return None if self._at_once(ref, groups) else ref.chain

    def _link(self, manifest: Manifest) -> ModelRef | None:
        """The link of the chain to fetch now, the last one whose base is here; or None."""
        ref, (listed, links) = manifest.model, self._chain
        if ref.chain is None or ref.chain.id != listed or self._chain_of(ref, method_of(manifest).down) is None:
            return None
        here = {self.base, *self._service.slots.models()}
        return next((link for link in reversed(links) if link.base is None or link.base in here), None)

    def named(self, manifest: Manifest) -> set[str]:
        """Ids of the blobs that lead to the training model."""
        link = self._link(manifest)
        return {blob.id for blob in manifest.model.blobs()} | (set() if link is None else {link.blob.id})

    def adopt_training(self, manifest: Manifest) -> bool:
        """Takes the training model from what is held here, such as a served model with the same weights."""
        ref = manifest.model
        if self.base == ref.model:
            return True
        held = self.weights(ref.model, method_of(manifest).down)
        if held is not None:
            self._keep_training(ref, held.params)
        return held is not None

    def _keep_training(self, ref: ModelRef, params: Tree) -> None:
        self._home.save_weights("model", Weights(ref.model, ref.round, params), durable=False)
        self.base = ref.model

    def take_training(self, manifest: Manifest, blob_id: str, data: bytes) -> None:
        """Raises CodecError for a blob that is not the announced model. A delta that does not fit drops the base, so
        that the whole model is fetched."""
        ref = manifest.model
        if ref.chain is not None and blob_id == ref.chain.id:
            return self._take_chain(ref, data)
        link = self._link(manifest)
        if link is not None and blob_id == link.blob.id:
            return self._take_link(manifest, link, data)
        params = self._taken(manifest, method_of(manifest).down, ref, blob_id, data)
        if params is None:
            self.base = ""
        else:
            self._keep_training(ref, params)

    def _take_chain(self, ref: ModelRef, data: bytes) -> None:
        """Takes the list's links; none if they do not lead to the base: then the whole model is fetched."""
        assert ref.chain is not None
        try:
            self._chain = ref.chain.id, Chain.decode(data, ref.base).links
        except FleetError as error:
            self._log(f"the chain of deltas cannot be used, the whole model is needed: {error}")
            self._chain = ref.chain.id, ()

    def _take_link(self, manifest: Manifest, link: ModelRef, data: bytes) -> None:
        """Applies a link. If it is not the announced one, the whole model is fetched."""
        try:
            params = self._decode(manifest, method_of(manifest).down, link, link.blob.id, data)
        except CodecError as error:
            self._log(f"the chain of deltas cannot be used, the whole model is needed: {error}")
            self.base, self._chain = "", (self._chain[0], ())
        else:
            self._keep_training(link, params)

    def take_served(self, manifest: Manifest, ref: ModelRef, blob_id: str, data: bytes) -> None:
        """Raises CodecError for a blob that is not the announced model. After a delta that does not fit, the whole
        model is fetched."""
        params = self._taken(manifest, method_of(manifest).shared, ref, blob_id, data)
        self.served = None if params is None else Weights(ref.model, ref.round, params)

    def _taken(
        self, manifest: Manifest, groups: tuple[str, ...], ref: ModelRef, blob_id: str, data: bytes
    ) -> Tree | None:
        """The decoded weights; None for a delta or a part that does not fit what is held here."""
        try:
            return self._decode(manifest, groups, ref, blob_id, data)
        except CodecError:
            delta = self._as_delta(ref, groups, blob_id)
            if not delta and not _is_part(ref, blob_id):
                raise
            self._log(f"the {'delta' if delta else 'part'} does not fit what is held here: the whole model is needed")
            self._misfits.add(blob_id)
            return None

    def _decode(
        self, manifest: Manifest, groups: tuple[str, ...], ref: ModelRef, blob_id: str, data: bytes
    ) -> Tree:
        layout = wire(self._service.layout, method_of(manifest))
        delta, part = self._as_delta(ref, groups, blob_id), _is_part(ref, blob_id)
        sent = layout.part(self._service.layout.moving(ref.arrays)) if delta or part else layout
        params = payloads.decode(ref.codec if blob_id == ref.blob.id else "fp32", data, sent, groups)
        if ref.base is not None and delta:
            held = self.weights(ref.base, groups)
            if held is None:
                raise CodecError("the base of the delta is not here", where=f"round {ref.round}")
            params = payloads.apply_delta(held.params, params)
        elif part:
            rest = self._with_rest(ref, groups)
            if rest is None:
                raise CodecError("the arrays that the part leaves out are not here", where=f"round {ref.round}")
            params = layout.ordered(trees.merged(rest, params))
        if payloads.identity(params) != ref.model:
            raise CodecError("the decoded model is not the one that was announced", where=f"round {ref.round}")
        return params

    def _as_delta(self, ref: ModelRef, groups: tuple[str, ...], blob_id: str) -> bool:
        """Whether the blob is a delta. One from zeros has the same bytes, and id, as the values themselves."""
        if ref.base is None or blob_id != ref.blob.id or ref.codec in DRAWN:
            return False
        values = {other.id for other in (ref.full, ref.part) if other is not None}
        return blob_id not in values or self._fits(ref, groups)


def _is_part(ref: ModelRef, blob_id: str) -> bool:
    return ref.part is not None and blob_id == ref.part.id
