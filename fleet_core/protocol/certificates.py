"""X.509 certificates of a fleet (RFC 5280, RFC 2986): P-256 keys, signing requests, and the checks on the device.

Certificates travel as DER in base64 and are stored as PEM. No error message quotes a key.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import textwrap
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fleet_core.base import storage
from fleet_core.base.errors import ConfigError, MessageError, StateError

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

MAX_FILE_BYTES = 1 << 16
BACK_DATED = datetime.timedelta(days=1)
"""A certificate is valid from this long before it is made."""
BEGIN = b"-----BEGIN CERTIFICATE-----"
SIGNED_WITH = ec.ECDSA(hashes.SHA256())
MALFORMED = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion)
"""The errors that cryptography raises for bytes that are neither a certificate nor a request."""


# Keys -----------------------------------------------------------------------------------------------------------------


def new_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def save_key(path: Path, key: PrivateKey) -> None:
    """PEM, mode 0600. Raises StateError."""
    storage.write_atomic(path, key_pem(key), mode=0o600)


def key_pem(key: PrivateKey) -> bytes:
    return pem("PRIVATE KEY", private_text(key))


def load_key(path: Path) -> PrivateKey:
    """Raises StateError when the file is absent or holds no P-256 key."""
    return key_of(storage.read_bytes(path, limit=MAX_FILE_BYTES), str(path))


def key_of(data: bytes, where: str) -> PrivateKey:
    """Reads a key in PEM. ``where`` names its origin in errors. Raises StateError."""
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    return _p256(key, where)


def private_of(text: str, where: str) -> PrivateKey:
    """The key that ``private_text`` wrote. ``where`` names its origin in errors. Raises StateError."""
    try:
        key = serialization.load_der_private_key(decoded(text), None)
    except (ValueError, TypeError, UnsupportedAlgorithm, MessageError):
        key = None
    return _p256(key, where)


def _p256(key: object, where: str) -> PrivateKey:
    if not isinstance(key, PrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise StateError("holds no private key", where=where, expected="a P-256 key in PKCS #8, without a password")
    return key


def private_text(key: PrivateKey) -> str:
    """PKCS #8 in base64."""
    form, locked = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return encoded(key.private_bytes(serialization.Encoding.DER, form, locked))


def public_text(key: PublicKey) -> str:
    """SubjectPublicKeyInfo in base64."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return encoded(key.public_bytes(serialization.Encoding.DER, form))


def sign(key: PrivateKey, data: bytes) -> str:
    """ECDSA over SHA-256, DER in base64."""
    return encoded(key.sign(data, SIGNED_WITH))


def signed_by(public: str, signature: str, data: bytes) -> bool:
    """Whether ``signature`` over ``data`` was made with the private key of ``public`` (see ``public_text``)."""
    try:
        key = serialization.load_der_public_key(decoded(public))
        if not isinstance(key, PublicKey):
            return False
        key.verify(decoded(signature), data, SIGNED_WITH)
    except (InvalidSignature, ValueError, UnsupportedAlgorithm, MessageError):
        return False
    return True


# Signing requests and certificates ------------------------------------------------------------------------------------


def request(key: PrivateKey, name: str) -> bytes:
    """A signing request in DER. The authority need not use ``name``: it decides the certificate's name."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject_name(name))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def requested_key(data: bytes) -> PublicKey:
    """The public key of a signing request in DER. Raises MessageError unless that key, a P-256 key, signed it."""
    try:
        csr = x509.load_der_x509_csr(data)
        key, valid = csr.public_key(), csr.is_signature_valid
    except (*MALFORMED, InvalidSignature) as error:
        raise MessageError("is not a signing request") from error
    if not valid or not isinstance(key, PublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise MessageError("is not a signing request signed by its own P-256 key")
    return key


def certificate_of(data: bytes, where: str) -> x509.Certificate:
    """Reads a certificate in PEM or DER. ``where`` names its origin in errors. Raises StateError."""
    try:
        load = x509.load_pem_x509_certificate if data.startswith(b"-----") else x509.load_der_x509_certificate
        return load(data)
    except MALFORMED as error:
        raise StateError("holds no certificate", where=where, expected="X.509") from error


def load_certificate(path: Path) -> x509.Certificate:
    """Raises StateError."""
    return certificate_of(storage.read_bytes(path, limit=MAX_FILE_BYTES), str(path))


def certificate_in(text: str, where: str) -> x509.Certificate:
    """The certificate that ``certificate_text`` wrote. Raises StateError, MessageError."""
    return certificate_of(decoded(text), where)


def certificate_text(certificate: x509.Certificate) -> str:
    """DER in base64."""
    return encoded(certificate.public_bytes(serialization.Encoding.DER))


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def serial_of(certificate: x509.Certificate) -> str:
    """The serial number in hex, as ``openssl x509 -serial`` writes it but in lower case."""
    return f"{certificate.serial_number:x}"


def authority_id(certificate: x509.Certificate) -> str:
    """The id of an authority's key, 40 hex digits (RFC 5280, method 1)."""
    return x509.SubjectKeyIdentifier.from_public_key(certificate.public_key()).digest.hex()


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (*MALFORMED, InvalidSignature):
        return False
    return True


def all_in(data: bytes, where: str) -> list[x509.Certificate]:
    """The certificates in a PEM file. Raises StateError."""
    try:
        return x509.load_pem_x509_certificates(data)
    except MALFORMED as error:
        raise StateError("holds no certificate", where=where, expected="X.509") from error


def renewal_to_sign(fleet: str, serial: str, request: bytes) -> bytes:
    """The bytes that the present certificate's key signs to get the next: the request, bound to fleet and serial
    number."""
    return f"renew {fleet}/{serial}\n".encode() + request


def renew_after(certificate: x509.Certificate) -> int:
    """Unix seconds: the middle of the certificate's validity, when the device begins to ask for the next one."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return int((begin + (end - begin) / 2).timestamp())


def check_own(text: str, key: PublicKey, name: str, authority: x509.Certificate) -> x509.Certificate:
    """The certificate in ``text`` (DER in base64). Raises MessageError unless ``authority`` issued it to ``name`` for
    ``key``: then the sender is not the fleet's aggregator."""
    try:
        found = certificate_in(text, "the answer")
        found.verify_directly_issued_by(authority)
        subject, public = name_of(found), found.public_key()
    except (*MALFORMED, StateError, MessageError, InvalidSignature) as error:
        raise MessageError("carries no certificate issued by the fleet's authority") from error
    if subject != name or not isinstance(public, PublicKey) or public_text(public) != public_text(key):
        raise MessageError("carries the certificate of another device")
    return found


def issued_to(
    text: str, name: str, authority: x509.Certificate | tuple[x509.Certificate, ...], now: datetime.datetime
) -> PublicKey:
    """The public key of the certificate in ``text`` (DER in base64). Raises MessageError unless ``authority``, or one
    of several authorities, issued the certificate to ``name`` and it has not ended."""
    try:
        found = certificate_in(text, name)
        several = authority if isinstance(authority, tuple) else (authority,)
        found.verify_directly_issued_by(next((one for one in several if is_issued_by(found, one)), several[0]))
        subject, public, until = name_of(found), found.public_key(), found.not_valid_after_utc
    except (*MALFORMED, StateError, MessageError, InvalidSignature) as error:
        raise MessageError("shows no certificate issued by the fleet's authority", where=name) from error
    if subject != name or not isinstance(public, PublicKey):
        raise MessageError("shows the certificate of another device", where=name)
    if until < now:
        raise MessageError("shows a certificate that has ended", where=name)
    return public


def name_of(certificate: x509.Certificate) -> str:
    """The common name; empty for none."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def subject_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


# To sign --------------------------------------------------------------------------------------------------------------


def now() -> datetime.datetime:
    """The time in whole seconds, as certificates store it."""
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)


def builder_of(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, until: datetime.datetime
) -> x509.CertificateBuilder:
    """A certificate for ``key``, valid from a day ago until ``until``; the caller adds its purpose."""
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now() - BACK_DATED).not_valid_after(until)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def alternative_name(host: str) -> x509.GeneralName:
    """Raises ConfigError for a malformed host name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError("is not a host name", where=host, expected="ASCII letters, digits, '-' and '.'") from error


# Text -----------------------------------------------------------------------------------------------------------------


def pem(label: str, text: str) -> bytes:
    """DER in base64 as PEM: ``label`` is CERTIFICATE or PRIVATE KEY."""
    lines = "\n".join(textwrap.wrap(text, 64))
    return f"-----BEGIN {label}-----\n{lines}\n-----END {label}-----\n".encode()


def encoded(data: bytes) -> str:
    """DER in base64, as in messages and tokens."""
    return base64.b64encode(data).decode()


def decoded(text: str) -> bytes:
    """The bytes that ``encoded`` wrote. Raises MessageError."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise MessageError("is not base64") from error
