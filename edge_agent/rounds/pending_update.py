"""What becomes of an update: kept on disk, offered, and its state committed or discarded as a signed record says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edge_agent.connection.blob_download import Fetcher
from edge_agent.connection.update_upload import Uploader
from edge_agent.device.state import DeviceState, Pending, state_key
from edge_agent.rounds.reports import Reporter
from edge_agent.rounds.train_job import identity, still_asked
from fleet_core.protocol.messages import Cost, Down, Manifest, UpdateRef, mark

MAX_COUNTED_BYTES = 1 << 26


class PendingUpdates:
    """``pending``: the one update whose fate is open, also from an earlier life of this agent, or None."""

    def __init__(
        self, device: str, life: str, home: DeviceState, uploader: Uploader, fetcher: Fetcher, reporter: Reporter,
        log: Callable[[str], None],
    ):
        self._device, self._life = device, life
        self._home, self._uploader, self._fetcher = home, uploader, fetcher
        self._reporter, self._log = reporter, log
        self._offered_seq = -1
        self.pending: Pending | None = home.pending()

    def take(self, begun: Manifest, manifest: Manifest | None, cost: Callable[[int], Cost]) -> None:
        """What the trainer left on the disk for the round that was ``begun``: offered if ``manifest``, the current one,
        still asks for it. ``cost(bytes)`` of the update goes with the offer."""
        key = state_key(begun)
        if manifest is None or not still_asked(begun, manifest):
            return self._home.drop_made(key, self._life)
        made = self._home.take_made(key, self._life)
        upload = made.upload
        self.pending = replace(made, upload=replace(upload, cost=cost(upload.blob.size)))
        self._offer(manifest, self.pending)

    def _offer(self, manifest: Manifest, pending: Pending) -> None:
        self._offered_seq = manifest.seq
        self._reporter.enter("upload")
        self._uploader.offer(pending)

    def on_word(self, down: Down) -> None:
        """What the aggregator says without a signature: chunks that it wants, or that the upload is over."""
        pending = self.pending
        if down.t == "need":
            return self._uploader.on_need(down)
        if pending is None or not self._uploader.active or (down.r, down.id) != (pending.round, pending.upload.id):
            return
        self._uploader.stop()  # the signed record decides what becomes of it, not this
        if down.t == "reject":
            self._log(f"round {down.r}: the update was refused: {down.reason}")
        self._reporter.enter("idle" if down.t == "done" else "refused")
        self._reporter.report()

    def resolve(self, manifest: Manifest) -> None:
        """What is pending is committed or discarded where the manifest says which; else its fate is asked for."""
        pending = self.pending
        if pending is None:
            return
        if pending.round >= manifest.round and manifest.open:
            return self._go_on_offering(manifest, pending)
        if pending.round > manifest.round:
            return  # that round is not closed, and not open now
        record = next((r for r in manifest.counted if r.round == pending.round), None)
        if record is None:
            self._reporter.ask("fate", pending.upload.id, pending=UpdateRef(pending.round, pending.upload.id))
        elif record.ids is not None:
            self.settle(record.round, list(record.ids))
        elif record.blob is not None:
            self._fetcher.start(record.blob, MAX_COUNTED_BYTES, "counted")

    def _go_on_offering(self, manifest: Manifest, pending: Pending) -> None:
        """Offers the update once per manifest: the aggregator may have begun the round anew, without it."""
        if (pending.round, pending.key, pending.upload.base) != identity(manifest):
            self._discard(pending)  # the round is another by now: this can never be counted
        elif self._offered_seq != manifest.seq:
            self._offer(manifest, pending)

    def undecided(self, round_number: int) -> bool:
        """Whether an update of that round, or of an earlier one, still waits for its fate."""
        return self.pending is not None and self.pending.round <= round_number

    def settle(self, round_number: int, marks: list[str]) -> None:
        """``marks``: of the updates that a round counted. What is pending of that round is decided with it."""
        pending = self.pending
        if pending is not None and pending.round == round_number:
            self._decide(pending, mark(round_number, self._device, pending.upload.id) in marks)

    def on_fate(self, down: Down) -> None:
        """A signed record of what became of an old update, which may be the one that is pending."""
        pending = self.pending
        if pending is None or (down.t, down.device) != ("counted", self._device):
            return
        if (down.r, down.id) == (pending.round, pending.upload.id):
            self._decide(pending, down.ok)

    def _decide(self, pending: Pending, counted: bool) -> None:
        """Commits the pending state when its update was counted, discards it otherwise."""
        if not counted:
            return self._discard(pending)
        self._home.commit(pending)
        self._uploader.stop()
        self.pending = None

    def _discard(self, pending: Pending) -> None:
        self._log(f"round {pending.round}: the update was not counted, its state is discarded")
        self._home.discard(pending)
        self._uploader.stop()
        self.pending = None
