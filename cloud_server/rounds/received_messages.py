"""Handles the messages of devices: presence, reports, updates, questions about updates, requests for certificates."""

from __future__ import annotations

from collections.abc import Callable

from cloud_server.broadcast.delta_chain import Holder
from cloud_server.results import evaluations
from cloud_server.rounds.aggregator_parts import Parts
from cloud_server.rounds.operator_requests import OperatorRequests
from fleet_core.base.errors import DataError, MessageError
from fleet_core.protocol import messages, topics
from fleet_core.protocol.chunks import CHUNK_HASH_DIGITS
from fleet_core.protocol.device_messages import Alone, Down, Presence, RenewalRequest, Report
from fleet_core.protocol.round_messages import WHOLE, UpdateRef, UploadManifest, whole_update
from fleet_core.protocol.secure_messages import KEYS, REVEALED, SHARES
from fleet_core.tasks import calibration
from fleet_core.tasks.task import Task


class DeviceMessages:
    """Hands each message to the part that handles it. It reads the requests of commands first where a device may
    connect right after the command that admits it."""

    def __init__(self, parts: Parts, requests: OperatorRequests, log: Callable[[str], None]):
        self._parts, self._members, self._rule = parts, parts.members, parts.rule
        self._requests, self._log = requests, log
        self._ledger, self._fleet = parts.ledger, parts.fleet.config.fleet.name
        most_chunks = parts.receiver.max_upload_bytes // parts.fleet.config.link.chunk_bytes + 1
        self._max_offer_bytes = messages.MAX_MESSAGE_BYTES + CHUNK_HASH_DIGITS * most_chunks

    def on_message(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Raises FleetError for a message that is refused. retain: whether the broker retains it."""
        if retain and payload and self._parts.left.retained(topic):
            return
        address = topics.parse(self._fleet, topic)
        if address is None or not payload:
            return
        if address.kind == "en":
            self._requests.read()
            return self._parts.enrolments.on_request(address.key, payload)
        if not address.device:
            self._parts.programs.publisher.heard(topic, payload)
            return self._parts.publisher.heard(topic, payload)
        if address.kind == "an":
            return
        name = address.device
        if address.kind == "st":
            return self._on_presence(name, messages.decode(Presence, payload))
        if self._members.revoked(name):
            self._requests.tell_revoked(name, self._members.boot(name))
        if not self._members.enrolled(name):
            raise MessageError("is not enrolled", where=name, hint="see 'metafleet devices enroll'")
        self._members.heard(name)
        number = topics.number(address.key) or 0
        if address.kind == "rep":
            self.on_report(name, messages.decode(Report, payload))
        elif address.kind == "up" and address.part == "m":
            self._parts.waiting.offered(name)
            try:
                offer = messages.decode(UploadManifest, payload, limit=self._max_offer_bytes)
            except MessageError as error:
                return self._parts.receiver.on_unreadable_offer(name, number, str(error))
            self._parts.receiver.on_offer(name, number, offer)
        elif address.kind == "up" and address.part == WHOLE:
            self._parts.waiting.chunk_came(name)
            try:
                offer, data = whole_update(payload)
            except MessageError as error:
                return self._parts.receiver.on_unreadable_offer(name, number, str(error))
            self._parts.receiver.on_whole(name, number, offer, data)
        elif address.kind == "up" and address.part in (KEYS, SHARES, REVEALED):
            self._parts.waiting.chunk_came(name)
            self._parts.secure.on_message(name, number, address.part, payload)
        elif address.kind == "up":
            self._parts.waiting.chunk_came(name)
            self._parts.receiver.on_chunk(name, number, topics.number(address.part), payload)

    def _on_presence(self, name: str, presence: Presence) -> None:
        if self._members.revoked(name):
            self._requests.read()
        self._members.on_presence(name, presence, self._closed)
        self._parts.manifests.unpack()
        if presence.st == "off":
            self._parts.receiver.drop(name)
        elif self._members.revoked(name):
            self._requests.tell_revoked(name, presence.boot)
        elif not presence.beat:
            self._parts.tell(name, Down("heard", self._closed, boot=presence.boot))

    def on_report(self, device: str, report: Report) -> None:
        """Takes a report. Raises MessageError, and uses nothing of it, if the report cannot be true."""
        if report.renew is not None:
            return self._renew(device, report.renew)
        self._check(device, report)
        if report.failed:
            self._on_failure(device, report)
        if report.want == "full":
            self._publish_way(Holder(report.base or "", report.base is not None))
        if report.want == "chunks":
            self._parts.publisher.again()
            self._parts.programs.publisher.again()
        if report.pending is not None:
            self._tell_fate(device, report.pending)
        with self._ledger.transaction(durable=False):  # all or nothing
            self._parts.costs.report(device, report)
            evaluations.record(self._ledger, device, report, self._parts.layout.task)
        if report.evaluations and report.evaluated_round is not None:
            self._parts.budget.evaluated(report.evaluated_round)
            self._parts.roll_backs.evaluated()
        if report.alone is not None and report.evaluated_round is not None:
            self._parts.warnings.reported(device, report.evaluated_round, self._members.ready())

    @property
    def _closed(self) -> int:
        """The last closed round."""
        return self._rule.checkpoint.round

    def _check(self, device: str, report: Report) -> None:
        if report.round > self._closed + 1 or (report.evaluated_round or 0) > self._closed:
            raise MessageError(f"a report of round {report.round}, evaluated {report.evaluated_round}", where=device)
        task = self._parts.layout.task
        if task is not None:
            return _check_sums(report, device, task)
        size = len(self._parts.layout.classes)
        if any(len(rows) != size for e in report.evaluations for rows in (e.confusion, *e.confusion)):
            raise MessageError("a confusion of another shape", where=device, expected=f"[{size}, {size}]")
        if not all(calibration.possible(e.gaps, sum(map(sum, e.confusion))) for e in report.evaluations if e.gaps):
            raise MessageError("gaps that these counts cannot have", where=device,
                               expected=f"{calibration.BINS}, together at most the number of samples")
        if report.alone is not None:
            _check_alone(report.alone, device, size)

    def _on_failure(self, device: str, report: Report) -> None:
        self._log(f"round {report.round}: {device}: {report.failed}")
        opened = self._parts.rounds.open
        if report.evaluated_round is None and opened is not None and report.round == opened.number:
            opened.fail(device, report.failed)

    def _publish_way(self, holder: Holder) -> None:
        """Publishes the chain or the whole model for a device that lacks the base of the round's delta."""
        opened = self._parts.rounds.open
        if opened is not None and self._parts.models.add_way(opened, holder):
            self._parts.manifests.open_round(opened, self._rule.checkpoint)

    def _renew(self, device: str, asked: RenewalRequest) -> None:
        """Sends the device's next certificate, or the reason why it gets none."""
        try:
            answer = Down("renewed", 0, device=device, certificate=self._parts.renewals.certificate(device, asked))
        except MessageError as error:
            answer = Down("renewed", 0, ok=False, device=device, reason=error.what[:500])
            self._log(f"{device} gets no new certificate: {error.what}")
        self._parts.messages.attest(device, answer)

    def _tell_fate(self, device: str, pending: UpdateRef) -> None:
        """Tells a device whether its update of a closed round was counted. For the open round that is not known yet."""
        if pending.round <= self._closed:
            counted = self._parts.receiver.was_counted(device, pending.round, pending.id)
            self._parts.messages.attest(device, Down("counted", pending.round, pending.id, ok=counted, device=device))


def _check_sums(report: Report, device: str, task: Task) -> None:
    """Raises MessageError for evaluations that are not of this task."""
    if report.alone is not None:
        raise MessageError("a baseline of classes", where=device, expected=f"none: the fleet's task is {task.kind}")
    for one in report.evaluations:
        try:
            task.of_sums(one.samples, one.sums or {})
        except DataError as error:
            raise MessageError(error.what, where=device, expected=error.expected) from error


def _check_alone(alone: Alone, device: str, size: int) -> None:
    """size: number of classes. Raises MessageError."""
    if alone.frequent >= size:
        raise MessageError(f"a most frequent class {alone.frequent}", where=device, expected=f"below {size}")
    if alone.confusion and any(len(rows) != size for rows in (alone.confusion, *alone.confusion)):
        raise MessageError("a confusion of another shape", where=device, expected=f"[{size}, {size}]")
