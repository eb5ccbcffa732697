"""The authority of the enrolment port, which signs what a token opens that port with, and those before it.

    tokens-ca.key, tokens-ca.pem            signs tokens; tokens-ca.pem also lists the authorities before it
    tokens-ca-next.key, tokens-ca-next.pem  the successor, while it is being put in place

The port trusts an authority before the present one as long as a token that was made under it is unused and has not
expired; ``finish`` drops it earlier. A roll-over has happened once ``tokens-ca-next.key`` is renamed; before, an
interrupted one has changed nothing.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from cryptography import x509

from cloud_server.identity.certificate_authority import LONGEST_NAME, Authority, settle
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Invitation
from cloud_server.records import key_files
from fleet_core.base import storage
from fleet_core.base.errors import ConfigError
from fleet_core.base.processes import typed
from fleet_core.protocol import certificates

STEM, NEXT = "tokens-ca", "tokens-ca-next"
INVITE = "invite/"
"""Requests of the ledger that begin with this register a token."""
SLACK_S = 2.0
"""A token made this long after a new authority may still be of the one before: it was made at the same time."""


def present(folder: Path) -> Authority:
    """Raises StateError."""
    settle(folder, STEM, NEXT)
    return Authority.load(folder / f"{STEM}.key", folder / f"{STEM}.pem")


def trusted(folder: Path, ledger: Ledger) -> list[x509.Certificate]:
    """The authorities that the enrolment port trusts, the present one first. Raises StateError."""
    known = _known(folder)
    oldest = min((one.made_at for one in unused(ledger)), default=math.inf) if len(known) > 1 else math.inf
    return [known[0], *(old for old, new in zip(known[1:], known, strict=False) if oldest < _made_at(new) + SLACK_S)]


def behind(folder: Path, ledger: Ledger) -> list[str]:
    """The devices whose unused token opens the port by an authority before the present one. Raises StateError."""
    known = _known(folder)
    if len(known) == 1:
        return []
    return sorted({one.device for one in unused(ledger) if one.made_at < _made_at(known[0]) + SLACK_S})


def roll(folder: Path, fleet: str, ledger: Ledger) -> Authority:
    """Puts a new authority in place and deletes the old key. Raises StateError, and ConfigError for a fleet without an
    authority."""
    if not (folder / f"{STEM}.pem").exists():
        raise ConfigError("the fleet has no certificates yet", where=str(folder),
                          hint=f"metafleet init {typed(folder)}")
    key_files.unlock(folder)  # asks now: from the new certificate's date to the renaming no time may pass
    before = trusted(folder, ledger)
    # Another name than the one before: OpenSSL looks for an issuer by name.
    name = f"{fleet[:LONGEST_NAME]} tokens {time.time_ns() // 1_000_000}"
    made = Authority.create(folder / f"{NEXT}.key", folder / f"{NEXT}.pem", name)
    storage.write_atomic(folder / f"{NEXT}.pem", _pem([made.certificate, *before]))
    storage.move(folder / f"{NEXT}.key", folder / f"{STEM}.key")
    settle(folder, STEM, NEXT)
    return made


def finish(folder: Path) -> None:
    """Drops the authorities before the present one: their tokens open the port no more. Raises ConfigError if there is
    none."""
    known = _known(folder)
    if len(known) == 1:
        raise ConfigError("no roll-over of the tokens' authority is under way", where=str(folder),
                          hint=f"metafleet server roll-authority {typed(folder)} --tokens")
    storage.write_atomic(folder / f"{STEM}.pem", _pem(known[:1]))


def port_file(folder: Path, ledger: Ledger) -> bytes:
    """What the enrolment port trusts, PEM. Raises StateError."""
    return _pem(trusted(folder, ledger))


def unused(ledger: Ledger) -> list[Invitation]:
    """The tokens that can still be used, the oldest first, also if the aggregator has not read them yet."""
    new = [Invitation(**json.loads(text)) for key, text in ledger.requests().items() if key.startswith(INVITE)]
    rows = sorted([*ledger.rows(Invitation), *new], key=lambda row: row.made_at)
    return [row for row in rows if row.spent_at is None and row.expires_at > time.time()]


def _known(folder: Path) -> list[x509.Certificate]:
    settle(folder, STEM, NEXT)
    path = folder / f"{STEM}.pem"
    return certificates.all_in(storage.read_bytes(path, limit=certificates.MAX_FILE_BYTES), str(path))


def _made_at(authority: x509.Certificate) -> float:
    return (authority.not_valid_before_utc + certificates.BACK_DATED).timestamp()


def _pem(several: list[x509.Certificate]) -> bytes:
    return b"".join(map(certificates.certificate_pem, several))
