"""The models that a manifest names: weights that this device holds, and new ones from a blob."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edge_agent.device.manifest_method import method_of, wire
from edge_agent.device.state import DeviceState, Weights
from edge_agent.inference.service import Service
from fleet_core.base.errors import CodecError
from fleet_core.codecs import payloads
from fleet_core.codecs.registry import DRAWN
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import Manifest, ModelRef

MAX_MODEL_BYTES = 1 << 30


class Models:
    """``base``: id of the training model on disk, or empty. ``served``: weights to serve next, or None."""

    def __init__(self, home: DeviceState, service: Service, log: Callable[[str], None]):
        self._home, self._service, self._log = home, service, log
        self.base = self._sound_base()
        self.served: Weights | None = None

    def _sound_base(self) -> str:
        """Drops a training model that a power cut damaged; it is fetched again."""
        weights = self._home.weights("model")
        if weights is not None and payloads.identity(weights.params) == weights.model:
            return weights.model
        self._home.drop_weights("model")
        return ""

    def weights(self, model: str) -> Weights | None:
        """The weights with this id, if the device has them."""
        if self.served is not None and self.served.model == model:
            return self.served
        slot = self._service.slots.slot_of(model)
        if slot:
            return self._service.slots.weights(slot)
        return self._home.weights("model") if self._home.held("model") == model else None

    def blob_for(self, ref: ModelRef) -> Blob | None:
        """The delta where the device holds its base, first weights as a seed, else the whole model, else None."""
        return ref.blob if ref.codec == DRAWN.name or ref.base in (None, self.base) else ref.full

    def take_training(self, manifest: Manifest, blob_id: str, data: bytes) -> None:
        """Raises CodecError for a blob that is not the announced model. A delta that does not fit drops the base, so
        that the whole model is fetched."""
        ref = manifest.model
        try:
            params = self._decode(manifest, method_of(manifest).down, ref, blob_id, data)
        except CodecError:
            if not self._as_delta(ref, blob_id):
                raise
            self._log("the delta does not fit what is held here: the whole model is needed")
            self.base = ""
            return
        self._home.save_weights("model", Weights(ref.model, ref.round, params), durable=False)
        self.base = ref.model

    def take_served(self, manifest: Manifest, ref: ModelRef, blob_id: str, data: bytes) -> None:
        """Raises CodecError for a blob that is not the announced model."""
        self.served = Weights(
            ref.model, ref.round, self._decode(manifest, method_of(manifest).shared, ref, blob_id, data)
        )

    def _decode(
        self, manifest: Manifest, groups: tuple[str, ...], ref: ModelRef, blob_id: str, data: bytes
    ) -> dict[str, dict[str, Any]]:
        layout = wire(self._service.layout, method_of(manifest))
        params = payloads.decode(ref.codec if blob_id == ref.blob.id else "fp32", data, layout, groups)
        if self._as_delta(ref, blob_id):
            held = self._home.weights("model")
            if held is None:
                raise CodecError("the base of the delta is not here", where=f"round {ref.round}")
            params = payloads.apply_delta(held.params, params)
        if payloads.identity(params) != ref.model:
            raise CodecError("the decoded model is not the one that was announced", where=f"round {ref.round}")
        return params

    def _as_delta(self, ref: ModelRef, blob_id: str) -> bool:
        """Whether the blob is a delta. One from zeros has the same bytes, and id, as the whole model."""
        if ref.base is None or blob_id != ref.blob.id or ref.codec == DRAWN.name:
            return False
        return ref.full is None or blob_id != ref.full.id or self.base == ref.base
