"""Publishes retained chunks and the signed manifest, in order and as fast as the broker acknowledges them.

After a reconnect the broker may have lost retained messages. The publisher subscribes to the first and last chunk of
every blob and to the manifest, and publishes again what it does not receive. A broker stores messages in the order it
received them, so one that has the last chunk of a blob has the whole blob. Chunks of blobs that the manifest no longer
names are cleared. A file lists the blobs at the broker, so that a restarted aggregator can clear old ones.
"""

from __future__ import annotations

import json
import math
import mmap
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from fleet_core.base import storage
from fleet_core.link.interface import Link
from fleet_core.protocol import topics
from fleet_core.protocol.chunks import Blob

Data = bytes | mmap.mmap
MAX_UNACKNOWLEDGED = 100
MAX_KEPT_BYTES = 1 << 20
REPUBLISH_S = 30.0
RETAINED_S = 2.0  # how long to wait for retained messages to come back


class Publisher:
    """Call ``tick`` often; it sends while fewer than 100 publishes are unacknowledged.

    kept: the file that lists the blobs that may be at the broker, id -> number of chunks. topic: of the manifest; by
    default that of the rounds. The bytes of a blob may be a file that is mapped into memory.
    """

    def __init__(
        self, fleet: str, link: Link, kept: Path, *, clock: Callable[[], float], log: Callable[[str], None],
        topic: str = "",
    ):
        self._topic = topic or topics.current(fleet)
        self._fleet, self._link, self._kept_path = fleet, link, kept
        self._clock, self._log = clock, log
        self._blobs: dict[str, tuple[Blob, Data]] = {}
        self._stale = self._read_kept()
        self._listed = True  # whether the file lists every blob that may be sent
        self._manifest: bytes | None = None
        # topic, payload, id of the blob that this clears
        self._queue: deque[tuple[str, bytes | memoryview, str]] = deque()
        self._awaited: dict[str, bytes] = {}  # topic -> payload: subscribed to, not yet received
        self._awaited_since = self._sent_at = 0.0
        self._republished_at = -math.inf
        self._verifying = self._verified = self._withdrawn = False
        self._losses_in_a_row = 0

    def blob(self, blob: Blob, data: Data) -> Blob:
        """Publishes a blob unless it is published already."""
        if blob.id not in self._blobs:
            self._blobs[blob.id] = (blob, data)
            self._stale.pop(blob.id, None)
            self._listed = False
            self._send(blob, data)
        return blob

    def manifest(self, signed: bytes, keep: set[str]) -> None:
        """Publishes the manifest after its blobs, then clears every blob whose id is not in ``keep``."""
        self._manifest = signed
        self._withdrawn = False
        self._queue.append((self._topic, signed, ""))
        for blob_id in [name for name in self._blobs if name not in keep]:
            self._stale[blob_id] = self._blobs.pop(blob_id)[0].n
        self._clear_stale()

    def withdraw(self) -> None:
        """Clears the manifest and every blob."""
        self._manifest, self._withdrawn = None, True
        self._queue.clear()
        self._queue.append((self._topic, b"", ""))
        self._stale.update({blob_id: blob.n for blob_id, (blob, _) in self._blobs.items()})
        self._blobs.clear()
        self._clear_stale()

    # After a reconnect ------------------------------------------------------------------------------------------------

    def reconnected(self) -> None:
        """Finds out which retained messages the broker has lost, and sends nothing until that is known."""
        self._link.unsubscribe(*self._awaited)
        self._queue.clear()
        self._verifying, self._verified = False, False
        self._await_retained()
        if not self._awaited:
            self._send_lost({})

    def _await_retained(self) -> None:
        """Subscribes to the messages that the broker should have retained."""
        self._awaited = {topic: part for blob, data in self._blobs.values() for topic, part in self._ends(blob, data)}
        if self._manifest is not None:
            self._awaited[self._topic] = self._manifest
        self._awaited_since = self._clock()
        self._link.subscribe(*self._awaited)

    def _verify_once(self) -> None:
        """After the first messages on a new connection, checks once that the broker retained them: an MQTT 3.1.1 broker
        does not report a message that it drops, and devices that receive nothing cannot report it either."""
        sent = self._link.unacknowledged == 0 or self._clock() - self._sent_at > RETAINED_S
        if not self._verified and self._manifest is not None and self.idle and sent:
            self._verifying = self._verified = True
            self._await_retained()

    def heard(self, topic: str, payload: bytes) -> None:
        """Takes a retained message that the broker sent back."""
        if self._awaited.get(topic) == payload:
            self._link.unsubscribe(topic)
            del self._awaited[topic]
            if not self._awaited:
                self._verified, self._losses_in_a_row = True, 0
                self._send_lost({})

    def again(self) -> None:
        """Publishes all chunks again, because a device misses some; at most every 30 s."""
        if self.idle and self._clock() - self._republished_at > REPUBLISH_S:
            self._republished_at = self._clock()
            self._log("a device misses chunks at the broker: all are published again")
            for blob, data in self._blobs.values():
                self._send(blob, data)

    def _check_lost(self) -> None:
        """Publishes again what the broker did not send back in time."""
        if self._awaited and self._clock() - self._awaited_since > RETAINED_S:
            self._link.unsubscribe(*self._awaited)
            lost, self._awaited = self._awaited, {}
            self._losses_in_a_row += 1
            if self._verifying or self._losses_in_a_row > 1:
                self._log(self._suspicion(lost))
            else:
                self._log(f"the broker came back without {len(lost)} of the retained messages: published again")
            self._send_lost(lost)

    def _suspicion(self, lost: Mapping[str, bytes]) -> str:
        largest = max(map(len, lost.values()))
        return (f"the broker accepts {', '.join(sorted(lost)[:3])}, but does not send them back: it may deny them "
                f"(access control), or drop messages of {largest} bytes (its size limit; link.chunk_bytes sets ours)")

    def _send_lost(self, lost: Mapping[str, bytes]) -> None:
        """Queues in this order: lost blobs, what was queued meanwhile, the lost manifest unless there is a newer one,
        and the clearing of stale blobs."""
        newer, self._queue = self._queue, deque()
        for blob, data in self._blobs.values():
            if any(topic in lost for topic, _ in self._ends(blob, data)):
                self._send(blob, data)
        self._queue += newer
        if self._manifest is not None:
            if lost.get(self._topic) == self._manifest:
                self._queue.append((self._topic, self._manifest, ""))
            self._clear_stale()
        elif self._withdrawn:
            self._queue.append((self._topic, b"", ""))
            self._clear_stale()

    def _ends(self, blob: Blob, data: Data) -> list[tuple[str, bytes]]:
        """(topic, payload) of the first chunk, which has the full size, and of the last one, which was sent last."""
        last = blob.n - 1
        parts = ((0, data[: blob.chunk]), (last, data[last * blob.chunk :]))
        return [(topics.chunk(self._fleet, blob.id, k), part) for k, part in parts]

    # Sending ----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Sends what the broker can take now. Raises LinkError if it can never take the next message."""
        self._check_lost()
        if self._ready_to_send and not self._listed:
            self._write_kept()
            self._listed = True
        while self._ready_to_send:
            topic, payload, cleared = self._queue[0]
            self._link.publish(topic, bytes(payload), retain=True)
            self._sent_at = self._clock()
            self._queue.popleft()
            self._stale.pop(cleared, None)
        self._verify_once()

    @property
    def _ready_to_send(self) -> bool:
        link = self._link
        return bool(self._queue) and not self._awaited and link.connected and link.unacknowledged < MAX_UNACKNOWLEDGED

    @property
    def idle(self) -> bool:
        return not self._queue and not self._awaited

    def _send(self, blob: Blob, data: Data) -> None:
        view = memoryview(data)
        parts = (view[k * blob.chunk : (k + 1) * blob.chunk] for k in range(blob.n))
        self._queue.extend((topics.chunk(self._fleet, blob.id, k), part, "") for k, part in enumerate(parts))

    def _clear_stale(self) -> None:
        """Clears from the last chunk to the first, so that an interrupted clearing leaves no last chunk behind."""
        for blob_id, n in self._stale.items():
            self._queue.extend(
                (topics.chunk(self._fleet, blob_id, k), b"", "" if k else blob_id) for k in reversed(range(n))
            )

    def _write_kept(self) -> None:
        published = {blob_id: blob.n for blob_id, (blob, _) in self._blobs.items()}
        storage.write_atomic(self._kept_path, json.dumps({**self._stale, **published}).encode())

    def _read_kept(self) -> dict[str, int]:
        """The blobs of an earlier run. Empty if the file is missing or damaged: then old chunks only stay at the
        broker."""
        if not self._kept_path.exists():
            return {}
        data = storage.read_bytes(self._kept_path, limit=MAX_KEPT_BYTES)
        try:
            return {str(name): min(int(n), 1_000_000) for name, n in json.loads(data).items() if len(str(name)) == 32}
        except (ValueError, AttributeError, TypeError):
            self._log(f"{self._kept_path} is damaged: what an earlier run left at the broker stays there, unused")
            return {}
