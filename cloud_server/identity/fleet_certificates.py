"""The fleet's certificates. Missing ones are created, existing keys are never replaced. Keys have mode 0600.

    ca.key, ca.pem                    the authority for devices, the aggregator and the broker
    tokens-ca.key, tokens-ca.pem      a separate authority for the enrolment port (``token_authority``)
    aggregator.key, aggregator.pem    the aggregator's client certificate
    operators/                        client certificates of the operator's commands, one name for each at a time
    mosquitto/                        everything a broker needs: configuration, access lists, certificate, crl.pem
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypedDict

from cloud_server.broker import mosquitto_config
from cloud_server.broker.mosquitto_config import AGGREGATOR, OPERATORS, BrokerSetup
from cloud_server.identity import authorities, token_authority
from cloud_server.identity.certificate_authority import Authority
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Certificate
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base import config, storage
from fleet_core.base.errors import ConfigError, StateError
from fleet_core.base.processes import typed
from fleet_core.link.broker_password import Login, login_of
from fleet_core.link.mqtt import parse_url
from fleet_core.protocol import certificates

LOCAL = ("localhost", "127.0.0.1", "::1")
SYSTEM = "system"


class TlsFiles(TypedDict, total=False):
    """The TLS arguments of ``MqttLink``."""

    ca: Path | None
    cert: Path
    key: Path


class LinkFiles(TlsFiles, Login):
    """The TLS arguments of ``MqttLink``, and its login."""


def authority(folder: Path) -> Authority:
    """The authority that signs devices' certificates. Raises StateError."""
    return authorities.present(folder)


def create_missing(fleet: Fleet, ledger: Ledger) -> None:
    """Creates the missing certificates and the broker's folder. Raises StateError, ConfigError."""
    folder, name = fleet.folder, fleet.config.fleet.name
    for stem, title in (("ca", f"{name} devices"), ("tokens-ca", f"{name} tokens")):
        if not (folder / f"{stem}.pem").exists():
            Authority.create(folder / f"{stem}.key", folder / f"{stem}.pem", title)
    _ensure_client(fleet, folder / "aggregator", AGGREGATOR)
    if not (folder / "mosquitto" / "mosquitto.conf").exists():
        configure(fleet, ledger, BrokerSetup(default_hosts(fleet.config.link.broker)))


def configure(fleet: Fleet, ledger: Ledger, setup: BrokerSetup) -> Path:
    """Writes the broker's folder and returns the path of its configuration. The broker's certificate is replaced if it
    is for other hosts, of an old authority or due for renewal."""
    folder = fleet.folder / "mosquitto"
    hosts = tuple(dict.fromkeys((*setup.hosts, *LOCAL)))
    before = saved_setup(fleet.folder)
    trusted = b"".join(map(certificates.certificate_pem, authorities.trusted(fleet.folder)))
    storage.write_atomic(folder / "ca.pem", trusted)
    storage.write_atomic(folder / "tokens-ca.pem", token_authority.port_file(fleet.folder, ledger))
    if before is None or before.hosts != setup.hosts or not _is_current(fleet, folder / "server.pem"):
        key = _key(folder / "server.key")
        storage.write_atomic(
            folder / "server.pem", certificates.certificate_pem(authority(fleet.folder).server(hosts, key.public_key()))
        )
    write_revocations(fleet, ledger)
    return mosquitto_config.write(folder, fleet.config.fleet.name, setup, revoked_devices(ledger))


def write_revocations(fleet: Fleet, ledger: Ledger) -> None:
    """Writes the files that the broker reads again after a revocation: crl.pem and the access list. Devices whose
    revocation the aggregator has still to hear of count as revoked."""
    asked = {key.removeprefix("revoke/") for key in ledger.requests() if key.startswith("revoke/")}
    folder, names = fleet.folder / "mosquitto", {*revoked_devices(ledger), *asked}
    rows = ledger.rows(Certificate)
    ended = {row.serial: row.revoked_at or time.time() for row in rows if row.revoked_at or row.device in names}
    path = folder / "crl.pem"
    before = storage.read_bytes(path, limit=1 << 26) if path.exists() else None
    issuers = filter(None, (authorities.present(fleet.folder), authorities.successor(fleet.folder)))
    storage.write_atomic(path, b"".join(one.revocations(ended, before) for one in issuers))
    mosquitto_config.write_access(folder, fleet.config.fleet.name, names)


def revoked_devices(ledger: Ledger) -> list[str]:
    return [device.name for device in ledger.devices() if device.status == "revoked"]


def saved_setup(folder: Path) -> BrokerSetup | None:
    """The setup that the broker's folder was written for; None without one. Raises ConfigError."""
    path = folder / "mosquitto" / "broker.toml"
    return config.load(BrokerSetup, path) if path.exists() else None


def default_hosts(broker: str | None) -> tuple[str, ...]:
    """The default host names of the broker's certificate: the host of fleet.toml's broker, else this machine's network
    address and names."""
    if broker is not None and parse_url(broker).host not in LOCAL:
        return (parse_url(broker).host,)
    name = socket.gethostname().partition(".")[0]
    named = (name, f"{name}.local") if name and name.isascii() else ()
    return tuple(dict.fromkeys((*filter(None, (_network_address(),)), *named))) or ("localhost",)


def _network_address() -> str:
    """This machine's address on the interface of its default route; empty without one. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def as_aggregator(fleet: Fleet, url: str) -> TlsFiles:
    """TLS arguments of the aggregator's link to ``url``; empty for mqtt://. Raises ConfigError, StateError."""
    return _tls_files(fleet, fleet.folder / "aggregator", AGGREGATOR) if parse_url(url).tls else {}


def login(fleet: Fleet) -> Login:
    """The name and password that fleet.toml gives the aggregator and operators' commands. Raises ConfigError."""
    return login_of(fleet.folder, fleet.config.broker_login)


@contextlib.contextmanager
def as_operator(fleet: Fleet, url: str) -> Iterator[LinkFiles]:
    """TLS arguments of an operator command's link to ``url``, none for mqtt://, and its login. The name in the
    certificate is locked while this context lasts, because a broker keeps one connection per name. Raises ConfigError,
    StateError."""
    if not parse_url(url).tls:
        none: TlsFiles = {}
        yield {**none, **login(fleet)}
        return
    folder = fleet.folder / "operators"
    folder.mkdir(exist_ok=True)
    for name in OPERATORS:
        handle = os.open(folder / f"{name[1:]}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if _try_lock(handle):
                yield {**_tls_files(fleet, folder / name[1:], name), **login(fleet)}
                return
        finally:
            os.close(handle)
    raise StateError(f"{len(OPERATORS)} commands are connected to the broker already", where=str(folder),
                     hint="wait until one has ended")


def _try_lock(handle: int) -> bool:
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
    _ensure_client(fleet, stem, name)
    return {"ca": broker_authority(fleet), "cert": stem.with_suffix(".pem"), "key": stem.with_suffix(".key")}


def _ensure_client(fleet: Fleet, stem: Path, name: str) -> None:
    """Makes sure that ``name`` has a key and a current certificate."""
    if not _is_current(fleet, stem.with_suffix(".pem")):
        signed = authority(fleet.folder).client(name, _key(stem.with_suffix(".key")).public_key())
        storage.write_atomic(stem.with_suffix(".pem"), certificates.certificate_pem(signed))


def _is_current(fleet: Fleet, path: Path) -> bool:
    """Whether the certificate exists, is of the present authority and in the first half of its validity."""
    if not path.exists():
        return False
    found, authority = certificates.load_certificate(path), authorities.trusted(fleet.folder)[0]
    return time.time() < certificates.renew_after(found) and certificates.is_issued_by(found, authority)


def broker_authority(fleet: Fleet) -> Path | None:
    """The PEM file of the authority that signs the broker's certificate: fleet.toml's ``ca``, or the fleet's own; None
    for the authorities that the system trusts."""
    named = fleet.config.link.ca
    if named == SYSTEM:
        return None
    return fleet.folder / (named or "ca.pem")


def _key(path: Path) -> certificates.PrivateKey:
    """The key at ``path``, created if missing."""
    if not path.exists():
        certificates.save_key(path, certificates.new_key())
    return certificates.load_key(path)


def certificate_facts(ledger: Ledger) -> Mapping[str, Certificate]:
    """Device -> its newest certificate that is not revoked."""
    rows = sorted(ledger.rows(Certificate), key=lambda row: row.issued_at)
    return {row.device: row for row in rows if row.revoked_at is None}
