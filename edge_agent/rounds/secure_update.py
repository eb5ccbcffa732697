"""Takes part in a secure sum: sends this device's keys, then answers the aggregator's steps until its shares are out.

The arithmetic is ``fleet_core.privacy.secure_sum``. The session's secrets are in memory alone: an agent that ends
cannot unmask any more, and joins the next session as a new participant. An update whose sum was revealed is never
masked for another sum: the difference of the two would show what only one of them has.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from edge_agent.connection.broker_login import has_certificate
from edge_agent.device.state import DeviceState, Pending
from fleet_core.base.backoff import Backoff
from fleet_core.base.errors import MessageError, StateError
from fleet_core.board.device_settings import Settings
from fleet_core.link.interface import Link, send
from fleet_core.protocol import messages, topics
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import Manifest
from fleet_core.protocol.secure_messages import KEYS, REVEALED, SHARES, SecureStep, SignedKeys

if TYPE_CHECKING:
    from fleet_core.privacy.secure_participant import Identity, Participant

MASKED = "masked"
SILENCE_S, MOST_SILENCE_S = 2.0, 60.0


@dataclass(frozen=True)
class _Joined:
    """A session that this device takes part in. chunk: bytes of a publish."""

    participant: Participant
    keys: SignedKeys
    authority: Any
    chunk: int


class SecureUpdates:
    """One session at a time. unix_s(): the time, as far as this device knows it."""

    def __init__(
        self, settings: Settings, home: DeviceState, link: Link, clock: Callable[[], float],
        unix_s: Callable[[], float], log: Callable[[str], None],
    ):
        self._settings, self._home, self._link, self._unix_s, self._log = settings, home, link, unix_s, log
        self._fleet, self._name = settings.device.fleet, settings.device.name
        self._backoff = Backoff(self._name, clock, SILENCE_S, MOST_SILENCE_S)
        self._joined: _Joined | None = None
        self._unheard = False

    def join(self, manifest: Manifest, pending: Pending) -> None:
        """Sends the keys of a session, which are made once. Raises MessageError if this device must not take part."""
        # Imported here to save memory on devices of other fleets.
        from fleet_core.privacy.secure_participant import Participant
        from fleet_core.privacy.secure_sum import Session
        from fleet_core.protocol import certificates

        rules = manifest.up.secure
        assert rules is not None
        if self._joined is None or self._joined.participant.session.rules != rules:
            if pending.upload.secure and pending.upload.secure == self._home.revealed():
                raise MessageError("this update is in a sum already, which was revealed")
            identity = self._identity()
            named = filter(None, (rules.authority, rules.next_authority))
            authority = tuple(certificates.certificate_in(text, "the manifest") for text in named)
            own = certificates.certificate_text(identity.certificate)
            certificates.issued_to(own, self._name, authority, self._now)
            participant = Participant(Session(self._fleet, manifest.round, rules), identity)
            self._joined = _Joined(participant, participant.keys(), authority, manifest.up.chunk)
        self._backoff.reset()
        self._unheard = True
        self._send(manifest.round, KEYS, self._joined.keys)

    def leave(self) -> None:
        self._joined, self._unheard = None, False

    def tick(self) -> None:
        """Sends the keys again until the first step comes; from then on the aggregator asks again."""
        if self._unheard and self._joined is not None and self._backoff.expired:
            self._backoff.repeat()
            self._send(self._joined.participant.session.round, KEYS, self._joined.keys)

    def answer(self, step: SecureStep, pending: Pending) -> Pending | None:
        """Does what a step asks for; returns the update to offer once it is masked. Raises MessageError if the step
        could reveal more than a sum of enough devices."""
        joined = self._joined
        if joined is None or joined.participant.session.rules.session != step.session:
            return None
        self._unheard, number, participant = False, pending.round, joined.participant
        if step.step == "peers":
            self._send(number, SHARES, participant.seal(step.peers, joined.authority, self._now))
        elif step.step == "boxes" and pending.upload.secure != step.session:
            return self._masked(joined, step, pending)
        elif step.step == "unmask":
            revealed = participant.reveal(step)
            self._home.set_revealed(step.session)
            self._send(number, REVEALED, revealed)
        return None

    def _masked(self, joined: _Joined, step: SecureStep, pending: Pending) -> Pending:
        from fleet_core.codecs.kinds.common_scale import values_of

        masked = joined.participant.mask(step.boxes, values_of(self._home.values(pending))).tobytes()
        upload = replace(pending.upload, blob=Blob.of(masked, joined.chunk), codec=MASKED, secure=step.session)
        return self._home.mask(pending, upload, masked)

    def _identity(self) -> Identity:
        """The device's certificate and key, read each time, because they may have been renewed."""
        from fleet_core.privacy.secure_participant import Identity
        from fleet_core.protocol import certificates

        tls, folder = self._settings.tls, self._home.folder
        if not has_certificate(self._settings) or tls.certificate is None or tls.key is None:
            raise MessageError("this device has no certificate of its fleet")
        try:
            key, certificate = certificates.load_key(folder / tls.key), certificates.load_certificate(
                folder / tls.certificate)
        except StateError as error:
            raise MessageError(f"this device's certificate cannot be read: {error}") from error
        return Identity(self._name, certificate, key)

    @property
    def _now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._unix_s(), datetime.timezone.utc)

    def _send(self, number: int, part: str, message: object) -> None:
        """Sends a message once: if it is lost, the aggregator asks again."""
        send(self._link, topics.upload(self._fleet, self._name, number, part), messages.encode(message), self._log)
