"""A device asks for its next certificate with the present one, from the middle of its life on, until it has it.

The new key lies on the disk before it is used, and the same key gets the same certificate again; ``device.toml`` names
the pair once both are whole. So a power cut leaves the old identity or the new one; the old pair stays beside it until
the next time, for a flash that is taken back puts back the device.toml that names it. What the aggregator answers is
signed with the fleet's own key, whichever authority vouches for the broker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fleet_core.base import config, storage
from fleet_core.base.errors import LinkError, MessageError, StateError
from fleet_core.board.device_settings import Settings
from fleet_core.link.interface import Link
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Down, RenewalRequest, Report

if TYPE_CHECKING:  # 10 MB that a device does without, until once in some years
    from fleet_core.protocol.certificates import PrivateKey

LOOK_S = 3600.0
REFUSED_S = 86400.0
NEXT_KEY = "identity-next.key"
OWN = "identity-*"


class Renewal:
    """take_up: the link shows another certificate from its next connection on. Without ``renew_after`` in device.toml,
    which enrolment writes, nothing is ever asked: the certificate is another authority's."""

    def __init__(
        self, home: Path, settings: Settings, link: Link, *, boot: str, take_up: Callable[[Path, Path], None],
        clock: Callable[[], float] = time.monotonic, log: Callable[[str], None] = lambda line: None,
    ):
        self._home, self._link, self._boot, self._take_up = home, link, boot, take_up
        self._fleet, self._name = settings.device.fleet, settings.device.name
        self._tls, self._due = settings.tls, settings.tls.renew_after
        self._clock, self._log = clock, log
        self._look_at = clock()

    def tick(self, now: float) -> None:
        """Asks when it is time. now: Unix seconds, by the later of the clock and the last signed time."""
        if self._due is None or self._clock() < self._look_at or not self._link.connected:
            return
        self._look_at = self._clock() + LOOK_S
        if now < self._due:
            return
        try:
            self._link.publish(topics.report(self._fleet, self._name), messages.encode(self._report()))
        except (LinkError, StateError) as error:
            self._log(f"no new certificate is asked for: {error}")

    def on_answer(self, down: Down) -> None:
        """down: signed by the fleet. Raises MessageError for what is no answer to this device's request."""
        if down.device != self._name or self._due is None:
            raise MessageError(f"a certificate of '{down.device[:64]}'", expected=f"'{self._name}'")
        if not down.ok:
            self._look_at = self._clock() + REFUSED_S
            return self._log(f"the aggregator gives no new certificate: {down.reason}")
        from fleet_core.protocol import certificates

        path = self._home / NEXT_KEY
        if not path.exists():
            return  # the answer came twice
        found = certificates.certificate_in(down.certificate or "", "the answer")
        public, key = found.public_key(), certificates.load_key(path)
        if self._tls.certificate is None or public != key.public_key() or certificates.name_of(found) != self._name:
            raise MessageError("carries the certificate of another key")
        name = f"identity-{certificates.serial_of(found)[:8]}"
        certificates.save_key(self._home / f"{name}.key", key)
        storage.write_atomic(self._home / f"{name}.pem", certificates.certificate_pem(found))
        before = Path(self._tls.certificate).stem
        self._tls = replace(self._tls, certificate=f"{name}.pem", key=f"{name}.key")
        self._due = certificates.renew_after(found)
        self._name_it()
        self._take_up(self._home / f"{name}.pem", self._home / f"{name}.key")
        self._forget({name, before})
        self._log(f"has a new certificate, until {found.not_valid_after_utc:%Y-%m-%d}")

    def _report(self) -> Report:
        """The request. Raises StateError for a present key or certificate that cannot be read."""
        from fleet_core.protocol import certificates

        if self._tls.certificate is None or self._tls.key is None:
            raise StateError("device.toml names no certificate", where=str(self._home))
        held = certificates.load_certificate(self._home / self._tls.certificate)
        own, serial = certificates.load_key(self._home / self._tls.key), certificates.serial_of(held)
        csr = certificates.request(self._next_key(own), self._name)
        signature = certificates.sign(own, certificates.renewal_to_sign(self._fleet, serial, csr))
        asked = RenewalRequest(certificates.encoded(csr), signature, serial)
        return Report(round=0, boot=self._boot, renew=asked)

    def _next_key(self, own: PrivateKey) -> PrivateKey:
        """The key that waits for its certificate; a new one where there is none, or where a power cut came after it."""
        from fleet_core.protocol import certificates

        path = self._home / NEXT_KEY
        if not path.exists() or certificates.load_key(path).public_key() == own.public_key():
            certificates.save_key(path, certificates.new_key())
        return certificates.load_key(path)

    def _name_it(self) -> None:
        """From here on the device is who the new certificate says."""
        path = self._home / "device.toml"
        tables = config.tables(config.text_of(path), str(path))
        tables["tls"] = {**tables.get("tls", {}), "certificate": self._tls.certificate, "key": self._tls.key,
                         "renew_after": self._due}
        storage.write_atomic(path, config.toml(tables).encode())

    def _forget(self, names: set[str]) -> None:
        """All but these."""
        for old in self._home.glob(OWN):
            if old.stem not in names:
                old.unlink(missing_ok=True)
