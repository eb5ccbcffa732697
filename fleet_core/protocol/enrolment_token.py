"""A one-time token: the file by which a device that has nothing becomes a device of a fleet.

It holds a certificate and its key that open the broker's port for enrolment and nothing else, and all that a
``device.toml`` needs. The key is the token's secret: the request for the device's own certificate is signed with it, so
that a broker that was taken over cannot ask in the token's name. A token is written with mode 0600 and never printed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fleet_core.base import config, schema, storage

FILE = "enrol.token"
"""The name under which an agent looks for a token in its home."""
MAX_DER = {"max_length": 8192}


@dataclass(frozen=True)
class Token:
    """id: names it, and its topics. device, fleet: who its bearer becomes. fleet_key: the key of manifests, in hex.
    broker, enrolment: mqtts:// URLs of the fleet's broker and of the port where tokens are taken. authority: the
    certificate that signs devices'. broker_authority: the one that signed the broker's, where that is another;
    ``system`` for those that the system trusts. certificate, private_key: what opens the port for enrolment.
    expires: Unix seconds. Certificates and keys are DER in base64."""

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
    """Raises ConfigError with every mistake; no message quotes a key."""
    return config.load(Token, path)


def save(path: Path, token: Token) -> None:
    """Mode 0600. Raises StateError."""
    storage.write_atomic(path, config.toml(schema.plain(token)).encode(), mode=0o600)


def signed(fleet: str, token_id: str, request: bytes) -> bytes:
    """What a token's key signs: the signing request, bound to the fleet and the token."""
    return f"{fleet}/{token_id}\n".encode() + request
