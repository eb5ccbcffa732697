"""A certificate authority with a P-256 key (RFC 5280). The name in a certificate is the name at the broker.

Certificates are valid from a day before they are made, because the clock of a board without a battery may be late.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from cloud_server.records import key_files
from fleet_core.base import storage
from fleet_core.base.errors import StateError
from fleet_core.protocol import certificates
from fleet_core.protocol.certificates import PrivateKey, PublicKey, alternative_name, builder_of, now

AUTHORITY_LIFE = datetime.timedelta(days=30 * 365)
LIFE = datetime.timedelta(days=10 * 365)
"""Lifetime of the aggregator's and the broker's certificates, which are renewed after half of it, and of a revocation
list."""
DEVICE_LIFE, SPREAD = datetime.timedelta(days=5 * 365), datetime.timedelta(days=365)
"""Lifetime of a device's certificate, and by how much at most it is randomly shortened, so that devices enrolled on one
day do not all renew on one day."""
LONGEST_NAME = 30
"""Characters of a fleet's name in the name of a further authority."""
LOST = "put the fleet's folder back from a backup, or make a new fleet in an empty one with 'metafleet init'"


def devices_until() -> datetime.datetime:
    """When a device's certificate that is issued now ends."""
    return now() + DEVICE_LIFE - datetime.timedelta(seconds=secrets.randbelow(int(SPREAD.total_seconds())))


class Authority:
    """A private key, and the ``certificate`` that others trust."""

    def __init__(self, key: PrivateKey, certificate: x509.Certificate):
        self._key, self.certificate = key, certificate

    @staticmethod
    def create(key_path: Path, path: Path, name: str) -> Authority:
        """A new authority: its key at ``key_path``, mode 0600, and its self-signed certificate at ``path``."""
        key = certificates.new_key()
        subject = certificates.subject_name(name)
        builder = builder_of(subject, subject, key.public_key(), now() + AUTHORITY_LIFE)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs=True), critical=True)
        certificate = builder.sign(key, hashes.SHA256())
        key_files.write(key_path, certificates.key_pem(key))
        storage.write_atomic(path, certificates.certificate_pem(certificate))
        return Authority(key, certificate)

    @staticmethod
    def load(key_path: Path, path: Path) -> Authority:
        """Raises StateError for files that are missing, damaged or do not belong together."""
        try:
            key = certificates.key_of(key_files.read(key_path), str(key_path))
            certificate = certificates.load_certificate(path)
        except StateError as error:
            raise StateError(error.what, where=error.where, expected=error.expected, hint=error.hint or LOST) from error
        public = certificate.public_key()
        if not isinstance(public, PublicKey) or public != key.public_key():
            raise StateError("is not the certificate of the key beside it", where=str(path), hint=LOST)
        return Authority(key, certificate)

    def client(self, name: str, key: PublicKey, until: datetime.datetime | None = None) -> x509.Certificate:
        """A client certificate: the holder of ``key`` is ``name`` at a broker. It is not valid for a server."""
        return self._issue(name, key, until, ExtendedKeyUsageOID.CLIENT_AUTH)

    def server(self, hosts: Iterable[str], key: PublicKey) -> x509.Certificate:
        """A broker's certificate for these host names and addresses. It is not valid for a client. Raises ConfigError
        for a malformed host name."""
        names = [alternative_name(host) for host in hosts]
        first = next(iter(hosts))
        return self._issue(first[:64], key, None, ExtendedKeyUsageOID.SERVER_AUTH, x509.SubjectAlternativeName(names))

    def revocations(self, revoked: Mapping[str, float], before: bytes | None) -> bytes:
        """A certificate revocation list, PEM. revoked: serial in hex -> Unix seconds. before: the previous list. The
        new one is dated later, because OpenSSL uses the newest list that it has."""
        updated = now() - certificates.BACK_DATED
        if before is not None:
            last = x509.load_pem_x509_crl(before).last_update_utc
            updated = max(updated, last + datetime.timedelta(seconds=1))
        builder = x509.CertificateRevocationListBuilder().issuer_name(self.certificate.subject)
        builder = builder.last_update(updated).next_update(now() + LIFE)
        for serial, seconds in sorted(revoked.items()):
            when = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
            entry = x509.RevokedCertificateBuilder().serial_number(int(serial, 16)).revocation_date(when)
            builder = builder.add_revoked_certificate(entry.build())
        builder = builder.add_extension(self._issuer_id(), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _issue(
        self, name: str, key: PublicKey, until: datetime.datetime | None, purpose: x509.ObjectIdentifier,
        *more: x509.ExtensionType,
    ) -> x509.Certificate:
        builder = builder_of(certificates.subject_name(name), self.certificate.subject, key, until or now() + LIFE)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs=False), critical=True)
        for extension in (x509.ExtendedKeyUsage([purpose]), self._issuer_id(), *more):
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def _issuer_id(self) -> x509.AuthorityKeyIdentifier:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())


def settle(folder: Path, stem: str, successor: str) -> None:
    """Finishes a replacement of the authority ``stem`` by its ``successor`` that was interrupted between renaming the
    key and renaming the certificate. Raises StateError."""
    before, after = folder / f"{successor}.pem", folder / f"{stem}.pem"
    if before.exists() and not (folder / f"{successor}.key").exists():
        try:
            storage.move(before, after)
        except StateError:
            if before.exists():  # else another process has just done it
                raise


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )
