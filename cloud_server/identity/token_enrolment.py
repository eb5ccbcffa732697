"""Enrolment by token: the aggregator signs the certificate of a device that proves to hold one, once.

A token is spent by the first key that it is used for, and dies at its date: both stand in the ledger, whatever the
broker lets through. The same key gets the same certificate again, for an answer can be lost on its way. The request is
signed with the token's key, so a broker cannot make one up; the answer proves itself by the authority's signature.
"""

from __future__ import annotations

import datetime
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cloud_server.broker.mosquitto_config import address
from cloud_server.identity import certificate_authority, fleet_certificates
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.ledger import Ledger
from cloud_server.records.ledger_tables import Certificate, Invitation
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError, LinkError, MessageError, StateError
from fleet_core.link.interface import Link
from fleet_core.link.mqtt import parse_url
from fleet_core.protocol import certificates, enrolment_token, messages
from fleet_core.protocol.device_messages import EnrolAnswer, EnrolRequest
from fleet_core.protocol.enrolment_token import Token
from fleet_core.protocol.topics import enrolment_answer

MAX_REQUEST_BYTES = 8192
INVITE = "invite/"


class Enrolments:
    """admit(name): takes a device in whose certificate was signed. changed(): the broker has to read what is revoked
    again."""

    def __init__(
        self, fleet: Fleet, ledger: Ledger, link: Link, *, admit: Callable[[str], None],
        changed: Callable[[], None], now: Callable[[], float], log: Callable[[str], None],
    ):
        self._fleet, self._ledger, self._link = fleet, ledger, link
        self._admit, self._changed, self._now, self._log = admit, changed, now, log
        self._name = fleet.config.fleet.name

    def on_request(self, token_id: str, payload: bytes) -> None:
        """Answers a request. Raises MessageError for one that is refused, after its sender was told why."""
        try:
            answer = EnrolAnswer(certificate=self.certificate(token_id, payload))
        except MessageError as error:
            self._send(token_id, EnrolAnswer(refused=error.what[:500]))
            raise
        self._send(token_id, answer)

    def certificate(self, token_id: str, payload: bytes) -> str:
        """The certificate that the request in ``payload`` is entitled to. Raises MessageError."""
        request = messages.decode(EnrolRequest, payload, limit=MAX_REQUEST_BYTES)
        csr = certificates.decoded(request.csr)
        found = next(iter(self._ledger.rows(Invitation, id=token_id)), None)
        if found is None:
            raise MessageError("is no token of this fleet", where=token_id)
        body = enrolment_token.to_sign(self._name, token_id, csr)
        if not certificates.signed_by(found.public, request.signature, body):
            raise MessageError("is not signed with the token's key", where=token_id)
        key = certificates.requested_key(csr)
        public = certificates.public_text(key)
        if found.spent_at is not None:
            return self._again(found, public)
        if self._now() > found.expires_at:
            raise MessageError("the token has expired", where=token_id, hint="metafleet devices enroll: another one")
        return self._sign(found, key, public)

    def _again(self, found: Invitation, public: str) -> str:
        """The certificate that this token gave, to the key that it was given to, while it holds."""
        rows = self._ledger.rows(Certificate, token=found.id)
        row = next((row for row in rows if row.public == public and row.revoked_at is None), None)
        if row is None:
            raise MessageError("the token was used before", where=found.id)
        return row.certificate

    def _sign(self, found: Invitation, key: certificates.PublicKey, public: str) -> str:
        signed = fleet_certificates.authority(self._fleet.folder).client(
            found.device, key, certificate_authority.devices_until()
        )
        now, text = self._now(), certificates.certificate_text(signed)
        row = Certificate(
            serial=certificates.serial_of(signed), device=found.device, token=found.id, public=public, certificate=text,
            issued_at=now, expires_at=signed.not_valid_after_utc.timestamp(),
        )
        before = [old for old in self._ledger.rows(Certificate, device=found.device) if old.revoked_at is None]
        with self._ledger.transaction():
            self._ledger.put(replace(found, spent_at=now), row, *(replace(old, revoked_at=now) for old in before))
            self._admit(found.device)
        self._log(f"{found.device} has its certificate {row.serial[:16]}")
        self._publish_revocations()
        return text

    def invite(self, found: Invitation) -> None:
        """A token was made."""
        if not self._ledger.rows(Invitation, id=found.id):
            self._ledger.put(found)

    def revoke(self, device: str, asked_at: float) -> None:
        """Every certificate and every token of ``device`` that was made before ``asked_at`` ends now."""
        now, issued = self._now(), self._ledger.rows(Certificate, device=device)
        held = [row for row in issued if row.revoked_at is None and row.issued_at < asked_at]
        invited = self._ledger.rows(Invitation, device=device)
        open_ones = [row for row in invited if row.spent_at is None and row.made_at < asked_at]
        with self._ledger.transaction():
            self._ledger.put(
                *(replace(row, revoked_at=now) for row in held), *(replace(row, spent_at=now) for row in open_ones)
            )
        self._publish_revocations()

    def _publish_revocations(self) -> None:
        if not (self._fleet.folder / "ca.key").exists():
            return  # a fleet of an older metafleet, without certificates
        fleet_certificates.write_revocations(self._fleet, self._ledger)
        self._changed()

    def _send(self, token_id: str, answer: EnrolAnswer) -> None:
        try:
            self._link.publish(enrolment_answer(self._name, token_id), messages.encode(answer))
        except LinkError as error:
            self._log(f"not sent: {error}")  # the device asks again


def make_token(fleet: Fleet, device: str, broker: str, enrolment: str, valid_s: float) -> tuple[Token, Invitation]:
    """A token for ``device`` that is good for ``valid_s`` seconds, and what the ledger keeps of it: no secret.

    Raises ConfigError for a broker without TLS, StateError for a fleet without certificates.
    """
    for url in (broker, enrolment):
        if not parse_url(url).tls:
            raise ConfigError("a token needs a broker with TLS", where=url, expected="mqtts://host[:port]",
                              hint="metafleet server start --host; or --to HOME for a device on this machine")
    now = time.time()
    identifier, key, expires = secrets.token_hex(16), certificates.new_key(), int(now + valid_s)
    until = datetime.datetime.fromtimestamp(expires, datetime.timezone.utc)
    opens = fleet_certificates.tokens_authority(fleet.folder).client(identifier, key.public_key(), until)
    made = Token(
        id=identifier, device=device, fleet=fleet.config.fleet.name, fleet_key=fleet.public_key(), broker=broker,
        enrolment=enrolment, expires=expires,
        authority=certificates.certificate_text(fleet_certificates.authority(fleet.folder).certificate),
        certificate=certificates.certificate_text(opens), private_key=certificates.private_text(key),
        broker_authority=_trusted(fleet_certificates.broker_authority(fleet), fleet),
    )
    public = certificates.public_text(key.public_key())
    return made, Invitation(id=identifier, device=device, public=public, made_at=now, expires_at=float(expires))


def _trusted(path: Path | None, fleet: Fleet) -> str:
    """Who vouches for the broker, as a token says it; empty for the fleet's own authority."""
    if path is None:
        return fleet_certificates.SYSTEM
    if path == fleet.folder / "ca.pem":
        return ""
    try:
        return certificates.certificate_text(certificates.load_certificate(path))
    except StateError as error:
        raise ConfigError(error.what, where=str(path), hint="[link] ca in fleet.toml is a PEM file") from error


def invite(fleet: Fleet, device: str, path: Path, broker: str, valid_s: float) -> Token:
    """A token at ``path``, mode 0600 and never over another file, that the aggregator knows of.

    Raises ConfigError, StateError; nothing is written then.
    """
    if path.exists():
        raise ConfigError("is there already", where=str(path), hint="move it away, or give another --token")
    made, invitation = make_token(fleet, device, broker, enrolment_url(fleet, broker), valid_s)
    enrolment_token.save(path, made)
    with Ledger(fleet.ledger_path) as ledger:
        ledger.ask(f"{INVITE}{made.id}", json.dumps(schema.plain(invitation)))
    return made


def waiting(ledger: Ledger) -> dict[str, Invitation]:
    """Device -> the newest token that may still be used; one that the aggregator has not read yet is among them."""
    asked = [Invitation(**json.loads(text)) for key, text in ledger.asked().items() if key.startswith(INVITE)]
    rows = sorted([*ledger.rows(Invitation), *asked], key=lambda row: row.made_at)
    return {row.device: row for row in rows if row.spent_at is None and row.expires_at > time.time()}


def enrolment_url(fleet: Fleet, broker: str) -> str:
    """Where tokens are taken: fleet.toml's, else the configured port, or the one after the broker's."""
    if fleet.config.link.enrolment is not None:
        return fleet.config.link.enrolment
    place, named = fleet_certificates.placed(fleet.folder), parse_url(broker)
    known = place is not None and named.port == place.port
    return address(named.host, place.enrolment_port if place is not None and known else named.port + 1)
