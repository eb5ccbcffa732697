"""What this device alone receives to train on (pFedHN): its line of the round's list, then the blob named there.

The signed manifest has the id of the list, and the list the ids of the devices' blobs: a device accepts only what the
aggregator made for it.
"""

from __future__ import annotations

from edge_agent.connection.blob_download import Fetcher
from edge_agent.device.manifest_method import method_of, wire
from edge_agent.device.state import DeviceState, Weights
from edge_agent.inference.service import Service
from edge_agent.rounds.received_models import MAX_MODEL_BYTES
from fleet_core.base.errors import MessageError
from fleet_core.model import payloads
from fleet_core.protocol import messages
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import Manifest
from fleet_core.protocol.round_messages import PerDevice as Listed

NAME = "given"
MAX_LIST_BYTES = 1 << 26


class DevicePayload:
    """``blob``: this device's own weights, known once the round's list arrived."""

    def __init__(self, device: str, home: DeviceState, service: Service, fetcher: Fetcher):
        self._device, self._home, self._service, self._fetcher = device, home, service, fetcher
        self._listed = ""
        self.blob: Blob | None = None

    def is_here(self, manifest: Manifest) -> bool:
        """Whether everything arrived; fetches what is missing. Raises MessageError for a list without this device or a
        blob that is too large."""
        if manifest.per_device is None:
            return True
        if self._listed != manifest.per_device.id:
            self._fetcher.start(manifest.per_device, MAX_LIST_BYTES, "model")
            return False
        if self.blob is None:
            raise MessageError("the round has no weights for this device", where=f"round {manifest.round}")
        if self._home.held(NAME) != self.blob.id:
            self._fetcher.start(self.blob, MAX_MODEL_BYTES, "model")
            return False
        return True

    def named(self, manifest: Manifest) -> set[str]:
        """Ids of blobs to fetch beside those in the manifest."""
        listed = manifest.per_device is not None and manifest.per_device.id == self._listed
        return {self.blob.id} if listed and self.blob is not None else set()

    def is_of(self, manifest: Manifest, blob_id: str) -> bool:
        """Whether the blob is the round's list, or this device's own in it."""
        return manifest.per_device is not None and blob_id in {manifest.per_device.id, *self.named(manifest)}

    def take(self, manifest: Manifest, blob_id: str, data: bytes) -> None:
        """Raises MessageError for a malformed list, CodecError for weights of another form."""
        if manifest.per_device is not None and blob_id == manifest.per_device.id:
            listed = messages.decode(Listed, data, limit=MAX_LIST_BYTES)
            self.blob = listed.of(self._device)
            self._listed = blob_id
            return
        method = method_of(manifest)
        params = payloads.decode("fp32", data, wire(self._service.layout, method), method.per_device)
        self._home.save_weights(NAME, Weights(blob_id, manifest.round, params), durable=False)
