"""A device's certificate, anew before it ends: the aggregator signs for a new key what the present key vouches for.

Nobody is asked and no token is needed: the request is signed with the key of a certificate that holds, so that a broker
that was taken over cannot make one up. The old certificate holds until its own end, for an answer can be lost on its
way and a device can be put back from a backup; a revoked one vouches for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cloud_server.identity import certificate_authority, fleet_certificates
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.ledger import Ledger
from cloud_server.records.ledger_tables import Certificate
from fleet_core.base.errors import MessageError
from fleet_core.base.processes import typed
from fleet_core.protocol import certificates
from fleet_core.protocol.device_messages import RenewalRequest

DAY_S = 86400.0


class Renewals:
    """now: Unix seconds."""

    def __init__(self, fleet: Fleet, ledger: Ledger, *, now: Callable[[], float], log: Callable[[str], None]):
        self._fleet, self._ledger, self._now, self._log = fleet, ledger, now, log

    def certificate(self, device: str, asked: RenewalRequest) -> str:
        """The new certificate, DER in base64; the same one for the same key again. Raises MessageError."""
        holds = [row for row in self._ledger.rows(Certificate, device=device) if row.revoked_at is None]
        held = next((row for row in holds if row.serial == asked.serial and self._now() < row.expires_at), None)
        if held is None:
            raise MessageError("the certificate that asks for another does not hold", where=device,
                               hint=f"metafleet devices enroll {typed(self._fleet.folder)} {device}: a token gives a "
                                    "new one")
        csr = certificates.decoded(asked.csr)
        body = certificates.renewal_to_sign(self._fleet.config.fleet.name, asked.serial, csr)
        if not certificates.signed_by(held.public, asked.signature, body):
            raise MessageError("is not signed with the key of the present certificate", where=device)
        key = certificates.requested_key(csr)
        public = certificates.public_text(key)
        if public == held.public:
            raise MessageError("asks for the key that it has", where=device, expected="a new key")
        again = next((row for row in holds if row.public == public), None)
        if again is not None:
            return again.certificate
        self._check_due(held, holds)
        return self._sign(held, key, public)

    def _check_due(self, held: Certificate, holds: list[Certificate]) -> None:
        """A device gets no more than it needs: each one stays in the ledger."""
        due = certificates.renew_after(certificates.certificate_in(held.certificate, held.device))
        if self._now() < due - DAY_S:
            date = time.strftime("%Y-%m-%d", time.gmtime(due))
            raise MessageError(f"the certificate is to be renewed from {date} on", where=held.device)
        newest = max(row.issued_at for row in holds)
        if newest > held.issued_at and self._now() < newest + DAY_S:
            raise MessageError("was given another certificate within this day", where=held.device)

    def _sign(self, held: Certificate, key: certificates.PublicKey, public: str) -> str:
        signed = fleet_certificates.authority(self._fleet.folder).client(
            held.device, key, certificate_authority.devices_until()
        )
        text, serial = certificates.certificate_text(signed), certificates.serial_of(signed)
        self._ledger.put(Certificate(
            serial=serial, device=held.device, token=held.token, public=public, certificate=text,
            issued_at=self._now(), expires_at=signed.not_valid_after_utc.timestamp(),
        ))
        self._log(f"{held.device} has its next certificate {serial[:16]}")
        return text
