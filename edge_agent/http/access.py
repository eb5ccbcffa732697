"""What a server beyond this machine asks for and shows: a token, and a certificate for TLS.

The certificate is the device's own, signed by its own key: a client trusts the file ``serve.pem``. The certificate that
the fleet issued cannot be used here: it is valid for a client alone, so that no device can pass as the broker.
"""

from __future__ import annotations

import contextlib
import datetime
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edge_agent.http.http_messages import Head, Refused
from fleet_core.base import storage
from fleet_core.base.errors import ConfigError
from fleet_core.board.device_settings import Serve
from fleet_core.link.bearer_token import shown, token_in
from fleet_core.link.host_names import is_loopback

TOKEN, CERTIFICATE, KEY = "serve.token", "serve.pem", "serve.key"
LIFE = datetime.timedelta(days=10 * 365)
EVERY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Access:
    """token: what a client has to show; None if none is asked for. tls: None for plain HTTP."""

    token: str | None = None
    tls: ssl.SSLContext | None = None

    def check(self, head: Head) -> None:
        """Raises Refused for a request without the token."""
        if self.token is not None and not shown(head.headers.get("authorization", ""), self.token):
            raise Refused(401, "this device asks for its token: Authorization: Bearer", {"WWW-Authenticate": "Bearer"})


def access_of(home: Path, serve: Serve, names: Iterable[str]) -> Access:
    """The access that ``[serve]`` asks for: token and TLS beyond this machine, unless ``open`` is set. Missing files
    are made in ``home``. names: host names for a new certificate. Raises ConfigError, StateError."""
    if (serve.certificate is None) != (serve.key is None):
        raise ConfigError("certificate and key belong together", where=f"{home / 'device.toml'}: serve")
    guarded = not (serve.open or is_loopback(serve.host))
    token = token_in(home / (serve.token or TOKEN)) if serve.token or guarded else None
    if not (serve.certificate or guarded):
        return Access(token)
    certificate, key = home / (serve.certificate or CERTIFICATE), home / (serve.key or KEY)
    if serve.certificate is None and not (certificate.exists() and key.exists()):
        create(certificate, key, [*names, serve.host])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        tls.load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"cannot be used for TLS: {error}", where=f"{certificate}, {key}",
                          expected="a certificate and its key, PEM") from error
    return Access(token, tls)


def create(certificate: Path, key: Path, names: Iterable[str]) -> None:
    """Writes a key, mode 0600, and a certificate for ``names`` that it signs itself; invalid host names are left out.
    Raises StateError."""
    from cryptography import x509  # memory that a server on this machine does not need
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    from fleet_core.protocol import certificates

    made = certificates.new_key()
    known: list[x509.GeneralName] = []
    for name in dict.fromkeys(names):
        with contextlib.suppress(ConfigError):
            known += [certificates.alternative_name(name)] if name not in EVERY_ADDRESS else []
    subject = certificates.subject_name(str(known[0].value)[:64])
    builder = certificates.builder_of(subject, subject, made.public_key(), certificates.now() + LIFE)
    for extension in (
        x509.SubjectAlternativeName(known),
        x509.BasicConstraints(ca=False, path_length=None), x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
    ):
        builder = builder.add_extension(extension, critical=False)
    certificates.save_key(key, made)
    storage.write_atomic(certificate, certificates.certificate_pem(builder.sign(made, hashes.SHA256())))
