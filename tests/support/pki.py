"""Certificates for tests: a fleet's authority, devices and tokens, a mosquitto that requires them, and a user's own
PKI."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cloud_server.broker.mosquitto_config import BrokerSetup
from cloud_server.broker.private_broker import Broker, start_secured
from cloud_server.identity import fleet_certificates
from cloud_server.identity.audit_log import Recorder
from cloud_server.identity.token_enrolment import Enrolments, make_token
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device
from cloud_server.records.fleet_folder import Fleet, method_of
from cloud_server.records.fleet_settings import FleetConfig
from fleet_core.base import config
from fleet_core.link.mqtt import MqttLink
from fleet_core.protocol import certificates, enrolment_token, messages
from fleet_core.protocol.device_messages import EnrolAnswer, EnrolRequest
from fleet_core.protocol.enrolment_token import Token
from fleet_core.protocol.signing import Signer
from tests.support.brokers import free_port, until
from tests.support.inprocess import config_text

HOURS_S = 3600.0


def fleet_without_model(folder: Path) -> Fleet:
    """A fleet ``t`` with keys, certificates and a ledger, without a model."""
    text = config_text()
    settings = config.parse(FleetConfig, text, "text")
    fleet = Fleet(folder, settings, *method_of(settings, folder / "fleet.toml"))
    (folder / "fleet.pub").parent.mkdir(parents=True, exist_ok=True)
    (folder / "fleet.toml").write_text(text)
    (folder / "fleet.pub").write_text(Signer.create(folder / "fleet.key").public)
    with Ledger(fleet.ledger_path) as ledger:
        fleet_certificates.create_missing(fleet, ledger)
    return fleet


LAB = """
[fleet]
name = "lab"

[model]
name = "cnn1d"
classes = ["N", "S"]
input = {shape = [1, 8], dtype = "float32"}
"""


def lab_fleet(folder: Path) -> None:
    """A fleet in ``folder``/lab with keys, certificates, a ledger and a broker's folder, without a model."""
    (folder / "lab").mkdir()
    (folder / "lab/fleet.toml").write_text(LAB)
    (folder / "lab/fleet.pub").write_text(Signer.create(folder / "lab/fleet.key").public)
    fleet = Fleet.load(folder / "lab")
    with Ledger(fleet.ledger_path) as ledger:
        fleet_certificates.create_missing(fleet, ledger)
        fleet_certificates.configure(fleet, ledger, BrokerSetup(("192.0.2.7",)))


@contextmanager
def secured_broker(fleet: Fleet) -> Iterator[tuple[Broker, BrokerSetup]]:
    """A mosquitto with the fleet's configuration, on free ports."""
    place = BrokerSetup(("127.0.0.1",), free_port(), free_port(), listen="127.0.0.1")
    with Ledger(fleet.ledger_path) as ledger:
        path = fleet_certificates.configure(fleet, ledger, place)
    path.write_text(path.read_text() + "log_type information\n")  # for ``reload_broker``
    broker = start_secured(path, place)
    try:
        yield broker, place
    finally:
        broker.stop()


def reload_broker(broker: Broker, fleet: Fleet) -> None:
    """Reload the broker and wait for it. mosquitto checks for signals when it has work or every 0.1 s; clients that it
    accepts before meet the old certificates."""
    before = reload_count(fleet)
    broker.reload()
    until(lambda: reload_count(fleet) > before)


def reload_count(fleet: Fleet) -> int:
    """How often the broker has started to reload its files."""
    return (fleet.folder / "mosquitto/broker.log").read_bytes().count(b"Reloading config")


@dataclass
class Enroller:
    """The aggregator's side of enrolment. sent: (topic, payload) of every answer."""

    fleet: Fleet
    ledger: Ledger
    now: Callable[[], float]
    sent: list[tuple[str, bytes]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    changes: list[bool] = field(default_factory=list)

    def enrolments(self) -> Enrolments:
        link = SimpleNamespace(publish=lambda topic, payload: self.sent.append((topic, payload)))
        return Enrolments(
            self.fleet, self.ledger, cast("Any", link), admit=self.admit, changed=lambda: self.changes.append(True),
            audit=Recorder(self.fleet.folder, self.now, self.lines.append), now=self.now, log=self.lines.append,
        )

    def admit(self, name: str) -> None:
        self.ledger.put(Device(name=name))

    def token(self, device: str, valid_s: float = HOURS_S) -> Token:
        made, invitation = make_token(self.fleet, device, "mqtts://h:1", "mqtts://h:2", valid_s)
        self.enrolments().invite(invitation)
        return made


def signed_request(made: Token, key: certificates.PrivateKey, *, fleet: str | None = None, token_id: str = "",
               signer: certificates.PrivateKey | None = None) -> bytes:
    """The request for ``key`` signed with the token's key, or a request that is wrong in one field."""
    csr = certificates.request(key, made.device)
    body = enrolment_token.to_sign(fleet or made.fleet, token_id or made.id, csr)
    signature = certificates.sign(signer or certificates.private_of(made.private_key, "token"), body)
    return messages.encode(EnrolRequest(certificates.encoded(csr), signature))


def answer_in(payload: bytes) -> EnrolAnswer:
    return messages.decode(EnrolAnswer, payload)


@dataclass(frozen=True)
class Credentials:
    """PEM files of an MQTT client."""

    ca: Path
    cert: Path
    key: Path

    def link(self, url: str, client_id: str, **options: Any) -> MqttLink:
        return MqttLink(url, client_id=client_id, ca=self.ca, cert=self.cert, key=self.key, **options)


def credentials_for(fleet: Fleet, name: str, folder: Path, authority: Any = None) -> Credentials:
    """A valid certificate for ``name``, signed by the fleet's authority or by ``authority``."""
    folder.mkdir(parents=True, exist_ok=True)
    key = certificates.new_key()
    signed = (authority or fleet_certificates.authority(fleet.folder)).client(name, key.public_key())
    certificates.save_key(folder / "own.key", key)
    (folder / "own.pem").write_bytes(certificates.certificate_pem(signed))
    return Credentials(fleet.folder / "ca.pem", folder / "own.pem", folder / "own.key")


def aggregator_credentials(fleet: Fleet) -> Credentials:
    return Credentials(fleet.folder / "ca.pem", fleet.folder / "aggregator.pem", fleet.folder / "aggregator.key")


def token_credentials(made: Token, fleet: Fleet, folder: Path) -> Credentials:
    """The certificate and key that a token carries."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token.pem").write_bytes(certificates.pem("CERTIFICATE", made.certificate))
    (folder / "token.key").write_bytes(certificates.pem("PRIVATE KEY", made.private_key))
    return Credentials(fleet.folder / "ca.pem", folder / "token.pem", folder / "token.key")


@dataclass(frozen=True)
class UserPki:
    """PEM files. server, device: (certificate, key)."""

    ca: Path
    server: tuple[Path, Path]
    device: tuple[Path, Path]


def user_pki(folder: Path, addresses: list[str]) -> UserPki:
    """A user's own PKI for a broker at ``addresses``. It lacks the key identifiers that RFC 5280 asks for, as
    certificates made with mosquitto-tls(7)'s commands do."""
    now = datetime.datetime.now(datetime.UTC)
    authority = ec.generate_private_key(ec.SECP256R1())

    def issue(name: str, key: ec.EllipticCurvePrivateKey, *extensions: x509.ExtensionType) -> Path:
        def called(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        builder = (
            x509.CertificateBuilder().subject_name(called(name)).issuer_name(called("authority"))
            .public_key(key.public_key()).serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        path = folder / f"{name}.pem"
        path.write_bytes(builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return path

    def pair(name: str, *extensions: x509.ExtensionType) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        path = folder / f"{name}.key"
        path.write_bytes(key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ))
        return issue(name, key, *extensions), path

    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address)) for address in addresses])
    ca = issue("authority", authority, x509.BasicConstraints(ca=True, path_length=None))
    return UserPki(ca, pair("broker", names), pair("device"))
