"""A token in a file, shown by clients as ``Authorization: Bearer``."""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path

from fleet_core.base import storage
from fleet_core.base.config import check_private
from fleet_core.base.errors import ConfigError

SHORTEST = 16


def token_in(path: Path) -> str:
    """The token in a file, which is made with mode 0600 if it is missing. Raises ConfigError for a file that others can
    read or whose token is too short, and StateError."""
    if not path.exists():
        storage.write_atomic(path, secrets.token_urlsafe(32).encode() + b"\n", mode=0o600)
    check_private(path)
    token = storage.read_bytes(path, limit=1024).decode(errors="replace").strip()
    if len(token) < SHORTEST or not token.isascii():
        raise ConfigError("is not a token", where=str(path), expected=f"at least {SHORTEST} ASCII characters",
                          hint="delete it, and a new one is made")
    return token


def shown(authorization: str, token: str) -> bool:
    """Whether the header ``Authorization`` shows ``token``; takes the same time however much of it is right."""
    kind, _, given = authorization.partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())
