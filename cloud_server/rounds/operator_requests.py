"""Carries out what commands and the console ask of the running aggregator; they write it into the ledger."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial

from cloud_server.broadcast.program_waves import REQUEST as UPDATE
from cloud_server.ledger import disk_errors
from cloud_server.ledger.ledger import requested_at
from cloud_server.ledger.ledger_tables import Invitation
from cloud_server.rounds.aggregator_parts import Parts
from cloud_server.rounds.decide_roll_back import REQUEST as ROLL_BACK
from fleet_core.protocol.device_messages import Down

LOOK_S = 0.25


class OperatorRequests:
    """pause(value): called with ``yes`` or ``no``."""

    def __init__(
        self, parts: Parts, *, pause: Callable[[str], None], clock: Callable[[], float], now: Callable[[], float]
    ):
        self._parts, self._ledger, self._members = parts, parts.ledger, parts.members
        self._pause, self._clock, self._now = pause, clock, now
        self._looked = -math.inf

    def tick(self) -> None:
        if self._clock() - self._looked >= LOOK_S:
            self.read()

    def read(self) -> None:
        """Reads the requests at once."""
        self._looked = self._clock()
        closed = self._parts.rule.checkpoint.round
        for key, value in sorted(self._ledger.requests().items(), key=lambda item: requested_at(item[1])):
            what, _, name = key.partition("/")
            if key == "paused":
                self._pause(value)
            elif what == "enroll":
                self._members.enroll(name, closed)
            elif what == "invite":
                self._parts.enrolments.invite(Invitation(**json.loads(value)))
            elif what == "revoke":
                disk_errors.with_reserve(
                    self._parts.fleet.folder, partial(self._revoke, name, requested_at(value) or self._now())
                )
            elif what == "quarantine":
                self._parts.quarantine.quarantine(name, "an operator asked for it")
            elif what == "release":
                self._parts.quarantine.release(name, closed)
            elif key == UPDATE:
                self._parts.programs.request(value)
            elif key == ROLL_BACK:
                self._parts.roll_backs.request(value)
                continue
            else:
                continue
            self._ledger.remove_request(key, value)

    def _revoke(self, name: str, asked_at: float) -> None:
        """Takes effect at once, so that a round does not wait for the device; the next round resets the duals."""
        self._members.revoke(name)
        if self._members.revoked(name):
            self.tell_revoked(name, self._members.boot(name))  # before the broker denies it everything
        self._parts.left.forget(name)
        self._parts.enrolments.revoke(name, asked_at)
        self._parts.receiver.drop(name)

    def tell_revoked(self, device: str, boot: str) -> None:
        """Tells a device that it is revoked. The message is signed, so that nobody else can send it, and names the
        device's present start, so that it does not apply to a later one."""
        closed, seq = self._parts.rule.checkpoint.round, self._parts.manifests.seq
        at = self._members.revoked_at(device)
        self._parts.messages.attest(device, Down("revoked", closed, device=device, boot=boot, seq=seq, at=at))
