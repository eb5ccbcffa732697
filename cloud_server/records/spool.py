"""Verified updates of the open round on disk, so that a killed aggregator loses none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from fleet_core.algorithms import aggregation
from fleet_core.algorithms.interface import Payload, Update
from fleet_core.base import storage
from fleet_core.base.errors import MessageError, StateError
from fleet_core.model import payloads
from fleet_core.model.layout import Layout
from fleet_core.protocol import messages
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import UploadManifest

MAX_MANIFEST_BYTES = 1 << 26


class Spool:
    """``{folder}/{round}/{device}.update`` holds the received payload, ``{device}.json`` its manifest."""

    def __init__(self, folder: Path, layout: Layout, groups: tuple[str, ...]):
        self._folder, self._layout, self._groups = folder, layout, groups

    def put(self, round_number: int, device: str, manifest: UploadManifest, data: bytes) -> None:
        """Stores an update. The manifest is written last: without it the update does not count as stored. A power cut
        may lose the update; the device keeps it until a signed record says that it was counted, and offers it again."""
        self.drop(round_number, device)
        folder = self._folder / str(round_number)
        storage.write_atomic(folder / f"{device}.update", data, durable=False)
        storage.write_atomic(folder / f"{device}.json", messages.encode(manifest), durable=False)

    def drop(self, round_number: int, device: str) -> None:
        """Deletes a device's update."""
        (self._folder / str(round_number) / f"{device}.json").unlink(missing_ok=True)

    def manifests(self, round_number: int) -> dict[str, UploadManifest]:
        """Device -> manifest, in the order of aggregation, without manifests damaged by a power cut. Raises StateError
        if the disk cannot be read."""
        paths = {path.stem: path for path in (self._folder / str(round_number)).glob("*.json")}
        found: dict[str, UploadManifest] = {}
        for name in aggregation.order(paths):
            try:
                data = storage.read_bytes(paths[name], limit=MAX_MANIFEST_BYTES)
                found[name] = messages.decode(UploadManifest, data, limit=MAX_MANIFEST_BYTES)
            except (MessageError, StateError) as error:
                if storage.is_disk_error(error):
                    raise
        return found

    def updates(self, round_number: int, counted: Mapping[str, UploadManifest]) -> Updates:
        """The ``counted`` updates (device -> manifest). They can be iterated any number of times; only one of them is
        in memory at a time."""
        return Updates(self, round_number, counted)

    def check(self, round_number: int, device: str, manifest: UploadManifest) -> None:
        """Raises StateError if the stored update does not match its manifest."""
        if Blob.of(self.data(round_number, device, manifest), manifest.blob.chunk) != manifest.blob:
            raise StateError("the update on the disk is not the one that its manifest names", where=device)

    def read(self, round_number: int, device: str, manifest: UploadManifest) -> Update:
        """The update with float32 arrays. Raises StateError or CodecError if it cannot be read."""
        part = self._layout.part(self._layout.moving(manifest.train))
        params = payloads.decode(manifest.codec, self.data(round_number, device, manifest), part, self._groups)
        return Update(device, Payload(params, manifest.scalars), manifest.samples)

    def data(self, round_number: int, device: str, manifest: UploadManifest) -> bytes:
        """The payload as it was received. Raises StateError if it cannot be read."""
        path = self._folder / str(round_number) / f"{device}.update"
        return storage.read_bytes(path, limit=manifest.blob.size)

    def clear(self, keep: int) -> None:
        """Deletes every round except ``keep``."""
        for folder in self._folder.glob("*"):
            if folder.name != str(keep):
                shutil.rmtree(folder, ignore_errors=True)


class Updates:
    """Updates of one round in the order of aggregation, read from disk at every iteration."""

    def __init__(self, spool: Spool, round_number: int, counted: Mapping[str, UploadManifest]):
        self._spool, self._round, self._counted = spool, round_number, counted

    def __iter__(self) -> Iterator[Update]:
        for device in aggregation.order(self._counted):
            yield self._spool.read(self._round, device, self._counted[device])
