"""Renews a device's certificate before it ends: the device sends a new key, signed with the key of its present one.

No token and no operator is needed. The signature must be from a valid certificate of the ledger, so a compromised
broker cannot forge a request, and a revoked certificate cannot be renewed. The old certificate stays valid until its
own end, because the answer can be lost and a device can be restored from a backup.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cloud_server.identity import authorities, certificate_authority
from cloud_server.identity.audit_log import Recorder
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Certificate
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base.errors import MessageError
from fleet_core.base.processes import typed
from fleet_core.protocol import certificates
from fleet_core.protocol.device_messages import RenewalRequest

DAY_S = 86400.0


class Renewals:
    """Answers renewal requests. now(): Unix seconds."""

    def __init__(
        self, fleet: Fleet, ledger: Ledger, *, audit: Recorder, now: Callable[[], float], log: Callable[[str], None]
    ):
        self._fleet, self._ledger, self._audit, self._now, self._log = fleet, ledger, audit, now, log

    def certificate(self, device: str, request: RenewalRequest) -> str:
        """The new certificate, DER in base64; a repeated request for one key gets the same. Raises MessageError."""
        try:
            return self._certificate(device, request)
        except MessageError as error:
            self._audit.refused(device, f"renewal: {error.what}")
            raise

    def _certificate(self, device: str, request: RenewalRequest) -> str:
        valid = [row for row in self._ledger.rows(Certificate, device=device) if row.revoked_at is None]
        present = next((row for row in valid if row.serial == request.serial and self._now() < row.expires_at), None)
        if present is None:
            raise MessageError("the certificate to renew is not valid", where=device,
                               hint=f"metafleet devices enroll {typed(self._fleet.folder)} {device}: a token gives a "
                                    "new one")
        csr = certificates.decoded(request.csr)
        body = certificates.renewal_to_sign(self._fleet.config.fleet.name, request.serial, csr)
        if not certificates.signed_by(present.public, request.signature, body):
            raise MessageError("is not signed with the key of the present certificate", where=device)
        key = certificates.requested_key(csr)
        public = certificates.public_text(key)
        if public == present.public:
            raise MessageError("asks for a certificate for the key that it already has", where=device,
                               expected="a new key")
        issued = next((row for row in valid if row.public == public), None)
        if issued is not None:
            return issued.certificate
        self._check_due(present, valid)
        return self._sign(present, key, public)

    def _check_due(self, present: Certificate, valid: list[Certificate]) -> None:
        """Raises MessageError for a renewal that is not needed, because every certificate stays in the ledger."""
        last = authorities.trusted(self._fleet.folder)[-1]
        if not any(certificates.is_issued_by(certificates.certificate_in(row.certificate, row.device), last)
                   for row in valid):
            return  # the authority is changed
        due = certificates.renew_after(certificates.certificate_in(present.certificate, present.device))
        if self._now() < due - DAY_S:
            date = time.strftime("%Y-%m-%d", time.gmtime(due))
            raise MessageError(f"the certificate can be renewed from {date} on", where=present.device)
        newest = max(row.issued_at for row in valid)
        if newest > present.issued_at and self._now() < newest + DAY_S:
            raise MessageError("got another certificate less than a day ago", where=present.device)

    def _sign(self, present: Certificate, key: certificates.PublicKey, public: str) -> str:
        folder = self._fleet.folder
        signed = (authorities.successor(folder) or authorities.present(folder)).client(
            present.device, key, certificate_authority.devices_until()
        )
        text, serial = certificates.certificate_text(signed), certificates.serial_of(signed)
        self._ledger.put(Certificate(
            serial=serial, device=present.device, token=present.token, public=public, certificate=text,
            issued_at=self._now(), expires_at=signed.not_valid_after_utc.timestamp(),
        ))
        self._log(f"{present.device}: certificate renewed, {serial[:16]}")
        self._audit.done("certificate", present.device, f"{serial} in place of {present.serial}")
        return text
