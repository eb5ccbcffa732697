"""Checks a program on this device against the statement that the fleet's key has signed.

``FLEET_KEY`` is root's: the agent can read it, not change it. The first flash writes it. Successions that the agent has
followed lead from it to a newer key; each is signed, so the agent can withhold one but not forge one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from edge_agent.device.fleet_keys import readable_ring
from fleet_core.base import storage
from fleet_core.base.errors import ConfigError, FlashError, MessageError
from fleet_core.protocol import program_statement
from fleet_core.protocol.program_statement import FILE, MANIFEST, MAX_BYTES, MAX_MANIFEST_BYTES, Statement
from fleet_core.protocol.signing import Verifier, load_public

FLEET_KEY, AGENT = Path("/etc/metafleet/fleet.pub"), Path("/var/lib/metafleet")


def verifier_of(key: Path) -> Verifier:
    """Raises ConfigError if there is no key."""
    if not key.exists():
        raise ConfigError("there is no key of a fleet here", where=str(key),
                          hint="the first flash puts it there; or name one: --key FILE")
    return readable_ring(AGENT, load_public(key))


def signed_text(path: Path, verifier: Verifier) -> bytes:
    """The text in a signed file of at most 64 KiB. Raises FlashError unless the key has signed it."""
    try:
        return verifier.verify(storage.read_bytes(path, limit=MAX_BYTES))
    except MessageError as error:
        raise refused(path, error) from error


def check_installed(folder: Path, verifier: Verifier) -> Statement:
    """Compares every file of an installed program with its signed statement, and returns that. Raises FlashError."""
    try:
        statement = program_statement.parse(verifier.verify(storage.read_bytes(folder / FILE, limit=MAX_BYTES)))
        manifest = storage.read_bytes(folder / MANIFEST, limit=MAX_MANIFEST_BYTES)
        listed = program_statement.read_manifest(manifest, statement)
    except MessageError as error:
        raise refused(folder, error) from error
    wrong = [name for name, sha256 in listed.items() if sha256_of(folder / name) != sha256]
    if wrong:
        more = f" and {len(wrong) - 1} more files" if len(wrong) > 1 else ""
        raise FlashError(f"{wrong[0]}{more} differ from what was signed, or are missing", where=str(folder),
                         hint="flash the device again")
    return statement


def refused(path: Path, error: MessageError) -> FlashError:
    """The error of a file that the fleet's key has not signed, with what to do."""
    return FlashError(f"the program is refused: it {error.what}", where=str(path), expected=error.expected,
                      hint="flash it from the folder of the fleet that this device belongs to; if the fleet has a new "
                           f"key and the agent has not switched to it, remove {FLEET_KEY} on the device first")


def sha256_of(path: Path) -> str:
    """SHA-256 in hex; empty if the file cannot be read."""
    digest = hashlib.sha256()
    try:
        if path.is_symlink():
            return ""
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        return ""
    return digest.hexdigest()
