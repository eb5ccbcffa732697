"""The authority of the fleet's certificates, and its successor while devices change over to it.

    ca.key, ca.pem            issues for tokens, the aggregator and the broker
    ca-next.key, ca-next.pem  the successor: issues what devices renew, until it takes the place of the other

Meanwhile broker and devices trust both. Every step may be interrupted: there is a successor once ``ca-next.pem``
exists, and it has taken over once ``ca-next.key`` is renamed.
"""

from __future__ import annotations

import time
from pathlib import Path

from cryptography import x509

from cloud_server.identity.certificate_authority import LONGEST_NAME, Authority, settle
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device
from fleet_core.base import storage
from fleet_core.base.errors import ConfigError
from fleet_core.base.processes import typed
from fleet_core.protocol import certificates

STEM, NEXT = "ca", "ca-next"


def present(folder: Path) -> Authority:
    """Raises StateError."""
    settle(folder, STEM, NEXT)
    return Authority.load(folder / f"{STEM}.key", folder / f"{STEM}.pem")


def successor(folder: Path) -> Authority | None:
    """None while no roll-over is under way. Raises StateError."""
    settle(folder, STEM, NEXT)
    path = folder / f"{NEXT}.pem"
    return Authority.load(folder / f"{NEXT}.key", path) if path.exists() else None


def trusted(folder: Path) -> list[x509.Certificate]:
    """The authorities that broker and devices trust; the last authority issues renewals. Raises StateError."""
    settle(folder, STEM, NEXT)
    paths = (folder / f"{stem}.pem" for stem in (STEM, NEXT))
    return [certificates.load_certificate(path) for path in paths if path.exists()]


def begin(folder: Path, fleet: str) -> Authority:
    """Makes a successor. Raises ConfigError while there is one, and for a fleet without an authority."""
    if not (folder / f"{STEM}.pem").exists():
        raise ConfigError("the fleet has no certificates yet", where=str(folder),
                          hint=f"metafleet init {typed(folder)}")
    if successor(folder) is not None:
        raise ConfigError("a roll-over of the authority is under way", where=str(folder),
                          hint=f"metafleet server status {typed(folder)}; --finish drops the old one")
    # Another name than the one before: OpenSSL looks for an issuer and its revocations by name.
    name = f"{fleet[:LONGEST_NAME]} devices {int(time.time())}"
    return Authority.create(folder / f"{NEXT}.key", folder / f"{NEXT}.pem", name)


def finish(folder: Path) -> None:
    """Replaces the old authority and its key by the successor. Raises ConfigError if there is none."""
    if successor(folder) is None:
        raise ConfigError("no roll-over of the authority is under way", where=str(folder),
                          hint=f"metafleet server roll-authority {typed(folder)}")
    storage.move(folder / f"{NEXT}.key", folder / f"{STEM}.key")
    storage.move(folder / f"{NEXT}.pem", folder / f"{STEM}.pem")


def behind(folder: Path, ledger: Ledger, holders: set[str]) -> list[str]:
    """The enrolled devices of ``holders`` that do not report a certificate of the last authority."""
    wanted = certificates.authority_id(trusted(folder)[-1])
    return [one.name for one in ledger.rows(Device) if one.name in holders and one.status == "enrolled"
            and one.capabilities.get("ca") != wanted]
