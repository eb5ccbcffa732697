"""The pending update: kept on disk, offered, then its state is committed or discarded as a signed record says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edge_agent.connection.blob_download import Fetcher
from edge_agent.connection.update_upload import Uploader
from edge_agent.device.state import DeviceState, Pending, state_key
from edge_agent.rounds.reports import Reporter
from edge_agent.rounds.secure_update import SecureUpdates
from edge_agent.rounds.train_job import identity, still_asked
from fleet_core.base.errors import MessageError
from fleet_core.codecs.kinds.common_scale import exponent_of
from fleet_core.protocol.device_messages import Down
from fleet_core.protocol.round_messages import Cost, Manifest, UpdateRef, mark

MAX_COUNTED_BYTES = 1 << 26


class PendingUpdates:
    """``pending``: the one update that may or may not have been counted, or None; it survives restarts."""

    def __init__(
        self, device: str, boot: str, home: DeviceState, uploader: Uploader, secure: SecureUpdates, fetcher: Fetcher,
        reporter: Reporter, log: Callable[[str], None],
    ):
        self._secure = secure
        self._device, self._boot = device, boot
        self._home, self._uploader, self._fetcher = home, uploader, fetcher
        self._reporter, self._log = reporter, log
        self._offered_seq, self._whole = -1, 0
        self.pending: Pending | None = home.pending()

    def take(self, begun: Manifest, manifest: Manifest | None, cost: Callable[[int], Cost]) -> None:
        """Offers what the trainer left on the disk for the round ``begun``, if the current ``manifest`` still asks for
        it. ``cost(bytes)`` goes with the offer."""
        key = state_key(begun)
        if manifest is None or not still_asked(begun, manifest):
            return self._home.drop_made(key, self._boot)
        made = self._home.take_made(key, self._boot)
        upload = made.upload
        self.pending = replace(made, upload=replace(upload, cost=cost(upload.blob.size)))
        self._offer(manifest, self.pending)

    def _offer(self, manifest: Manifest, pending: Pending) -> None:
        self._offered_seq, self._whole = manifest.seq, manifest.up.whole
        rules = manifest.up.secure
        if rules is None and exponent_of(pending.upload.codec) is not None:
            return self._discard(pending)  # made to be masked, but this round no longer uses secure aggregation
        if rules is None or pending.upload.secure == rules.session:
            return self._reporter.enter("upload", known=self._uploader.offer(pending, self._whole))
        self._reporter.enter("upload")
        self._uploader.stop()
        self._join(manifest, pending)

    def _join(self, manifest: Manifest, pending: Pending) -> None:
        """Joins the round's secure aggregation: nothing of this update is sent before it is masked."""
        try:
            self._secure.join(manifest, pending)
        except MessageError as error:
            self._fail(error)

    def on_secure(self, down: Down) -> None:
        """Handles a signed step of the secure sum."""
        pending = self.pending
        if pending is None or down.secure is None or down.r != pending.round:
            return
        try:
            masked = self._secure.answer(down.secure, pending)
        except MessageError as error:
            return self._fail(error)
        if masked is not None:
            self.pending = masked
            self._uploader.offer(masked, self._whole)

    def _fail(self, error: MessageError) -> None:
        self._log(f"this device takes no part in the sum: {error}")
        self._secure.leave()
        self._reporter.enter("failed")
        self._reporter.report(failed=f"secure aggregation: {error}"[:500])

    def tick(self) -> None:
        self._secure.tick()

    def on_unsigned(self, down: Down) -> None:
        """Sends the chunks that the aggregator wants, or ends the upload when it says so."""
        pending = self.pending
        if down.t == "need":
            return self._uploader.on_need(down)
        if pending is None or (down.r, down.id) != (pending.round, pending.upload.id):
            return
        if down.t == "reject":  # also at the round's close, long after the upload
            self._log(f"round {down.r}: the update was refused: {down.reason}")
        if not self._uploader.active:
            return
        self._uploader.stop()  # only a signed record decides whether to commit
        self._reporter.enter("idle" if down.t == "done" else "refused", known=self._knows_phases())
        self._reporter.report()

    def _knows_phases(self) -> bool:
        """Whether the aggregator knows by itself that an upload is over: it takes whole updates, and no heartbeat has
        said otherwise."""
        return self._whole > 0 and self._reporter.said != "upload"

    def resolve(self, manifest: Manifest) -> None:
        """Commits or discards where the manifest says which updates were counted; asks where it does not."""
        pending = self.pending
        if pending is None:
            return
        if pending.round >= manifest.round and manifest.open:
            return self._go_on_offering(manifest, pending)
        if pending.round > manifest.round:
            return  # that round is neither closed nor open now
        if exponent_of(pending.upload.codec) is not None:
            return self._discard(pending)  # it was never masked, so nobody has it
        record = next((r for r in manifest.counted if r.round == pending.round), None)
        if record is None:
            self._reporter.ask("fate", pending.upload.id, pending=UpdateRef(pending.round, pending.upload.id))
        elif record.ids is not None:
            self.on_counted(record.round, list(record.ids))
        elif record.blob is not None:
            self._fetcher.start(record.blob, MAX_COUNTED_BYTES, "counted")

    def _go_on_offering(self, manifest: Manifest, pending: Pending) -> None:
        """Offers the update once per manifest: an aggregator that was restarted may not have it."""
        if (pending.round, pending.key, pending.upload.base, pending.upload.train) != identity(manifest):
            self._discard(pending)  # the round has another model by now: this update can never be counted
        elif self._offered_seq != manifest.seq:
            self._offer(manifest, pending)

    def undecided(self, round_number: int) -> bool:
        """Whether an update of that round or an earlier one is still pending."""
        return self.pending is not None and self.pending.round <= round_number

    def on_counted(self, round_number: int, marks: list[str]) -> None:
        """Commits or discards the round's update. marks: of the updates that the round counted."""
        pending = self.pending
        if pending is not None and pending.round == round_number:
            self._decide(pending, mark(round_number, self._device, pending.upload.id) in marks)

    def on_fate(self, down: Down) -> None:
        """Handles a signed answer that says whether an older update was counted."""
        pending = self.pending
        if pending is None or (down.t, down.device) != ("counted", self._device):
            return
        if (down.r, down.id) == (pending.round, pending.upload.id):
            self._decide(pending, down.ok)

    def _decide(self, pending: Pending, counted: bool) -> None:
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
