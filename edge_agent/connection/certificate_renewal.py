"""Renews the device's certificate with the present one, from the middle of its lifetime on.

The new key is on the disk before it is used, the same key gets the same certificate again, and ``device.toml`` names
the pair once both files are complete: a power cut leaves the old identity or the new one. The old pair stays until the
next renewal, because a flash that is rolled back restores the device.toml that names it. The aggregator's answer is
signed with the fleet's key, whichever authority issued the broker's certificate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fleet_core.base import config, storage
from fleet_core.base.errors import LinkError, MessageError, StateError
from fleet_core.board.device_settings import Settings
from fleet_core.link.interface import Link
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Down, RenewalRequest, Report

if TYPE_CHECKING:  # 10 MB that a device needs once in some years only
    from cryptography import x509

    from fleet_core.protocol.certificates import PrivateKey

RETRY_S = 3600.0
CHANGE_S = 30.0
"""Seconds between two requests while the fleet changes its authority."""
RETRY_AFTER_REFUSAL_S = 86400.0
NEXT_KEY = "identity-next.key"
IDENTITY_FILES = "identity-*"


class Renewal:
    """take_up: makes the link use another certificate and key from its next connection on. trust(): makes it use the
    files of device.toml as they are now. ``issuer``: the fleet's new authority, once it has issued this device's
    certificate; empty before. Nothing is requested if device.toml lacks ``renew_after``, which enrolment writes:
    another authority issued the certificate."""

    def __init__(
        self, home: Path, settings: Settings, link: Link, *, boot: str, take_up: Callable[[Path, Path], None],
        trust: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic,
        log: Callable[[str], None] = lambda line: None,
    ):
        self._home, self._link, self._boot, self._take_up, self._trust = home, link, boot, take_up, trust
        self._fleet, self._name = settings.device.fleet, settings.device.name
        self._tls, self._due = settings.tls, settings.tls.renew_after
        self._clock, self._log = clock, log
        self._next_check = clock()
        self._wanted: x509.Certificate | None = None
        self.issuer = ""

    def tick(self, now: float) -> None:
        """Requests a new certificate when it is due. now: Unix seconds, the later of the clock and the last signed
        time."""
        if self._due is None or self._clock() < self._next_check or not self._link.connected:
            return
        changes = self._wanted is not None and not self.issuer
        self._next_check = self._clock() + (CHANGE_S if changes else RETRY_S)
        if now < self._due and not changes:
            return
        try:
            self._link.publish(topics.report(self._fleet, self._name), messages.encode(self._request()))
        except (LinkError, StateError) as error:
            self._log(f"no new certificate is requested: {error}")

    def on_answer(self, down: Down) -> None:
        """Stores and uses the new certificate. down: signed by the fleet. Raises MessageError if it does not answer
        this device's request."""
        if down.device != self._name or self._due is None:
            raise MessageError(f"a certificate of '{down.device[:64]}'", expected=f"'{self._name}'")
        if not down.ok:
            self._next_check = self._clock() + RETRY_AFTER_REFUSAL_S
            return self._log(f"the aggregator gives no new certificate: {down.reason}")
        from fleet_core.protocol import certificates

        path = self._home / NEXT_KEY
        if not path.exists():
            return  # a duplicate of an answer
        new = certificates.certificate_in(down.certificate or "", "the answer")
        public, key = new.public_key(), certificates.load_key(path)
        if self._tls.certificate is None or public != key.public_key() or certificates.name_of(new) != self._name:
            raise MessageError("carries the certificate of another key")
        name = f"identity-{certificates.serial_of(new)[:8]}"
        certificates.save_key(self._home / f"{name}.key", key)
        storage.write_atomic(self._home / f"{name}.pem", certificates.certificate_pem(new))
        before = Path(self._tls.certificate).stem
        self._tls = replace(self._tls, certificate=f"{name}.pem", key=f"{name}.key")
        self._due = certificates.renew_after(new)
        self._update_device_toml()
        self._take_up(self._home / f"{name}.pem", self._home / f"{name}.key")
        self._remove_all_but({name, before})
        self._note_issuer(new)
        self._log(f"has a new certificate, until {new.not_valid_after_utc:%Y-%m-%d}")

    def on_authorities(self, texts: Sequence[str]) -> None:
        """Trusts these authorities (DER in base64) for the broker, if one of them is trusted already, and asks for a
        certificate of the last authority. Raises MessageError, StateError; then nothing has changed."""
        if self._due is None or self._tls.certificate is None:
            return
        from fleet_core.protocol import certificates

        found = [certificates.certificate_in(text, "the authorities") for text in texts]
        if self._tls.ca is not None:
            path = self._home / self._tls.ca
            data = b"".join(map(certificates.certificate_pem, found))
            held = storage.read_bytes(path, limit=certificates.MAX_FILE_BYTES)
            if data != held and set(found) & set(certificates.all_in(held, str(path))):
                storage.write_atomic(path, data)
                self._trust()
                self._log(f"trusts {len(found)} authorities for the broker" if found[1:] else
                          "trusts the fleet's new authority alone")
        self._wanted, self.issuer, self._next_check = found[-1], "", self._clock()
        self._note_issuer(certificates.load_certificate(self._home / self._tls.certificate))

    def _note_issuer(self, own: x509.Certificate) -> None:
        from fleet_core.protocol import certificates

        if self._wanted is not None and certificates.is_issued_by(own, self._wanted):
            self.issuer = certificates.authority_id(self._wanted)

    def _request(self) -> Report:
        """Raises StateError if the present key or certificate cannot be read."""
        from fleet_core.protocol import certificates

        if self._tls.certificate is None or self._tls.key is None:
            raise StateError("device.toml names no certificate", where=str(self._home))
        present = certificates.load_certificate(self._home / self._tls.certificate)
        key, serial = certificates.load_key(self._home / self._tls.key), certificates.serial_of(present)
        csr = certificates.request(self._next_key(key), self._name)
        signature = certificates.sign(key, certificates.renewal_to_sign(self._fleet, serial, csr))
        return Report(round=0, boot=self._boot, renew=RenewalRequest(certificates.encoded(csr), signature, serial))

    def _next_key(self, present: PrivateKey) -> PrivateKey:
        """The key for the next certificate. A new one if there is none, or if it is the ``present`` one: a power cut
        came right after a renewal."""
        from fleet_core.protocol import certificates

        path = self._home / NEXT_KEY
        if not path.exists() or certificates.load_key(path).public_key() == present.public_key():
            certificates.save_key(path, certificates.new_key())
        return certificates.load_key(path)

    def _update_device_toml(self) -> None:
        path = self._home / "device.toml"
        tables = config.tables(config.text_of(path), str(path))
        tables["tls"] = {**tables.get("tls", {}), "certificate": self._tls.certificate, "key": self._tls.key,
                         "renew_after": self._due}
        storage.write_atomic(path, config.toml(tables).encode())

    def _remove_all_but(self, names: set[str]) -> None:
        for old in self._home.glob(IDENTITY_FILES):
            if old.stem not in names:
                old.unlink(missing_ok=True)
