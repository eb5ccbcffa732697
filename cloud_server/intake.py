"""Uploads under way: what was offered, what may be sent, what has come.

Credit is the receiver's: at most 8 chunks of one device and 500 in all are under way, so that no broker's queue
overflows; memory for uploads is bounded, further offers wait. Chunks are asked for again when the *device* is silent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fleet_core import messages
from fleet_core.errors import MessageError
from fleet_core.messages import Down, UploadManifest
from fleet_core.transfer import Inbox

PER_DEVICE = 8
IN_ALL = 500
RESERVED_BYTES = 48 << 20
SILENCE_S = 4.0


@dataclass
class _Upload:
    round: int
    manifest: UploadManifest
    inbox: Inbox | None = None
    granted: set[int] = field(default_factory=set)
    heard: float = 0.0


class Intake:
    """``grant(device, message)`` sends to a device; ``clock`` gives seconds; ``limit`` is in bytes per update."""

    def __init__(self, grant: Callable[[str, Down], None], clock: Callable[[], float], limit: int):
        self._grant, self._clock, self._limit = grant, clock, limit
        self._uploads: dict[str, _Upload] = {}

    def offer(self, device: str, round_number: int, manifest: UploadManifest) -> None:
        """A device's offer; the same one again repeats what is still wanted. Raises MessageError, before memory is
        taken, for a blob that is too large or inconsistent."""
        manifest.blob.check(self._limit)
        known = self._uploads.get(device)
        if known is not None and known.round == round_number and known.manifest.id == manifest.id:
            known.granted.clear()  # the device forgot, or our grant was lost
        else:
            self._uploads[device] = _Upload(round_number, manifest)
        self._serve(device)

    def chunk(self, device: str, round_number: int, k: int, data: bytes) -> tuple[UploadManifest, bytes] | None:
        """A chunk that came; (manifest, bytes) when it was the last. A chunk nobody asked for is ignored."""
        upload = self._uploads.get(device)
        if upload is None or upload.round != round_number or upload.inbox is None:
            return None
        upload.heard = self._clock()
        upload.inbox.put(k, data)
        upload.granted.discard(k)
        if upload.inbox.complete:
            self.drop(device)
            return upload.manifest, upload.inbox.take()
        if not upload.granted:
            self._serve(device)
        return None

    def drop(self, device: str) -> None:
        """Forgets a device's upload and lets those that wait go on."""
        if self._uploads.pop(device, None) is not None:
            for name in [name for name, upload in self._uploads.items() if not upload.granted]:
                self._serve(name)

    def clear(self) -> None:
        self._uploads.clear()

    def tick(self) -> None:
        """Asks silent devices again, and serves those that wait for credit."""
        for name, upload in list(self._uploads.items()):
            if upload.granted and self._clock() - upload.heard > SILENCE_S:
                upload.granted.clear()
            if not upload.granted:
                self._serve(name)

    def _serve(self, device: str) -> None:
        """Grants a device its next chunks, as far as credit and memory allow."""
        upload = self._uploads[device]
        credit = min(PER_DEVICE, IN_ALL - sum(len(u.granted) for u in self._uploads.values()))
        if credit <= 0 or not self._reserve(upload):
            return
        if upload.inbox is None:
            raise MessageError("an upload without memory")
        wanted = upload.inbox.missing(credit)
        upload.granted, upload.heard = set(wanted), self._clock()
        self._grant(device, Down(t="need", r=upload.round, id=upload.manifest.id, miss=messages.ranges(wanted)))

    def _reserve(self, upload: _Upload) -> bool:
        if upload.inbox is None:
            held = sum(u.inbox.blob.size for u in self._uploads.values() if u.inbox is not None)
            if held and held + upload.manifest.blob.size > RESERVED_BYTES:
                return False
            upload.inbox = Inbox(upload.manifest.blob, self._limit)
        return True
