"""The fleet's certificates: made beside the signing key, completed where one is missing, never replaced.

    ca.key, ca.pem                    the authority of devices, of the aggregator and of the broker
    tokens-ca.key, tokens-ca.pem      another one, for the port where tokens are taken
    aggregator.key, aggregator.pem    by which the aggregator speaks to the broker
    operators/                        by which the operator's commands do, each with a name of its own at a time
    mosquitto/                        all that a broker needs: configuration, access lists, its certificate, crl.pem

Keys have mode 0600.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypedDict

from cloud_server.broker import mosquitto_config
from cloud_server.broker.mosquitto_config import AGGREGATOR, OPERATORS, Place
from cloud_server.identity.certificate_authority import Authority
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.ledger import Ledger
from cloud_server.records.ledger_tables import Certificate
from fleet_core.base import config, storage
from fleet_core.base.errors import ConfigError, StateError
from fleet_core.base.processes import typed
from fleet_core.link.mqtt import parse_url
from fleet_core.protocol import certificates

LOCAL = ("localhost", "127.0.0.1", "::1")
SYSTEM = "system"


class TlsFiles(TypedDict, total=False):
    """What a link over TLS is given."""

    ca: Path | None
    cert: Path
    key: Path


def authority(folder: Path) -> Authority:
    """The one that signs devices' certificates. Raises StateError."""
    return Authority.load(folder / "ca.key", folder / "ca.pem")


def tokens_authority(folder: Path) -> Authority:
    """The one that signs what opens the port for enrolment. Raises StateError."""
    return Authority.load(folder / "tokens-ca.key", folder / "tokens-ca.pem")


def complete(fleet: Fleet, ledger: Ledger) -> None:
    """Makes what is missing of the certificates and of the broker's folder. Raises StateError, ConfigError."""
    folder, name = fleet.folder, fleet.config.fleet.name
    for stem, title in (("ca", f"{name} devices"), ("tokens-ca", f"{name} tokens")):
        if not (folder / f"{stem}.pem").exists():
            Authority.create(folder / f"{stem}.key", folder / f"{stem}.pem", title)
    _client(fleet, folder / "aggregator", AGGREGATOR)
    if not (folder / "mosquitto" / "mosquitto.conf").exists():
        configure(fleet, ledger, Place(default_hosts(fleet.config.link.broker)))


def configure(fleet: Fleet, ledger: Ledger, place: Place) -> Path:
    """Writes the broker's folder for ``place``; the broker's certificate anew where it is for other hosts. Returns the
    configuration's path."""
    folder = fleet.folder / "mosquitto"
    hosts = tuple(dict.fromkeys((*place.hosts, *LOCAL)))
    before = placed(fleet.folder)
    for stem in ("ca", "tokens-ca"):
        storage.write_atomic(folder / f"{stem}.pem", storage.read_bytes(fleet.folder / f"{stem}.pem", limit=1 << 16))
    if before is None or before.hosts != place.hosts or not _fresh(folder / "server.pem"):
        key = _key(folder / "server.key")
        storage.write_atomic(
            folder / "server.pem", certificates.certificate_pem(authority(fleet.folder).server(hosts, key.public_key()))
        )
    write_revocations(fleet, ledger)
    return mosquitto_config.write(folder, fleet.config.fleet.name, place, revoked_devices(ledger))


def write_revocations(fleet: Fleet, ledger: Ledger, *, also: Iterable[str] = ()) -> None:
    """What the broker has to read again when a device is revoked: the list of certificates and the access list.
    also: devices that the ledger does not call revoked yet."""
    folder, names = fleet.folder / "mosquitto", {*revoked_devices(ledger), *also}
    rows = ledger.rows(Certificate)
    ended = {row.serial: row.revoked_at or time.time() for row in rows if row.revoked_at or row.device in names}
    path = folder / "crl.pem"
    before = storage.read_bytes(path, limit=1 << 26) if path.exists() else None
    storage.write_atomic(path, authority(fleet.folder).revocations(ended, before))
    mosquitto_config.write_access(folder, fleet.config.fleet.name, names)


def revoked_devices(ledger: Ledger) -> list[str]:
    return [device.name for device in ledger.devices() if device.status == "revoked"]


def placed(folder: Path) -> Place | None:
    """What the broker's folder was written for. Raises ConfigError."""
    path = folder / "mosquitto" / "broker.toml"
    return config.load(Place, path) if path.exists() else None


def default_hosts(broker: str | None) -> tuple[str, ...]:
    """The names in the broker's certificate when nobody gives any: the host of the broker that fleet.toml names, or
    this machine's address in its network and its names."""
    if broker is not None and parse_url(broker).host not in LOCAL:
        return (parse_url(broker).host,)
    name = socket.gethostname().partition(".")[0]
    named = (name, f"{name}.local") if name and name.isascii() else ()
    return tuple(dict.fromkeys((*filter(None, (_address(),)), *named))) or ("localhost",)


def _address() -> str:
    """This machine's own address in the network that leads elsewhere; empty for none. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def as_aggregator(fleet: Fleet, url: str) -> TlsFiles:
    """For the aggregator's link to ``url``; nothing for mqtt://. Raises ConfigError, StateError."""
    return _tls_files(fleet, fleet.folder / "aggregator", AGGREGATOR) if parse_url(url).tls else {}


@contextlib.contextmanager
def as_operator(fleet: Fleet, url: str) -> Iterator[TlsFiles]:
    """For the link of one of the operator's commands to ``url``; nothing for mqtt://. No other has the same name while
    this context lasts, for a broker keeps one connection a name. Raises ConfigError, StateError."""
    if not parse_url(url).tls:
        yield {}
        return
    folder = fleet.folder / "operators"
    folder.mkdir(exist_ok=True)
    for name in OPERATORS:
        handle = os.open(folder / f"{name[1:]}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if _locked(handle):
                yield _tls_files(fleet, folder / name[1:], name)
                return
        finally:
            os.close(handle)
    raise StateError(f"{len(OPERATORS)} commands speak to the broker already", where=str(folder), hint="wait for one")


def _locked(handle: int) -> bool:
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _tls_files(fleet: Fleet, stem: Path, name: str) -> TlsFiles:
    if not (fleet.folder / "ca.pem").exists():
        raise ConfigError("the fleet has no certificates yet", where=str(fleet.folder),
                          hint=f"metafleet init {typed(fleet.folder)}")
    _client(fleet, stem, name)
    return {"ca": broker_authority(fleet), "cert": stem.with_suffix(".pem"), "key": stem.with_suffix(".key")}


def _client(fleet: Fleet, stem: Path, name: str) -> None:
    """A key and a certificate for ``name``; made where they are missing, the certificate also from the middle of its
    life on."""
    if not _fresh(stem.with_suffix(".pem")):
        found = authority(fleet.folder).client(name, _key(stem.with_suffix(".key")).public_key())
        storage.write_atomic(stem.with_suffix(".pem"), certificates.certificate_pem(found))


def _fresh(path: Path) -> bool:
    """Whether there is a certificate that need not be made anew."""
    return path.exists() and time.time() < certificates.renew_after(certificates.load_certificate(path))


def broker_authority(fleet: Fleet) -> Path | None:
    """Who is trusted to say which broker is the fleet's: fleet.toml's ``ca``, or the fleet's own; None for those that
    the system trusts."""
    named = fleet.config.link.ca
    if named == SYSTEM:
        return None
    return fleet.folder / (named or "ca.pem")


def _key(path: Path) -> certificates.PrivateKey:
    if not path.exists():
        certificates.save_key(path, certificates.new_key())
    return certificates.load_key(path)


def certificate_facts(ledger: Ledger) -> Mapping[str, Certificate]:
    """The newest certificate of each device that is not revoked."""
    rows = sorted(ledger.rows(Certificate), key=lambda row: row.issued_at)
    return {row.device: row for row in rows if row.revoked_at is None}
