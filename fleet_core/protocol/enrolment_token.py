"""A one-time token: the file with which a new device enrols in a fleet.

It holds what ``device.toml`` needs, and a certificate with its key that is valid only at the broker's enrolment port.
The device signs the request for its own certificate with this key, so that a compromised broker cannot send one in its
name. A token is written with mode 0600 and never printed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fleet_core.base import config, schema

FILE = "enrol.token"
"""The token's file name in the agent's home folder."""
MAX_DER = {"max_length": 8192}


@dataclass(frozen=True)
class Token:
    """Certificates and keys are DER in base64.

    id: part of the enrolment topics. device, fleet: names that the holder gets. fleet_key: public key that verifies
    manifests, in hex. broker, enrolment: mqtts:// URLs of the broker's normal and enrolment ports. expires: Unix
    seconds. authority: the certificate that signs device certificates. certificate, private_key: for the enrolment
    port. broker_authority: the certificate that signed the broker's, if another; ``system`` for those that the system
    trusts.
    """

    id: str = field(metadata={"pattern": r"[0-9a-f]{32}"})
    device: str = field(metadata={"pattern": r"[A-Za-z0-9_-]{1,64}"})
    fleet: str = field(metadata={"pattern": r"[A-Za-z0-9_-]{1,64}"})
    fleet_key: str = field(metadata={"pattern": r"[0-9a-f]{64}"})
    broker: str = field(metadata={"max_length": 300})
    enrolment: str = field(metadata={"max_length": 300})
    expires: int = field(metadata={"min": 0, "max": 1 << 40})
    authority: str = field(metadata=MAX_DER)
    certificate: str = field(repr=False, metadata=MAX_DER)
    private_key: str = field(repr=False, metadata=MAX_DER)
    broker_authority: str = field(default="", metadata=MAX_DER)


def load(path: Path) -> Token:
    """Raises ConfigError that lists every mistake and quotes no key."""
    return config.load(Token, path)


def save(path: Path, token: Token) -> None:
    """Mode 0600. Raises StateError."""
    from fleet_core.base import storage  # with numpy, which an agent that looks for a token does not need yet

    storage.write_atomic(path, config.toml(schema.plain(token)).encode(), mode=0o600)


def to_sign(fleet: str, token_id: str, request: bytes) -> bytes:
    """What the token's key signs: the request, bound to the fleet and the token."""
    return f"{fleet}/{token_id}\n".encode() + request


def token_in(home: Path, named: Path | None = None) -> Path | None:
    """The unused token: the file ``named`` if it exists, else the one in the home, else None."""
    return next((path for path in (named, home / FILE) if path is not None and path.is_file()), None)
