"""Receives the updates of the open round: checks each one, and stores it in the spool or refuses it with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloud_server.broadcast.manifest import privacy_rules
from cloud_server.broadcast.open_round import OpenRound, Rounds
from cloud_server.broadcast.round_codecs import RoundCodecs
from cloud_server.identity.audit_log import Recorder
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Round, Update
from cloud_server.membership.members import Members
from cloud_server.membership.training_states import TrainingStates
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.spool import Spool
from cloud_server.rounds.secure_round import MASKED, SecureRounds
from cloud_server.rounds.server_rule import RuleState
from cloud_server.rounds.uploads import WRONG_CHUNKS, Uploads
from fleet_core.algorithms.interface import Payload, ServerRule
from fleet_core.algorithms.interface import Update as Received
from fleet_core.base import storage
from fleet_core.base.errors import FleetError, MessageError
from fleet_core.model import payloads
from fleet_core.model.layout import Layout
from fleet_core.model.skipped_updates import is_note
from fleet_core.protocol.device_messages import Down
from fleet_core.protocol.round_messages import UploadManifest
from fleet_core.robust.norm_bound import Measure
from fleet_core.robust.screening import Screened
from fleet_core.training.round_plans import BATCHES

REFUSALS_NOTED = 8
REASON = 500  # characters


class UpdateReceiver:
    """Fills ``received`` and ``failed`` of the open round.

    layout: the layout of the arrays that are sent. layout_hash: that of the model. tell(device, message): sends a
    message to a device.
    """

    def __init__(
        self, fleet: Fleet, layout: Layout, layout_hash: str, ledger: Ledger, spool: Spool, rounds: Rounds,
        rule: RuleState, members: Members, states: TrainingStates, codecs: RoundCodecs, secure: SecureRounds,
        tell: Callable[[str, Down], None], *, audit: Recorder, clock: Callable[[], float], now: Callable[[], float],
        log: Callable[[str], None],
    ):
        self._screening, self._method, self._layout = fleet.screening, fleet.method, layout
        self._layout_hash, self._codecs, self._privacy = layout_hash, codecs, str(privacy_rules(fleet.config) or "")
        self._ledger, self._spool, self._rounds, self._rule = ledger, spool, rounds, rule
        self._members, self._states = members, states
        self._secure, self._tell, self._audit, self._now, self._log = secure, tell, audit, now, log
        self.max_upload_bytes = max(
            *(payloads.max_bytes(codec, layout, fleet.method.shared) for codec in codecs.accepted()),
            secure.max_bytes() if fleet.config.privacy.secure_aggregation else 0,
        )
        self._uploads = Uploads(tell, clock, self.max_upload_bytes)
        self._cut = set[str]()

    # One round --------------------------------------------------------------------------------------------------------

    def begin(self, opened: OpenRound) -> None:
        """Prepares for a round. After a restart it takes the intact updates from the spool; devices are asked for the
        others again. Raises StateError if the disk cannot be read now."""
        self._uploads.clear()
        self._spool.clear(keep=opened.number)
        for device, manifest in self._spool.manifests(opened.number).items():
            try:
                opened.receive(device, manifest, self._taken_up(device, opened.number, manifest))
            except FleetError as error:
                if storage.is_disk_error(error) and not isinstance(error.__cause__, FileNotFoundError):
                    raise
                self._log(f"round {opened.number}: the kept update of {device} is dropped: {error}")
                self._spool.drop(opened.number, device)

    def _taken_up(self, device: str, number: int, manifest: UploadManifest) -> Measure:
        """Measures an update in the spool. Raises FleetError if it is damaged or not of the open round."""
        if reason := self._refusal(device, number, manifest):
            raise MessageError(reason)
        self._spool.check(number, device, manifest)
        return self._screening.measure(self._spool.read(number, device, manifest))

    def tick(self) -> None:
        self._uploads.tick()

    def drop(self, device: str) -> None:
        """Forgets the upload of a device that is gone."""
        self._uploads.drop(device)

    def withdraw(self, device: str) -> None:
        """Forgets the upload of a device that is quarantined, and its update of the open round."""
        self.drop(device)
        opened = self._rounds.open
        if opened is not None and device in opened.cohort:
            opened.withdraw(device, "quarantined")
            self._spool.drop(opened.number, device)

    def record(self, opened: OpenRound, screened: Screened) -> None:
        """Writes the received updates into the ledger as counted or refused, and removes refused ones from the
        round."""
        for device, reason in screened.refused.items():
            if (manifest := opened.withdraw(device, reason)) is not None:
                self._ledger.put(self._row(opened.number, device, manifest, "refused", reason))
        for device, manifest in opened.received.items():
            self._ledger.put(self._row(opened.number, device, manifest, "counted", screened.remarks.get(device, "")))

    def end(self, closed: int, screened: Screened) -> None:
        """After the round has closed: tells the devices whose updates were refused, and refuses uploads in progress."""
        for device, reason in screened.refused.items():
            self._log(f"round {closed}: {device}: update refused: {reason}")
            self._audit.refused(device, f"update of round {closed}: {reason}")
            for row in self._ledger.rows(Update, round=closed, device=device, status="refused", reason=reason):
                self._tell(device, Down("reject", closed, row.update_id, ok=False, reason=reason))
        for device, number, manifest in self._uploads.clear():
            self._refuse(device, number, manifest, "the round is closed")

    # What arrives -----------------------------------------------------------------------------------------------------

    def on_offer(self, device: str, number: int, manifest: UploadManifest) -> None:
        if self._wanted(device, number, manifest):
            try:
                self._uploads.offer(device, number, manifest)
            except MessageError as error:
                self._refuse(device, number, manifest, str(error))

    def on_whole(self, device: str, number: int, manifest: UploadManifest, data: bytes) -> None:
        """Takes an update that came with its offer; ``data`` has been compared with its id."""
        if self._wanted(device, number, manifest):
            self._uploads.drop(device)
            self._take(device, number, manifest, data)

    def _wanted(self, device: str, number: int, manifest: UploadManifest) -> bool:
        """Whether to take an update that is offered; if not, tells the device why."""
        opened = self._rounds.open
        if opened is not None and number == opened.number and device in opened.received:
            same = opened.received[device].id == manifest.id
            self._answer(device, Down("done" if same else "reject", number, manifest.id, ok=same,
                                      reason="" if same else "another update of this round is here already"))
        elif self.was_counted(device, number, manifest.id):
            self._answer(device, Down("done", number, manifest.id))  # our first answer was lost
        elif reason := self._refusal(device, number, manifest):
            self._refuse(device, number, manifest, reason)
        else:
            return True
        return False

    def on_unreadable_offer(self, device: str, number: int, reason: str) -> None:
        """Refuses an offer that cannot be read: the round does not wait for this device any more, and its note says
        why."""
        opened, reason = self._rounds.open, f"its announcement cannot be read: {reason}"[:REASON]
        if opened is not None and number == opened.number and device not in opened.received:
            opened.fail(device, reason)
        self._log(f"round {number}: {device}: update refused: {reason}")
        self._audit.refused(device, f"update of round {number}: {reason}")
        self._tell(device, Down("reject", number, ok=False, reason=reason))

    def on_chunk(self, device: str, number: int, k: int | None, payload: bytes) -> None:
        try:
            whole = None if k is None else self._uploads.chunk(device, number, k, payload)
        except MessageError as error:
            manifest = self._uploads.given_up(device)
            if manifest is None:
                raise
            reason = f"{WRONG_CHUNKS} chunks were not as announced, at last: {error}"
            return self._refuse(device, number, manifest, reason)
        if whole is None:
            return
        manifest, inbox = whole
        try:
            data = inbox.take()
        except MessageError as error:
            return self._refuse(device, number, manifest, str(error))
        self._take(device, number, manifest, data)

    def _take(self, device: str, number: int, manifest: UploadManifest, data: bytes) -> None:
        """Checks the bytes of an update of the open round, and stores them in the spool."""
        opened = self._rounds.open
        if opened is None:
            return
        try:
            manifest.blob.check(self.max_upload_bytes)
            measure = self._verify(opened, device, manifest, data)
        except FleetError as error:
            return self._refuse(device, number, manifest, str(error))
        self._states.check(device, manifest.after, *self._rule.history())
        self._spool.put(number, device, manifest, data)
        opened.receive(device, manifest, measure)
        self._say_cut(device, manifest)
        self._answer(device, Down("done", number, manifest.id))

    def _answer(self, device: str, down: Down) -> None:
        """Ends an upload."""
        self._members.answered(device)
        self._tell(device, down)

    def _say_cut(self, device: str, manifest: UploadManifest) -> None:
        """Logs once per device that its board cannot train with the round's batch sizes."""
        cut = [f"{name} {manifest.metrics[name]:g}" for name in BATCHES if name in manifest.metrics]
        if cut and device not in self._cut:
            self._cut.add(device)
            told = ", ".join(cut)
            self._log(f"{device} trains with a smaller batch than the round asks for, its board's limit: {told}")

    def was_counted(self, device: str, number: int, update_id: str) -> bool:
        return number <= self._rule.checkpoint.round and self._ledger.counted(device, number) == update_id

    # Accept or refuse -------------------------------------------------------------------------------------------------

    def _refusal(self, device: str, number: int, manifest: UploadManifest) -> str:
        """Why an offer is refused, or empty."""
        opened, dual_epoch = self._rounds.open, self._rule.checkpoint.state.dual_epoch
        if opened is None or number != opened.number:
            return "the round is closed"
        if device in self._members.quarantined:
            return "quarantined: 'metafleet devices release' lets the device back in"
        if device not in opened.cohort:
            return "not in this round's cohort"
        accepted = self._codecs.accepted(opened.codecs["up"].codec) if opened.secure is None else (MASKED,)
        noted = is_note(manifest.codec) and self._method.cumulative and opened.secure is None
        checks: dict[str, tuple[Any, Any]] = {
            "method": (manifest.method, self._method.name),
            "layout": (manifest.layout, self._layout_hash),
            "dual epoch": (manifest.dual_epoch, dual_epoch),
            "base model": (manifest.base, opened.model.model),
            "arrays": (manifest.train or "all", self._layout.places(opened.arrays.moving) or "all"),
            "codec": (manifest.codec, manifest.codec if manifest.codec in accepted or noted else " or ".join(accepted)),
            "privacy": (manifest.privacy or "none", self._privacy or "none"),
            "scalars": (sorted(manifest.scalars), sorted(self._method.up_scalars) if opened.secure is None else []),
        }
        wrong = [f"{what} {got}, expected {wanted}" for what, (got, wanted) in checks.items() if got != wanted]
        wrong += filter(None, [self._secure.refusal(opened, device, manifest.secure)])
        wrong += self._screening.too_much(manifest.samples, manifest.metrics.get("loss", 0.0), manifest.scalars)
        if type(self._method.server).left is not ServerRule.left:  # a lost state resets all duals
            wrong += filter(None, [self._states.refusal(device, manifest.after, *self._rule.history())])
        return "; ".join(wrong)

    def _verify(self, opened: OpenRound, device: str, manifest: UploadManifest, data: bytes) -> Measure:
        """Measures an update. Raises CodecError for arrays of another layout or values that are not finite,
        MessageError for a norm over the constant bound (a norm per sample if updates are sums over samples).

        The decoded arrays are not kept: the spool holds the encoded bytes, and the round's close decodes one update
        after the other, so that memory does not grow with the cohort.
        """
        if opened.secure is not None:
            self._secure.check_size(opened, data)
            return Measure({}, "")
        part = self._layout.part(self._layout.moving(manifest.train))
        params = payloads.decode(manifest.codec, data, part, self._method.shared)
        measure = self._screening.measure(Received(device, Payload(params), manifest.samples))
        bound = self._screening.ceiling
        if not measure.whole <= bound:
            raise MessageError(f"an update of norm {measure.whole:.3g}", expected=f"at most {bound:g}")
        return measure

    def _refuse(self, device: str, number: int, manifest: UploadManifest, reason: str) -> None:
        reason = reason[:REASON]  # the reason may quote the device
        opened = self._rounds.open
        late = opened is None or number != opened.number
        noted = self._ledger.rows(Update, round=number, device=device)
        new = all(row.update_id != manifest.id for row in noted)
        if new and len(noted) < REFUSALS_NOTED and self._ledger.rows(Round, round=number):
            self._ledger.put(self._row(number, device, manifest, "late" if late else "refused", reason))
        if opened is not None and not late:
            opened.fail(device, reason)
        self._log(f"round {number}: {device}: update refused: {reason}")
        if not late:
            self._audit.refused(device, f"update of round {number}: {reason}")
        self._answer(device, Down("reject", number, manifest.id, ok=False, reason=reason))

    def _row(self, number: int, device: str, manifest: UploadManifest, status: str, reason: str = "") -> Update:
        return Update(
            round=number, device=device, update_id=manifest.id, received_at=self._now(),
            samples=manifest.samples or None, loss=manifest.metrics.get("loss"), payload_bytes=manifest.blob.size,
            chunks=manifest.blob.n, status=status, reason=reason, skipped=is_note(manifest.codec),
        )

