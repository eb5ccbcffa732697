"""Uploads in progress: offers, granted chunks, received chunks.

The aggregator grants chunks: at most 8 of one device and 100 in total may be under way, so that no broker's queue
overflows. Memory for uploads is bounded; further offers wait. If a device is silent, its chunks are granted again. A
device that stays silent is dropped, and offers its update again when it returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from fleet_core.base.errors import MessageError
from fleet_core.protocol import chunks
from fleet_core.protocol.chunks import Inbox
from fleet_core.protocol.device_messages import Down
from fleet_core.protocol.round_messages import UploadManifest

PER_DEVICE = 8
IN_ALL = 100  # 6 MB, which the sockets from broker to aggregator hold; a broker drops QoS 0 when these are full
RESERVED_BYTES = 16 << 20
SILENCE_S = 4.0
TICK_S = 0.25
MOST_GRANTS = 5  # to a silent device
WRONG_CHUNKS = 8
"""An update is given up after this many chunks that do not match what was announced."""


@dataclass
class _Upload:
    """granted: chunks that may arrive now. asked: grants since the last chunk arrived. wrong: chunks that did not match
    what was announced."""

    round: int
    manifest: UploadManifest
    inbox: Inbox | None = None
    granted: set[int] = field(default_factory=set)
    heard: float = 0.0
    asked: int = 0
    wrong: int = 0


class Uploads:
    """grant(device, message): sends a message to a device. clock(): seconds. limit: bytes per update. ``wrong_chunks``:
    device -> number of its chunks that did not match what was announced."""

    def __init__(self, grant: Callable[[str, Down], None], clock: Callable[[], float], limit: int):
        self._grant, self._clock, self._limit = grant, clock, limit
        self.wrong_chunks: dict[str, int] = {}
        self._uploads: dict[str, _Upload] = {}
        self._waiting: dict[str, None] = {}  # devices that wait for credit, in order
        self._outside: dict[str, None] = {}  # devices that wait for memory, in order
        self._credit = IN_ALL
        self._held_bytes = 0
        self._ticked = clock()

    def offer(self, device: str, round_number: int, manifest: UploadManifest) -> None:
        """Takes an offer. If the same offer comes again, its grants are repeated. Raises MessageError, before memory is
        allocated, for a blob that is too large or inconsistent."""
        manifest.blob.check(self._limit)
        known = self._uploads.get(device)
        if known is not None and known.round == round_number and known.manifest.id == manifest.id:
            self._take_credit_back(known)  # the device was restarted, or the grant was lost
        else:
            self._forget(device)
            self._uploads[device] = _Upload(round_number, manifest)
        self._queue(device)
        self._serve()
        if device in self._waiting or device in self._outside:
            self._grant(device, Down(t="need", r=round_number, id=manifest.id))  # no chunks yet; the device waits

    def chunk(self, device: str, round_number: int, k: int, data: bytes) -> tuple[UploadManifest, Inbox] | None:
        """Takes a chunk; returns (manifest, inbox) after the last one. Ignores a chunk that was not granted. Raises
        MessageError for bytes that do not match what was announced."""
        upload = self._uploads.get(device)
        if upload is None or upload.round != round_number or upload.inbox is None:
            return None
        self._put(device, upload, upload.inbox, k, data)
        upload.heard, upload.asked = self._clock(), 0
        if k in upload.granted:
            upload.granted.remove(k)
            self._credit += 1
        if upload.inbox.complete:
            self.drop(device)
            return upload.manifest, upload.inbox
        if len(upload.granted) <= PER_DEVICE // 2:  # so that the device need not wait for the next grant
            self._queue(device)
        self._serve()
        return None

    def _put(self, device: str, upload: _Upload, inbox: Inbox, k: int, data: bytes) -> None:
        try:
            inbox.put(k, data)
        except MessageError:
            upload.wrong += 1
            self.wrong_chunks[device] = self.wrong_chunks.get(device, 0) + 1
            if k in upload.granted:  # granted again now, so that a device that only sends wrong chunks is soon given up
                upload.granted.remove(k)
                self._credit += 1
                upload.heard, upload.asked = self._clock(), 0
                self._queue(device)
                self._serve()
            raise

    def given_up(self, device: str) -> UploadManifest | None:
        """Forgets an upload with ``WRONG_CHUNKS`` wrong chunks and returns its manifest, or None."""
        upload = self._uploads.get(device)
        if upload is None or upload.wrong < WRONG_CHUNKS:
            return None
        self.drop(device)
        return upload.manifest

    def drop(self, device: str) -> None:
        """Forgets a device's upload, and serves the waiting ones."""
        self._forget(device)
        self._serve()

    def clear(self) -> list[tuple[str, int, UploadManifest]]:
        """Forgets every upload; returns (device, round, manifest) of each."""
        dropped = [(device, upload.round, upload.manifest) for device, upload in self._uploads.items()]
        for device, _, _ in dropped:
            self._forget(device)
        return dropped

    def tick(self) -> None:
        """Grants chunks of silent devices again."""
        if self._clock() - self._ticked < TICK_S:
            return
        self._ticked = self._clock()
        for device, upload in list(self._uploads.items()):
            if upload.granted and self._clock() - upload.heard > SILENCE_S:
                self._take_credit_back(upload)
                if upload.asked > MOST_GRANTS:
                    self._forget(device)
                else:
                    self._queue(device)
        self._serve()

    def _queue(self, device: str) -> None:
        (self._outside if self._uploads[device].inbox is None else self._waiting)[device] = None

    def _serve(self) -> None:
        """Grants the next chunks, first come first served, as far as credit and memory allow."""
        while self._credit and (device := next(iter(self._waiting), None)) is not None:
            del self._waiting[device]
            self._give(device, self._uploads[device])
        while self._credit and (device := next(iter(self._outside), None)) is not None:
            upload = self._uploads[device]
            size = upload.manifest.blob.size
            if self._held_bytes and self._held_bytes + size > RESERVED_BYTES:
                return
            del self._outside[device]
            upload.inbox = Inbox(upload.manifest.blob, self._limit)
            self._held_bytes += size
            self._give(device, upload)

    def _give(self, device: str, upload: _Upload) -> None:
        if upload.inbox is None:
            return
        missing = (k for k in upload.inbox.missing(2 * PER_DEVICE) if k not in upload.granted)
        most = 1 if upload.asked else PER_DEVICE - len(upload.granted)  # a silent device gets one at a time
        wanted = list(itertools.islice(missing, min(most, self._credit)))
        if not wanted:
            return
        self._credit -= len(wanted)
        upload.granted.update(wanted)
        upload.heard, upload.asked = self._clock(), upload.asked + 1
        self._grant(device, Down(t="need", r=upload.round, id=upload.manifest.id, miss=chunks.as_ranges(wanted)))

    def _take_credit_back(self, upload: _Upload) -> None:
        self._credit += len(upload.granted)
        upload.granted.clear()

    def _forget(self, device: str) -> None:
        upload = self._uploads.pop(device, None)
        self._waiting.pop(device, None)
        self._outside.pop(device, None)
        if upload is not None:
            self._take_credit_back(upload)
            self._held_bytes -= upload.manifest.blob.size if upload.inbox is not None else 0
