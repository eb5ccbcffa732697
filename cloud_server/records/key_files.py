"""The fleet's private keys at rest: plain, or sealed under a passphrase.

    keys.seal             a random key, sealed under the passphrase by scrypt; absent while keys are plain
    fleet.key, ca.key, …  the content of a plain file, sealed under that random key

The passphrase can therefore be changed with one atomic write, and an interrupted command leaves every file readable:
plain, or with the passphrase. The cipher is AES-256-GCM. ``scrypt`` (RFC 7914) takes 128 MiB for each guess; the
library's own encryption of PKCS #8 takes 2048 rounds of PBKDF2 and no memory.

The passphrase comes from the file that METAFLEET_PASSPHRASE_FILE names, from systemd's credential
``metafleet-passphrase``, or from the terminal. A process asks for it once. A new passphrase that replaces it comes from
the file that METAFLEET_NEW_PASSPHRASE_FILE names, or from the terminal.
"""

from __future__ import annotations

import functools
import getpass
import json
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from fleet_core.base import schema, storage
from fleet_core.base.errors import ConfigError, StateError
from fleet_core.base.processes import typed

SEAL = "keys.seal"
KEYS = ("fleet.key", "fleet-next.key", "ca.key", "ca-next.key", "tokens-ca.key", "tokens-ca-next.key")
"""Files that a passphrase seals. Brokers and operators' commands read the other keys of the folder without one."""
FROM_FILE, NEW_FROM_FILE = "METAFLEET_PASSPHRASE_FILE", "METAFLEET_NEW_PASSPHRASE_FILE"
CREDENTIAL = "metafleet-passphrase"
MAGIC, SEAL_MAGIC = b'{"metafleet": "sealed key 1"', b'{"metafleet": "passphrase 1"'
MAX_BYTES = 1 << 16
LEAST, MOST = 12, 1024
"""Least number of characters of a new passphrase; largest number of bytes of any."""
COST, BLOCK = 1 << 17, 8
"""N and r of scrypt: 128 N r bytes of memory."""
HEX = r"(?:[0-9a-f]{2})*"


@dataclass(frozen=True)
class Sealed:
    """A file encrypted with AES-256-GCM. nonce, data: in hex. salt, cost: of scrypt, only in ``keys.seal``."""

    metafleet: str
    nonce: str = field(metadata={"pattern": r"[0-9a-f]{24}"})
    data: str = field(metadata={"pattern": HEX, "max_length": MAX_BYTES})
    salt: str = field(default="", metadata={"pattern": r"(?:[0-9a-f]{32})?"})
    cost: int = field(default=COST, metadata={"min": 1 << 14, "max": 1 << 18})


# Read and write a key -------------------------------------------------------------------------------------------------


def read(path: Path, *, limit: int = MAX_BYTES) -> bytes:
    """The plain content of a key's file. Raises StateError if it cannot be read, or the passphrase is missing or
    wrong."""
    data = storage.read_bytes(path, limit=limit)
    return _opened(_sealed(data, path), _key_of(path.parent.resolve()), path) if is_sealed(data) else data


def write(path: Path, data: bytes) -> None:
    """Writes a key, mode 0600; sealed if the folder's keys are sealed. Raises StateError."""
    if (path.parent / SEAL).exists():
        data = _text(MAGIC, _key_of(path.parent.resolve()), data)
    storage.write_atomic(path, data, mode=0o600)


def is_sealed(data: bytes) -> bool:
    return data.startswith(MAGIC)


def unlock(folder: Path) -> None:
    """Asks for the passphrase now, if the folder's keys have one. Raises StateError."""
    if (folder / SEAL).exists():
        _key_of(folder.resolve())


def forget() -> None:
    """Forgets the passphrase, so that it is asked for again."""
    _key_of.cache_clear()


def state(folder: Path) -> str:
    """plain | encrypted | partly, for the keys that exist."""
    found = {is_sealed(storage.read_bytes(path, limit=MAX_BYTES)) for path in _there(folder)}
    return "partly" if len(found) > 1 else "encrypted" if True in found else "plain"


# Set, change and remove the passphrase --------------------------------------------------------------------------------


def encrypt(folder: Path, new: Callable[[], str] | None = None) -> None:
    """Seals the keys that are plain. new(): asks for a passphrase, if the folder has none. Raises ConfigError,
    StateError."""
    seal = folder / SEAL
    if not seal.exists():
        _write_seal(seal, secrets.token_bytes(32), (new or ask_new)())
        forget()
    unlock(folder)
    for path in _there(folder):
        data = storage.read_bytes(path, limit=MAX_BYTES)
        if not is_sealed(data):
            write(path, data)


def change(folder: Path, new: Callable[[], str] | None = None) -> None:
    """Changes the passphrase, with one write. Raises ConfigError, StateError."""
    seal = folder / SEAL
    if not seal.exists():
        raise ConfigError("the keys have no passphrase", where=str(folder),
                          hint=f"metafleet server encrypt-keys {typed(folder)}")
    unlock(folder)
    _write_seal(seal, _key_of(folder.resolve()), (new or partial(ask_new, another=True))())
    forget()


def decrypt(folder: Path) -> None:
    """Writes the keys plain. Raises StateError."""
    for path in _there(folder):
        storage.write_atomic(path, read(path), mode=0o600)
    (folder / SEAL).unlink(missing_ok=True)
    forget()


def ask_new(*, another: bool = False) -> str:
    """A new passphrase; at the terminal it is typed twice. another: in place of the present one. Raises ConfigError,
    StateError."""
    given = _in_file(os.environ.get(NEW_FROM_FILE)) if another else _given()
    text = _asked("new passphrase: ", "the keys") if given is None else given
    if len(text) < LEAST:
        raise ConfigError("the passphrase is too short", expected=f"{LEAST} characters or more")
    if given is None and _asked("again: ", "the keys") != text:
        raise ConfigError("the two passphrases differ", hint="nothing was changed")
    return text


# ----------------------------------------------------------------------------------------------------------------------


def _there(folder: Path) -> list[Path]:
    return [folder / name for name in KEYS if (folder / name).exists()]


@functools.cache
def _key_of(folder: Path) -> bytes:
    """The key that seals the folder's keys. Raises StateError."""
    path = folder / SEAL
    sealed = _sealed(storage.read_bytes(path, limit=MAX_BYTES), path)
    given = _given()
    text = _asked(f"passphrase of {folder}: ", str(folder)) if given is None else given
    return _opened(sealed, _derived(text, bytes.fromhex(sealed.salt), sealed.cost), path)


def _given() -> str | None:
    """The passphrase from a file; None if it has to be typed. Raises StateError."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    credential = "" if folder is None else str(Path(folder) / CREDENTIAL)
    return _in_file(os.environ.get(FROM_FILE) or (credential if os.path.isfile(credential) else None))


def _in_file(name: str | None) -> str | None:
    if not name:
        return None
    path = Path(name)
    try:
        return storage.read_bytes(path, limit=MOST).decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise StateError("is not text", where=str(path), expected="a passphrase in UTF-8") from error


def _asked(prompt: str, where: str) -> str:
    if not sys.stdin.isatty():
        raise StateError("the keys are encrypted, and there is no terminal to ask for the passphrase", where=where,
                         hint=f"{FROM_FILE} names a file with it; a service gets it from systemd: metafleet server "
                              "install --passphrase FILE")
    return getpass.getpass(prompt)[:MOST]


def _derived(passphrase: str, salt: bytes, cost: int) -> bytes:
    return Scrypt(salt=salt, length=32, n=cost, r=BLOCK, p=1).derive(passphrase.encode())


def _write_seal(path: Path, key: bytes, passphrase: str) -> None:
    salt = secrets.token_bytes(16)
    text = _text(SEAL_MAGIC, _derived(passphrase, salt, COST), key, salt=salt.hex(), cost=COST)
    storage.write_atomic(path, text, mode=0o600)


def _text(magic: bytes, key: bytes, data: bytes, **more: str | int) -> bytes:
    nonce = secrets.token_bytes(12)
    fields = {"nonce": nonce.hex(), "data": AESGCM(key).encrypt(nonce, data, magic).hex(), **more}
    return magic + b", " + json.dumps(fields).encode()[1:] + b"\n"


def _sealed(data: bytes, path: Path) -> Sealed:
    """Raises StateError."""
    return schema.stored(Sealed, data, path, "put it back from a backup")


def _opened(sealed: Sealed, key: bytes, path: Path) -> bytes:
    magic = SEAL_MAGIC if path.name == SEAL else MAGIC
    try:
        return AESGCM(key).decrypt(bytes.fromhex(sealed.nonce), bytes.fromhex(sealed.data), magic)
    except InvalidTag as error:
        if path.name == SEAL:
            raise StateError("the passphrase is wrong", where=str(path.parent),
                             hint="or keys.seal belongs to another passphrase") from error
        raise StateError("is sealed for another keys.seal, or damaged", where=str(path),
                         hint="put keys.seal and the keys back from one backup") from error
