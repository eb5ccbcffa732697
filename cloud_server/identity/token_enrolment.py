"""Enrolment by token: the aggregator signs one certificate for the device that holds a token.

A token is spent by the first key that it is used for, and it expires; the ledger records both, so the check does not
depend on the broker. The same key gets the same certificate again, because an answer can be lost. The request is signed
with the token's key, so a broker cannot forge one; the authority's signature proves the answer.
"""

from __future__ import annotations

import datetime
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cloud_server.broker import mosquitto_config
from cloud_server.broker.mosquitto_config import address
from cloud_server.identity import certificate_authority, fleet_certificates, token_authority
from cloud_server.identity.audit_log import Recorder
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Certificate, Invitation
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError, LinkError, MessageError, StateError
from fleet_core.link.interface import Link
from fleet_core.link.mqtt import parse_url
from fleet_core.protocol import certificates, enrolment_token, messages
from fleet_core.protocol.device_messages import EnrolAnswer, EnrolRequest
from fleet_core.protocol.enrolment_token import Token
from fleet_core.protocol.topics import enrolment_answer

MAX_REQUEST_BYTES = 8192


class Enrolments:
    """Answers enrolment requests. admit(name): called with each device whose certificate was signed. changed(): called
    when the broker has to read the revocation list and the access list again. now(): Unix seconds."""

    def __init__(
        self, fleet: Fleet, ledger: Ledger, link: Link, *, admit: Callable[[str], None],
        changed: Callable[[], None], audit: Recorder, now: Callable[[], float], log: Callable[[str], None],
    ):
        self._fleet, self._ledger, self._link = fleet, ledger, link
        self._admit, self._changed, self._audit, self._now, self._log = admit, changed, audit, now, log
        self._name = fleet.config.fleet.name

    def on_request(self, token_id: str, payload: bytes) -> None:
        """Answers a request. Raises MessageError if it is refused, after sending the reason to the device."""
        try:
            answer = EnrolAnswer(certificate=self.certificate(token_id, payload))
        except MessageError as error:
            self._send(token_id, EnrolAnswer(refused=error.what[:500]))
            self._audit.refused(token_id, f"enrolment: {error.what}")
            raise
        self._send(token_id, answer)

    def certificate(self, token_id: str, payload: bytes) -> str:
        """The certificate for the request in ``payload``. Raises MessageError if it is refused."""
        request = messages.decode(EnrolRequest, payload, limit=MAX_REQUEST_BYTES)
        csr = certificates.decoded(request.csr)
        token = next(iter(self._ledger.rows(Invitation, id=token_id)), None)
        if token is None:
            raise MessageError("is not a token of this fleet", where=token_id)
        body = enrolment_token.to_sign(self._name, token_id, csr)
        if not certificates.signed_by(token.public, request.signature, body):
            raise MessageError("is not signed with the token's key", where=token_id)
        key = certificates.requested_key(csr)
        public = certificates.public_text(key)
        if token.spent_at is not None:
            return self._issued(token, public)
        if self._now() > token.expires_at:
            raise MessageError("the token has expired", where=token_id, hint="metafleet devices enroll: another one")
        return self._sign(token, key, public)

    def _issued(self, token: Invitation, public: str) -> str:
        """The certificate that this spent token gave to the same key. Raises MessageError for another key."""
        rows = self._ledger.rows(Certificate, token=token.id)
        row = next((row for row in rows if row.public == public and row.revoked_at is None), None)
        if row is None:
            raise MessageError("the token was used before", where=token.id)
        if self._is_listed(token.device):  # the lists may not have been written since
            self._publish_revocations()
        return row.certificate

    def _is_listed(self, device: str) -> bool:
        """Whether the broker's lists are about the device: it ever had a certificate that was revoked, or it is denied
        everything, as a device that was revoked before it had one."""
        revoked = any(row.revoked_at is not None for row in self._ledger.rows(Certificate, device=device))
        return revoked or mosquitto_config.is_denied(self._fleet.folder / "mosquitto", device)

    def _sign(self, token: Invitation, key: certificates.PublicKey, public: str) -> str:
        """Signs a new certificate, spends the token and revokes the device's earlier certificates."""
        signed = fleet_certificates.authority(self._fleet.folder).client(
            token.device, key, certificate_authority.devices_until()
        )
        now, text = self._now(), certificates.certificate_text(signed)
        row = Certificate(
            serial=certificates.serial_of(signed), device=token.device, token=token.id, public=public, certificate=text,
            issued_at=now, expires_at=signed.not_valid_after_utc.timestamp(),
        )
        earlier = [old for old in self._ledger.rows(Certificate, device=token.device) if old.revoked_at is None]
        with self._ledger.transaction():
            self._ledger.put(replace(token, spent_at=now), row, *(replace(old, revoked_at=now) for old in earlier))
            self._admit(token.device)
        self._log(f"{token.device} has its certificate {row.serial[:16]}")
        self._audit.done("certificate", token.device, f"{row.serial} for token {token.id}")
        if self._is_listed(token.device):  # else the broker's lists do not change
            self._publish_revocations()
        return text

    def invite(self, token: Invitation) -> None:
        """Records a token that the command line made."""
        if not self._ledger.rows(Invitation, id=token.id):
            self._ledger.put(token)

    def revoke(self, device: str, asked_at: float) -> None:
        """Ends every certificate and every token of ``device`` that was made before ``asked_at``, Unix seconds."""
        now, issued = self._now(), self._ledger.rows(Certificate, device=device)
        valid = [row for row in issued if row.revoked_at is None and row.issued_at < asked_at]
        tokens = self._ledger.rows(Invitation, device=device)
        unspent = [row for row in tokens if row.spent_at is None and row.made_at < asked_at]
        with self._ledger.transaction():
            self._ledger.put(
                *(replace(row, revoked_at=now) for row in valid), *(replace(row, spent_at=now) for row in unspent)
            )
        self._publish_revocations()

    def _publish_revocations(self) -> None:
        if not (self._fleet.folder / "ca.key").exists():
            return  # a fleet that an older version made without certificates
        fleet_certificates.write_revocations(self._fleet, self._ledger)
        self._changed()

    def _send(self, token_id: str, answer: EnrolAnswer) -> None:
        try:
            self._link.publish(enrolment_answer(self._name, token_id), messages.encode(answer))
        except LinkError as error:
            self._log(f"not sent: {error}")  # the device asks again


def make_token(fleet: Fleet, device: str, broker: str, enrolment: str, valid_s: float) -> tuple[Token, Invitation]:
    """(a token for ``device`` that is valid for ``valid_s`` seconds, its ledger row without secrets).

    enrolment: URL of the enrolment port. Raises ConfigError for a broker without TLS, StateError for a fleet without
    certificates.
    """
    for url in (broker, enrolment):
        if not parse_url(url).tls:
            raise ConfigError("a token needs a broker with TLS", where=url, expected="mqtts://host[:port]",
                              hint="metafleet server start --host; or --to HOME for a device on this machine")
    now = time.time()
    identifier, key, expires = secrets.token_hex(16), certificates.new_key(), int(now + valid_s)
    until = datetime.datetime.fromtimestamp(expires, datetime.timezone.utc)
    opens = token_authority.present(fleet.folder).client(identifier, key.public_key(), until)
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
    """The token's ``broker_authority``: a certificate, ``system``, or empty for the fleet's own authority."""
    if path is None:
        return fleet_certificates.SYSTEM
    if path == fleet.folder / "ca.pem":
        return ""
    try:
        return certificates.certificate_text(certificates.load_certificate(path))
    except StateError as error:
        raise ConfigError(error.what, where=str(path), hint="[link] ca in fleet.toml is a PEM file") from error


def issue_token(fleet: Fleet, device: str, path: Path, broker: str, valid_s: float) -> Token:
    """Writes a new token to ``path``, mode 0600, and registers it with the aggregator.

    Raises ConfigError or StateError before anything is written, also if ``path`` exists.
    """
    if path.exists():
        raise ConfigError("is there already", where=str(path), hint="move it away, or give another --token")
    made, invitation = make_token(fleet, device, broker, enrolment_url(fleet, broker), valid_s)
    enrolment_token.save(path, made)
    with Ledger(fleet.ledger_path) as ledger:
        ledger.request(f"{token_authority.INVITE}{made.id}", json.dumps(schema.plain(invitation)))
    return made


def open_tokens(ledger: Ledger) -> dict[str, Invitation]:
    """Device -> its newest token that can still be used, also if the aggregator has not read it yet."""
    return {row.device: row for row in token_authority.unused(ledger)}


def enrolment_url(fleet: Fleet, broker: str) -> str:
    """The URL of the enrolment port: fleet.toml's, else the configured one, else the port after the broker's. Raises
    ConfigError if none follows from the broker's."""
    if fleet.config.link.enrolment is not None:
        return fleet.config.link.enrolment
    setup, named = fleet_certificates.saved_setup(fleet.folder), parse_url(broker)
    if named.path:
        raise ConfigError("with a broker over WebSockets, devices with a token need an address of their own",
                          where=broker,
                          hint='enrolment = "wss://host[:port]/path" or "mqtts://host:port" under [link] in fleet.toml')
    if setup is not None and named.port == setup.port:
        return address(named.host, setup.enrolment_port)
    return address(named.host, named.port + 1)


