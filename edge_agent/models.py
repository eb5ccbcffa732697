"""The models that a manifest names, as this device has them: its method, the weights held, and new ones from a blob."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edge_agent.home import Home, Weights
from edge_agent.service import Service
from fleet_core import codecs
from fleet_core.algorithms.methods import METHODS
from fleet_core.algorithms.seam import Method
from fleet_core.errors import CodecError, MessageError
from fleet_core.messages import Blob, Manifest, ModelRef

MAX_MODEL_BYTES = 1 << 30


class Models:
    """``training``: the last training model, None before one came. ``judged``: weights to serve next, or None."""

    def __init__(self, home: Home, service: Service, log: Callable[[str], None]):
        self._home, self._service, self._log = home, service, log
        self.training: Weights | None = home.weights("model")
        self.judged: Weights | None = home.weights("serve")

    @property
    def base(self) -> str:
        """Id of the training model that is held, or an empty text."""
        return "" if self.training is None else self.training.model

    def blob_for(self, ref: ModelRef) -> Blob | None:
        """The blob that gives this device the model: a delta where it holds the base, else the whole, else none."""
        if ref.base is None or (self.training is not None and self.training.model == ref.base):
            return ref.blob
        return ref.full

    def take_training(self, manifest: Manifest, blob_id: str, data: bytes) -> None:
        """Raises CodecError for a blob that is not the announced model; a delta that does not fit is let go of."""
        ref = manifest.model
        try:
            params = self._decode(manifest, ref, blob_id, data)
        except CodecError:
            if ref.base is None or blob_id != ref.blob.id:
                raise
            self._log("the delta does not fit what is held here: the whole model is needed")
            self.training = None
            return
        self.training = Weights(ref.model, ref.round, params)
        self._home.save_weights("model", self.training)

    def take_judged(self, manifest: Manifest, ref: ModelRef, blob_id: str, data: bytes) -> None:
        """Raises CodecError for a blob that is not the announced model."""
        self.judged = Weights(ref.model, ref.round, self._decode(manifest, ref, blob_id, data))

    def _decode(self, manifest: Manifest, ref: ModelRef, blob_id: str, data: bytes) -> dict[str, dict[str, Any]]:
        layout, groups = self._service.layout, method_of(manifest).shared
        delta = ref.base is not None and blob_id == ref.blob.id
        params = codecs.decode(ref.codec if blob_id == ref.blob.id else "fp32", data, layout, groups)
        if delta and self.training is not None:
            params = codecs.moved(self.training.params, params)
        if codecs.identity(params) != ref.model:
            raise CodecError("the decoded model is not the one that was announced", where=f"round {ref.round}")
        return params


def method_of(manifest: Manifest) -> Method:
    """The manifest's method. Raises MessageError for one, or a version of one, that this agent lacks."""
    reference = manifest.method
    method = METHODS.get(reference.name)
    if method is None or method.version != reference.version:
        raise MessageError(f"method {reference.name} version {reference.version}", hint="update this agent")
    return method
