"""Retained chunks and the signed manifest, in order and at the broker's pace.

What must stay at the broker is remembered, and published again when a broker comes back without it. A broker keeps what
it took in the order in which it came, so one that still has the last chunk of a blob has the blob: after a reconnect
the ends of blobs and the manifest are asked back, and only what does not come is published. Chunks of blobs that no
manifest names any more are cleared; which ones lie at the broker is on disk, so that a restarted aggregator clears
those of its earlier life too.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from fleet_core.base import storage
from fleet_core.link.interface import Link
from fleet_core.protocol import topics
from fleet_core.protocol.chunks import Blob, cut

UNDER_WAY = 100
MAX_SHELF_BYTES = 1 << 20
AGAIN_S = 30.0
RETAINED_S = 2.0  # for what a broker still has to come back


class Publisher:
    """Call ``tick`` often; it sends while fewer than 100 publishes wait for their acknowledgement.

    shelf: the file that names the blobs (id -> chunks) that may lie at the broker.
    """

    def __init__(
        self, fleet: str, link: Link, shelf: Path, *, clock: Callable[[], float], log: Callable[[str], None]
    ):
        self._fleet, self._link, self._shelf = fleet, link, shelf
        self._clock, self._log = clock, log
        self._blobs: dict[str, tuple[Blob, bytes]] = {}
        self._stale = self._read()
        self._manifest: bytes | None = None
        self._queue: deque[tuple[str, bytes, str]] = deque()  # topic, payload, the blob that is gone with it
        self._asked: dict[str, bytes] = {}  # topic -> payload: asked back, not here yet
        self._asked_at = self._sent_at = 0.0
        self._again_at = -math.inf
        self._proving = self._proved = False
        self._in_a_row = 0  # times that something was lost

    def blob(self, blob: Blob, data: bytes) -> Blob:
        """Publishes a blob unless it is there already."""
        if blob.id not in self._blobs:
            self._blobs[blob.id] = (blob, data)
            self._stale.pop(blob.id, None)
            self._note()
            self._send(blob, data)
        return blob

    def manifest(self, signed: bytes, keep: set[str]) -> None:
        """Publishes the round after its blobs, then clears every blob that ``keep`` does not name."""
        self._manifest = signed
        self._queue.append((topics.current(self._fleet), signed, ""))
        for blob_id in [name for name in self._blobs if name not in keep]:
            self._stale[blob_id] = self._blobs.pop(blob_id)[0].n
        self._clear_stale()
        self._note()

    # After a reconnect ------------------------------------------------------------------------------------------------

    def reconnected(self) -> None:
        """Asks back what must be at the broker; nothing is sent before it is clear what is lost."""
        self._link.unsubscribe(*self._asked)
        self._queue.clear()
        self._proving, self._proved = False, False
        self._ask_back()
        if not self._asked:
            self._send_lost({})

    def _ask_back(self) -> None:
        self._asked = {topic: part for blob, data in self._blobs.values() for topic, part in self._ends(blob, data)}
        if self._manifest is not None:
            self._asked[topics.current(self._fleet)] = self._manifest
        self._asked_at = self._clock()
        self._link.subscribe(*self._asked)

    def _prove(self) -> None:
        """What was published on a new connection is asked back once: a broker of MQTT 3.1.1 does not say that it drops
        a message, and devices that get nothing would say nothing."""
        taken = self._link.unacknowledged == 0 or self._clock() - self._sent_at > RETAINED_S
        if not self._proved and self._manifest is not None and self.idle and taken:
            self._proving = self._proved = True
            self._ask_back()

    def heard(self, topic: str, payload: bytes) -> None:
        """What the broker has under ``topic``."""
        if self._asked.get(topic) == payload:
            self._link.unsubscribe(topic)
            del self._asked[topic]
            if not self._asked:
                self._proved, self._in_a_row = True, 0
                self._send_lost({})

    def again(self) -> None:
        """A device misses chunks that the broker took: all of them once more, but not at every device's word."""
        if self.idle and self._clock() - self._again_at > AGAIN_S:
            self._again_at = self._clock()
            self._log("a device misses chunks at the broker: published again")
            for blob, data in self._blobs.values():
                self._send(blob, data)

    def _look_for_lost(self) -> None:
        """What did not come back in time is lost."""
        if self._asked and self._clock() - self._asked_at > RETAINED_S:
            self._link.unsubscribe(*self._asked)
            lost, self._asked = self._asked, {}
            self._in_a_row += 1
            if self._proving or self._in_a_row > 1:
                self._log(self._suspicion(lost))
            else:
                self._log(f"the broker came back without {len(lost)} of the retained messages: published again")
            self._send_lost(lost)

    def _suspicion(self, lost: Mapping[str, bytes]) -> str:
        largest = max(map(len, lost.values()))
        return (f"the broker takes and does not give back {', '.join(sorted(lost)[:3])}: it may deny them (access "
                f"control), or drop messages of {largest} bytes (its size limit; link.chunk_bytes sets ours)")

    def _send_lost(self, lost: Mapping[str, bytes]) -> None:
        """Blobs first, what came up meanwhile, the manifest unless a newer one is among that, and what is to go."""
        newer, self._queue = self._queue, deque()
        for blob, data in self._blobs.values():
            if any(topic in lost for topic, _ in self._ends(blob, data)):
                self._send(blob, data)
        self._queue += newer
        if self._manifest is not None:
            if lost.get(topics.current(self._fleet)) == self._manifest:
                self._queue.append((topics.current(self._fleet), self._manifest, ""))
            self._clear_stale()

    def _ends(self, blob: Blob, data: bytes) -> list[tuple[str, bytes]]:
        """The first chunk, which is of full size, and the last one, which came last: topics and payloads."""
        last = blob.n - 1
        parts = ((0, data[: blob.chunk]), (last, data[last * blob.chunk :]))
        return [(topics.chunk(self._fleet, blob.id, k), part) for k, part in parts]

    # Sending ----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Raises LinkError when the broker can never take what is next."""
        self._look_for_lost()
        while self._queue and not self._asked and self._link.connected and self._link.unacknowledged < UNDER_WAY:
            topic, payload, gone = self._queue[0]
            self._link.publish(topic, payload, retain=True)
            self._sent_at = self._clock()
            self._queue.popleft()
            self._stale.pop(gone, None)
        self._prove()

    @property
    def idle(self) -> bool:
        return not self._queue and not self._asked

    def _send(self, blob: Blob, data: bytes) -> None:
        parts = cut(data, blob)
        self._queue.extend((topics.chunk(self._fleet, blob.id, k), part, "") for k, part in enumerate(parts))

    def _clear_stale(self) -> None:
        """From the last chunk on: where that one lies, all the others do."""
        for blob_id, n in self._stale.items():
            self._queue.extend(
                (topics.chunk(self._fleet, blob_id, k), b"", "" if k else blob_id) for k in reversed(range(n))
            )

    def _note(self) -> None:
        lying = {blob_id: blob.n for blob_id, (blob, _) in self._blobs.items()}
        storage.write_atomic(self._shelf, json.dumps({**self._stale, **lying}).encode())

    def _read(self) -> dict[str, int]:
        """What the shelf names; nothing when it is absent or damaged: it only saves the broker's memory."""
        if not self._shelf.exists():
            return {}
        data = storage.read_bytes(self._shelf, limit=MAX_SHELF_BYTES)
        try:
            return {str(name): min(int(n), 1_000_000) for name, n in json.loads(data).items() if len(str(name)) == 32}
        except (ValueError, AttributeError, TypeError):
            self._log(f"{self._shelf} is damaged: what an earlier run left at the broker stays there, unused")
            return {}
