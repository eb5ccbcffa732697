"""Ed25519 signatures: ``ed25519:<key id>:<signature>`` and a newline, followed by the exact bytes that are signed. The
signature is 128 hex digits; 80 characters of base 85 where the body is a short message (``messages.SHORT``).

Only the aggregator has the private key; agents have the public key, so a compromised broker cannot push a model.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fleet_core.base import storage
from fleet_core.base.errors import ConfigError, MessageError, StateError
from fleet_core.protocol import messages

KEY_BYTES = 32
EXPECTED = "64 hex digits"
MAX_FILE_BYTES = 1024
SIGNATURES: dict[int, Callable[[str], bytes]] = {128: bytes.fromhex, 80: base64.b85decode}
"""How a signature is read, by its number of characters."""
LOST_KEY = "restore the fleet's folder from a backup, or make a new fleet in an empty folder with 'metafleet init'"


def write_secret(path: Path, data: bytes) -> None:
    """A file with mode 0600. Raises StateError."""
    storage.write_atomic(path, data, mode=0o600)


class Signer:
    """Holds the private key. public: the public key that agents are given, 64 hex digits."""

    def __init__(self, private: bytes):
        self._key = Ed25519PrivateKey.from_private_bytes(private)
        self.public = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()

    def sign(self, body: bytes) -> bytes:
        made = self._key.sign(body)
        written = base64.b85encode(made).decode() if body.startswith(messages.SHORT_MARK) else made.hex()
        return f"ed25519:{key_id(self.public)}:{written}\n".encode() + body

    @staticmethod
    def create(path: Path, write: Callable[[Path, bytes], None] = write_secret) -> Signer:
        """A new key at ``path``. write: the file, with mode 0600."""
        raw = Ed25519PrivateKey.generate().private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        write(path, raw.hex().encode() + b"\n")
        return Signer(raw)

    @staticmethod
    def load(path: Path, read: Callable[[Path], bytes] | None = None) -> Signer:
        """read: the file's content; None for a plain file. Raises StateError when the file cannot be read or holds no
        key."""
        return Signer(_read_key(path, read or _plain))


def load_public(path: Path) -> str:
    """The public key in a file, 64 hex digits. Raises StateError when the file cannot be read or holds no key."""
    return _read_key(path, _plain).hex()


def _plain(path: Path) -> bytes:
    return storage.read_bytes(path, limit=MAX_FILE_BYTES)


def _read_key(path: Path, read: Callable[[Path], bytes]) -> bytes:
    try:
        key = bytes.fromhex(read(path).decode().strip())
    except StateError as error:
        if error.hint:
            raise
        raise StateError(error.what, where=str(path), expected=EXPECTED, hint=LOST_KEY) from error.__cause__
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise StateError("holds no Ed25519 key", where=str(path), expected=EXPECTED, hint=LOST_KEY)
    return key


def key_id(public: str) -> str:
    """The first 16 hex digits of the public key's sha256."""
    return hashlib.sha256(bytes.fromhex(public)).hexdigest()[:16]


class Verifier:
    """Holds the public key. Raises ConfigError when ``public`` is not a key in 64 hex digits."""

    def __init__(self, public: str):
        try:
            raw = bytes.fromhex(public)
            self._key = Ed25519PublicKey.from_public_bytes(raw)
        except ValueError as error:
            raise ConfigError("is not a fleet's public key", where=public[:80], expected=EXPECTED) from error
        self.id = key_id(public)

    def verify(self, message: bytes) -> bytes:
        """The signed bytes. Raises MessageError unless this key signed exactly these bytes."""
        line, newline, body = message.partition(b"\n")
        parts = line.decode("ascii", "replace").split(":")
        if not newline or len(parts) != 3 or parts[0] != "ed25519" or len(parts[2]) not in SIGNATURES:
            raise MessageError("carries no Ed25519 signature")
        if parts[1] != self.id:
            raise MessageError(f"is signed by key {parts[1][:16]}", expected=f"key {self.id}")
        try:
            self._key.verify(SIGNATURES[len(parts[2])](parts[2]), body)
        except (InvalidSignature, ValueError) as error:
            raise MessageError("has a signature that does not match") from error
        return body
