"""The fleet's certificates, tokens, and the aggregator's answer to enrolment requests."""

from __future__ import annotations

import datetime
import ssl
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256

from cloud_server.broker import mosquitto_config
from cloud_server.broker.mosquitto_config import BrokerSetup
from cloud_server.devices import devices
from cloud_server.identity import fleet_certificates
from cloud_server.identity.certificate_authority import Authority
from cloud_server.identity.token_enrolment import enrolment_url, issue_token, make_token
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Certificate, Device, Invitation
from cloud_server.records import signing_keys
from edge_agent.connection import enrolment
from edge_agent.connection.broker_login import tls_files
from edge_agent.device import fleet_keys
from fleet_core.base.errors import ConfigError, MessageError, StateError
from fleet_core.board.device_settings import Identity, Settings, settings_of
from fleet_core.link.interface import Message
from fleet_core.link.loopback import LoopbackLink
from fleet_core.protocol import certificates, enrolment_token, messages
from fleet_core.protocol.device_messages import EnrolRequest
from fleet_core.protocol.topics import enrolment_answer, enrolment_request
from tests.support.inprocess import config_text, world
from tests.support.pki import HOURS_S, Enroller, answer_in, fleet_without_model, signed_request
from tests.support.powercut import cut_at
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def enroller(tmp_path: Path) -> Iterator[Enroller]:
    fleet = fleet_without_model(tmp_path / "fleet")
    with Ledger(fleet.ledger_path) as ledger:
        yield Enroller(fleet, ledger, time.time)


# Files ----------------------------------------------------------------------------------------------------------------


def test_keys_are_the_owners_alone_and_nothing_is_replaced(enroller: Enroller) -> None:
    folder = enroller.fleet.folder
    keys = sorted(folder.rglob("*.key"))
    names = {"aggregator.key", "ca.key", "fleet.key", "server.key", "tokens-ca.key"}
    assert {path.name for path in keys} == names
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if "ledger" not in path.name}
    fleet_certificates.create_missing(enroller.fleet, enroller.ledger)
    assert {path: path.read_bytes() for path in before} == before


def test_what_is_missing_is_made_by_the_same_authority(enroller: Enroller) -> None:
    folder = enroller.fleet.folder
    authority = (folder / "ca.pem").read_bytes()
    (folder / "aggregator.pem").unlink()
    fleet_certificates.create_missing(enroller.fleet, enroller.ledger)
    assert (folder / "ca.pem").read_bytes() == authority
    found = certificates.load_certificate(folder / "aggregator.pem")
    found.verify_directly_issued_by(certificates.load_certificate(folder / "ca.pem"))
    assert certificates.name_of(found) == ".aggregator"


def test_a_lost_authority_is_an_error_and_not_a_new_one(enroller: Enroller) -> None:
    (enroller.fleet.folder / "ca.key").write_text("nothing")
    with pytest.raises(StateError, match=r"ca\.key: holds no private key(.|\n)*hint: put the fleet's folder back"):
        fleet_certificates.authority(enroller.fleet.folder)
    (enroller.fleet.folder / "ca.key").write_bytes((enroller.fleet.folder / "tokens-ca.key").read_bytes())
    with pytest.raises(StateError, match=r"ca\.pem: is not the certificate of the key"):
        fleet_certificates.authority(enroller.fleet.folder)


def test_the_brokers_lists_are_written_again_only_if_an_enrolment_changes_them(enroller: Enroller) -> None:
    def enrol() -> None:
        made = enroller.token("d0")
        enroller.enrolments().on_request(made.id, signed_request(made, certificates.new_key()))

    enrol()
    assert enroller.changes == [], "a new device: nothing was revoked, and nobody was denied"
    enrol()
    assert len(enroller.changes) == 1, "its first certificate is revoked"
    enroller.enrolments().revoke("d0", time.time() + 1)
    enroller.ledger.put(Device(name="d0", status="revoked"))
    before = len(enroller.changes)
    enrol()
    assert len(enroller.changes) == before + 1, "the access list does not deny it any more"


def test_certificates_begin_a_day_ago_and_are_good_for_one_thing(enroller: Enroller) -> None:
    folder = enroller.fleet.folder
    now = datetime.datetime.now(datetime.UTC)
    for path, server in ((folder / "aggregator.pem", False), (folder / "mosquitto" / "server.pem", True)):
        found = certificates.load_certificate(path)
        assert found.not_valid_before_utc <= now - certificates.BACK_DATED + datetime.timedelta(minutes=1)
        assert found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
        purposes = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(purposes) == [getattr(x509.oid.ExtendedKeyUsageOID, "SERVER_AUTH" if server else "CLIENT_AUTH")]


@pytest.mark.needs("openssl")
def test_another_implementation_takes_the_certificates_strictly(enroller: Enroller) -> None:
    folder = enroller.fleet.folder
    for path, purpose in (("aggregator.pem", "sslclient"), ("mosquitto/server.pem", "sslserver")):
        verify = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", str(folder / "ca.pem")]
        assert subprocess.run([*verify, str(folder / path)], capture_output=True, check=False).returncode == 0
        wrong = [*verify[:4], {"sslclient": "sslserver", "sslserver": "sslclient"}[purpose], *verify[5:]]
        assert subprocess.run([*wrong, str(folder / path)], capture_output=True, check=False).returncode != 0


def test_the_brokers_certificate_is_made_anew_for_other_hosts_only(enroller: Enroller) -> None:
    folder = enroller.fleet.folder / "mosquitto"
    fleet_certificates.configure(enroller.fleet, enroller.ledger, BrokerSetup(("pi.local", "10.0.0.7")))
    first = (folder / "server.pem").read_bytes()
    names = x509.load_pem_x509_certificate(first).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["pi.local", "localhost"]
    assert "10.0.0.7" in map(str, names.get_values_for_type(x509.IPAddress))
    fleet_certificates.configure(enroller.fleet, enroller.ledger, BrokerSetup(("pi.local", "10.0.0.7"), port=9))
    assert (folder / "server.pem").read_bytes() == first
    fleet_certificates.configure(enroller.fleet, enroller.ledger, BrokerSetup(("other",)))
    assert (folder / "server.pem").read_bytes() != first
    with pytest.raises(ConfigError, match="is not a host name"):
        fleet_certificates.configure(enroller.fleet, enroller.ledger, BrokerSetup(("höst",)))


def test_a_configuration_for_another_machine_names_the_folder_there(enroller: Enroller) -> None:
    path = fleet_certificates.configure(enroller.fleet, enroller.ledger, BrokerSetup(("h",), at="/etc/mosquitto/t"))
    lines = path.read_text().splitlines()
    assert "cafile /etc/mosquitto/t/ca.pem" in lines
    assert str(enroller.fleet.folder) not in path.read_text()


def test_a_list_of_the_revoked_is_always_newer_than_the_one_before(enroller: Enroller) -> None:
    authority = fleet_certificates.authority(enroller.fleet.folder)
    lists = [authority.revocations({}, None)]
    for serial in ("1", "2", "3"):
        lists.append(authority.revocations({serial: 5.0}, lists[-1]))
    updated = [x509.load_pem_x509_crl(text).last_update_utc for text in lists]
    assert updated == sorted(set(updated))
    last = x509.load_pem_x509_crl(lists[-1])
    key = authority.certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert last.is_signature_valid(key)
    assert [entry.serial_number for entry in last] == [3]


def test_access_lists_hold_what_the_protocol_says_and_no_more() -> None:
    device = [line for line in mosquitto_config.access("f", []).splitlines() if line.startswith("pattern")]
    assert device == [
        "pattern write fl1/f/a/%u/up/+/+", "pattern write fl1/f/a/%u/st", "pattern write fl1/f/a/%u/rep",
        "pattern write fl1/f/a/%u/an/+", "pattern write fl1/f/a/%u/alarm",
        "pattern read fl1/f/a/%u/dn", "pattern read fl1/f/a/%u/q/#",
        "pattern read fl1/f/r/#", "pattern read fl1/f/b/#", "pattern read fl1/f/srv",
    ]
    assert mosquitto_config.enrolment_access("f") == "pattern write fl1/f/en/%u/req\npattern read fl1/f/en/%u/ans\n"
    assert "user d7\ntopic deny #\n" in mosquitto_config.access("f", ["d7"])


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_a_token_is_the_owners_alone_and_says_no_secret_of_itself(enroller: Enroller, tmp_path: Path) -> None:
    made = enroller.token("d0")
    enrolment_token.save(tmp_path / "x.token", made)
    assert stat.S_IMODE((tmp_path / "x.token").stat().st_mode) == 0o600
    assert enrolment_token.load(tmp_path / "x.token") == made
    assert made.private_key not in repr(made)
    for damaged in ("", "id = 3\n", (tmp_path / "x.token").read_text().replace("private_key", "privat_key")):
        (tmp_path / "y.token").write_text(damaged)
        with pytest.raises(ConfigError) as caught:
            enrolment_token.load(tmp_path / "y.token")
        assert made.private_key not in str(caught.value)


def test_a_token_is_for_a_broker_with_tls(enroller: Enroller) -> None:
    with pytest.raises(ConfigError, match="a token needs a broker with TLS"):
        make_token(enroller.fleet, "d0", "mqtt://h:1", "mqtts://h:2", 60)
    assert enrolment_url(enroller.fleet, "mqtts://h:7000") == "mqtts://h:7001"
    with pytest.raises(ConfigError, match="devices with a token need an address"):
        enrolment_url(enroller.fleet, "wss://h/mqtt")
    assert enrolment_url(enroller.fleet, f"mqtts://h:{mosquitto_config.PORT}") == f"mqtts://h:{mosquitto_config.ENROLMENT_PORT}"


def test_a_token_gives_its_device_one_certificate(enroller: Enroller) -> None:
    made, key = enroller.token("d0"), certificates.new_key()
    text = enroller.enrolments().certificate(made.id, signed_request(made, key))
    authority = fleet_certificates.authority(enroller.fleet.folder).certificate
    found = certificates.check_own(text, key.public_key(), "d0", authority)
    left = found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=4 * 365 - 1) < left < datetime.timedelta(days=5 * 365)
    (row,) = enroller.ledger.rows(Certificate)
    assert (row.device, row.serial) == ("d0", certificates.serial_of(found))
    assert [device.name for device in enroller.ledger.devices()] == ["d0"]
    assert enroller.enrolments().certificate(made.id, signed_request(made, key)) == text, "its answer was lost"
    with pytest.raises(MessageError, match="the token was used before"):
        enroller.enrolments().certificate(made.id, signed_request(made, certificates.new_key()))
    assert len(enroller.ledger.rows(Certificate)) == 1


def test_a_token_dies_at_its_date_whatever_the_broker_lets_through(enroller: Enroller) -> None:
    made = enroller.token("d0", valid_s=60)
    enroller.now = lambda: made.expires + 1.0
    with pytest.raises(MessageError, match="the token has expired"):
        enroller.enrolments().certificate(made.id, signed_request(made, certificates.new_key()))
    assert enroller.ledger.rows(Certificate) == []
    enroller.now = lambda: made.expires - 1.0
    assert enroller.enrolments().certificate(made.id, signed_request(made, certificates.new_key()))


def test_a_token_of_another_fleet_is_unknown(enroller: Enroller, tmp_path: Path) -> None:
    other = fleet_without_model(tmp_path / "other")
    stranger, _ = make_token(other, "d0", "mqtts://h:1", "mqtts://h:2", HOURS_S)
    with pytest.raises(MessageError, match="is not a token of this fleet"):
        enroller.enrolments().certificate(stranger.id, signed_request(stranger, certificates.new_key()))
    made = enroller.token("d0")
    with pytest.raises(MessageError, match="not signed with the token's key"):
        enroller.enrolments().certificate(made.id, signed_request(made, certificates.new_key(), fleet="other"))


def test_a_request_that_the_tokens_key_did_not_sign_is_refused(enroller: Enroller) -> None:
    """So that a compromised broker, which reads every request, cannot send requests in the token's name."""
    made, other = enroller.token("d0"), enroller.token("d1")
    key = certificates.new_key()
    forged = [
        signed_request(made, key, signer=key), signed_request(made, key, token_id=other.id),
        signed_request(other, key), messages.encode(EnrolRequest("", "")),
    ]
    seen = messages.decode(EnrolRequest, signed_request(made, key))
    forged.append(messages.encode(EnrolRequest(certificates.encoded(certificates.request(other_key(), "d0")),
                                               seen.signature)))
    for payload in forged:
        with pytest.raises(MessageError, match="not signed with the token's key"):
            enroller.enrolments().certificate(made.id, payload)
    assert enroller.ledger.rows(Certificate) == []


def other_key() -> certificates.PrivateKey:
    return certificates.new_key()


def test_what_is_no_request_is_refused_and_answered_with_the_reason(enroller: Enroller) -> None:
    made = enroller.token("d0")
    bearer = certificates.private_of(made.private_key, "token")
    weak = rsa.generate_private_key(65537, 1024)
    builder = x509.CertificateSigningRequestBuilder().subject_name(certificates.subject_name("d0"))
    version_3 = certificates.request(other_key(), "d0").replace(b"\x02\x01\x00", b"\x02\x01\x03", 1)
    weakly = builder.sign(weak, SHA256()).public_bytes(serialization.Encoding.DER)
    for csr in (b"", b"no request", weakly, version_3):
        signature = certificates.sign(bearer, enrolment_token.to_sign("t", made.id, csr))
        request = EnrolRequest(certificates.encoded(csr), signature)
        with pytest.raises(MessageError, match="is not a signing request"):
            enroller.enrolments().on_request(made.id, messages.encode(request))
    for payload in (b"{", b"[]", bytes(9000), b'{"csr":"%%","signature":""}'):
        with pytest.raises(MessageError):
            enroller.enrolments().on_request(made.id, payload)
    assert {topic for topic, _ in enroller.sent} == {f"fl1/t/en/{made.id}/ans"}
    assert all(answer_in(payload).refused and not answer_in(payload).certificate for _, payload in enroller.sent)


def test_a_device_that_is_enrolled_anew_has_one_certificate_that_holds(enroller: Enroller) -> None:
    first, second = enroller.token("d0"), enroller.token("d0")
    key = certificates.new_key()
    for made in (first, second):
        enroller.enrolments().certificate(made.id, signed_request(made, key))
    old, new = sorted(enroller.ledger.rows(Certificate), key=lambda row: row.issued_at)
    assert old.revoked_at is not None
    assert new.revoked_at is None
    listed = x509.load_pem_x509_crl((enroller.fleet.folder / "mosquitto" / "crl.pem").read_bytes())
    assert [f"{entry.serial_number:x}" for entry in listed] == [old.serial]
    with pytest.raises(MessageError, match="used before"):
        enroller.enrolments().certificate(first.id, signed_request(first, key))


def test_a_revoked_device_loses_its_certificate_and_its_tokens(enroller: Enroller) -> None:
    made, unused = enroller.token("d0"), enroller.token("d0")
    enroller.enrolments().certificate(made.id, signed_request(made, certificates.new_key()))
    enroller.ledger.put(Device(name="d0", status="revoked"))
    before = len(enroller.changes)
    enroller.enrolments().revoke("d0", time.time())
    assert len(enroller.changes) == before + 1, "the broker is told"
    folder = enroller.fleet.folder / "mosquitto"
    assert len(list(x509.load_pem_x509_crl((folder / "crl.pem").read_bytes()))) == 1
    assert "user d0\ntopic deny #" in (folder / "acl").read_text()
    with pytest.raises(MessageError, match="used before"):
        enroller.enrolments().certificate(unused.id, signed_request(unused, certificates.new_key()))
    again = enroller.token("d0")
    enroller.enrolments().revoke("d0", time.time() - 60)  # requested before, and heard late
    assert enroller.enrolments().certificate(again.id, signed_request(again, certificates.new_key()))
    assert "user d0" not in (folder / "acl").read_text()


def test_devices_that_are_revoked_while_no_aggregator_runs_are_all_denied(enroller: Enroller) -> None:
    for name in ("d0", "d1"):
        made = enroller.token(name)
        enroller.enrolments().certificate(made.id, signed_request(made, certificates.new_key()))
    for name in ("d0", "d1"):
        devices.revoke(enroller.fleet, name)
    folder = enroller.fleet.folder / "mosquitto"
    assert [f"user {name}\ntopic deny #" in (folder / "acl").read_text() for name in ("d0", "d1")] == [True, True]
    assert len(list(x509.load_pem_x509_crl((folder / "crl.pem").read_bytes()))) == 2


def test_a_list_that_was_not_written_is_written_when_the_device_asks_again(enroller: Enroller) -> None:
    """The aggregator died between the certificate and the broker's lists."""
    side = enroller.enrolments()
    first, second = enroller.token("d0"), enroller.token("d0")
    side.certificate(first.id, signed_request(first, certificates.new_key()))
    again = signed_request(second, certificates.new_key())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side, "_publish_revocations", lambda: None)
        side.certificate(second.id, again)
    crl = enroller.fleet.folder / "mosquitto" / "crl.pem"
    assert len(list(x509.load_pem_x509_crl(crl.read_bytes()))) == 0
    side.certificate(second.id, again)
    assert len(list(x509.load_pem_x509_crl(crl.read_bytes()))) == 1


def test_a_device_that_was_revoked_before_it_had_a_certificate_may_join_later(enroller: Enroller) -> None:
    enroller.ledger.put(Device(name="d0", status="revoked"))
    enroller.enrolments().revoke("d0", time.time())
    acl = enroller.fleet.folder / "mosquitto" / "acl"
    assert "user d0\ntopic deny #" in acl.read_text()
    made = enroller.token("d0")
    enroller.enrolments().certificate(made.id, signed_request(made, certificates.new_key()))
    assert "user d0" not in acl.read_text()


def test_the_ledger_keeps_no_secret_of_a_token(enroller: Enroller) -> None:
    made = enroller.token("d0")
    (row,) = enroller.ledger.rows(Invitation)
    assert made.private_key not in str(row)
    enroller.ledger.close()
    kept = b"".join(path.read_bytes() for path in enroller.fleet.folder.glob("ledger.sqlite*"))
    assert row.public.encode() in kept
    assert made.private_key.encode() not in kept


# A device checks what it receives -------------------------------------------------------------------------------------


def test_a_device_takes_no_certificate_but_its_own_of_the_fleets_authority(enroller: Enroller, tmp_path: Path) -> None:
    key = certificates.new_key()
    authority = fleet_certificates.authority(enroller.fleet.folder)
    stranger = Authority.create(tmp_path / "x.key", tmp_path / "x.pem", "t devices")
    wrong = {
        "another authority's": stranger.client("d0", key.public_key()),
        "another device's": authority.client("d1", key.public_key()),
        "another key's": authority.client("d0", certificates.new_key().public_key()),
    }
    for signed in wrong.values():
        with pytest.raises(MessageError, match="carries"):
            certificates.check_own(
                certificates.certificate_text(signed), key.public_key(), "d0", authority.certificate
            )
    for text in ("", "%", certificates.encoded(b"nothing")):
        with pytest.raises(MessageError, match="no certificate issued by the fleet's authority"):
            certificates.check_own(text, key.public_key(), "d0", authority.certificate)


def test_a_token_of_another_device_is_refused_by_a_home_that_has_one(enroller: Enroller, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "device.toml").write_text(f'[device]\nname = "d1"\nfleet = "t"\nkey = "{enroller.fleet.public_key()}"\n')
    enrolment_token.save(home / enrolment_token.FILE, enroller.token("d0"))
    with pytest.raises(ConfigError, match="is another device's home: its name is 'd1'"):
        enrolment.enroll(home, home / enrolment_token.FILE, limit_s=PATIENCE_S, log=print)
    assert (home / enrolment_token.FILE).exists()


@dataclass
class Correspondence:
    """A device's requests reach the enroller without a broker. asked: the public key of every request."""

    enroller: Enroller
    asked: list[str] = field(default_factory=list)

    def __call__(self, found: enrolment_token.Token, key: certificates.PrivateKey, *_: object) -> str:
        self.asked.append(certificates.public_text(key.public_key()))
        return self.enroller.enrolments().certificate(found.id, signed_request(found, key))


@pytest.fixture
def correspondence(enroller: Enroller, monkeypatch: pytest.MonkeyPatch) -> Correspondence:
    made = Correspondence(enroller)
    monkeypatch.setattr(enrolment, "_request_certificate", made)
    return made


DAMAGED = {
    **{f"{name} {kind}": (name, text, "the token is damaged: ")
       for name in ("authority", "certificate", "private_key", "broker_authority")
       for kind, text in (("is no base64", "%%%"), ("is cut off", "MIIBYjCB"), ("is not ASCII", "\u00e9"))},
    **{f"{name} without TLS": (name, "mqtt://h:1", "the token names mqtt://h:1") for name in ("broker", "enrolment")},
    "no broker": ("broker", "mqtts://", "is not the address of a broker"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text", "said"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_token_is_refused_before_it_is_spent(
    enroller: Enroller, correspondence: Correspondence, tmp_path: Path, name: str, text: str, said: str
) -> None:
    """``system`` is what the operating system trusts; nothing else reads the fleet's authority before the answer."""
    path, found = tmp_path / enrolment_token.FILE, replace(enroller.token("d0"), broker_authority=enrolment.SYSTEM)
    damaged: dict[str, Any] = {name: text}
    enrolment_token.save(path, replace(found, **damaged))
    with pytest.raises(ConfigError, match=said) as raised:
        enrolment.enroll(tmp_path / "home", path, limit_s=PATIENCE_S, log=print)
    assert found.private_key not in str(raised.value)
    assert path.exists()
    assert not correspondence.asked


def test_a_token_makes_a_whole_device_and_is_erased(
    enroller: Enroller, correspondence: Correspondence, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "device.toml").write_text("[train]\nenabled = false\n")
    enrolment_token.save(home / enrolment_token.FILE, enroller.token("d0"))
    waiting = enrolment_token.token_in(home)
    assert waiting is not None
    assert enrolment.enroll(home, waiting, limit_s=PATIENCE_S, log=enroller.lines.append) == "d0"
    assert enrolment_token.token_in(home) is None
    settings = settings_of(home)
    assert (settings.device.name, settings.device.fleet, settings.device.broker) == ("d0", "t", "mqtts://h:1")
    assert settings.device.key == enroller.fleet.public_key()
    assert not settings.train.enabled, "what a person wrote stays"
    files = tls_files(home, settings)
    assert files["ca"].read_bytes() == (enroller.fleet.folder / "ca.pem").read_bytes()
    assert stat.S_IMODE(files["key"].stat().st_mode) == 0o600
    assert load_key_pair(files["cert"], files["key"])


def test_a_token_brings_the_fleets_new_key_into_a_home_that_was_cut_off(
    enroller: Enroller, correspondence: Correspondence, tmp_path: Path
) -> None:
    home, old = tmp_path / "home", enroller.fleet.public_key()
    home.mkdir()
    (home / "device.toml").write_text(f'[device]\nname = "d0"\nfleet = "t"\nkey = "{old}"\n[train]\nenabled = false\n')
    fleet_keys.save(home, fleet_keys.Kept(issuer="a" * 40))
    signing_keys.roll(enroller.fleet.folder, "t", 1e9, cut=True)
    enrolment_token.save(home / enrolment_token.FILE, enroller.token("d0"))
    fleet_keys.forget_issuer(home)
    enrolment.enroll(home, home / enrolment_token.FILE, limit_s=PATIENCE_S, log=enroller.lines.append)
    settings = settings_of(home)
    assert settings.device.key == enroller.fleet.public_key() != old
    assert not settings.train.enabled
    assert fleet_keys.kept(home).issuer == "", "its certificate is another one"


def load_key_pair(cert: Path, key: Path) -> bool:
    """Raise unless certificate and key are a pair."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(cert, key)
    return True


def test_a_power_cut_at_any_write_leaves_a_device_that_enrols_when_it_is_back(
    enroller: Enroller, correspondence: Correspondence, tmp_path: Path
) -> None:
    writes = 0
    for cut in range(1, 6):
        home = tmp_path / f"home{cut}"
        enrolment_token.save(home / enrolment_token.FILE, enroller.token(f"d{cut}"))

        correspondence.asked.clear()
        with cut_at(cut) as begun:
            enrolment.enroll(home, home / enrolment_token.FILE, limit_s=PATIENCE_S, log=enroller.lines.append)
        writes = max(writes, *begun)
        if (home / enrolment_token.FILE).exists():
            enrolment.enroll(home, home / enrolment_token.FILE, limit_s=PATIENCE_S, log=enroller.lines.append)
        assert tls_files(home, settings_of(home))["cert"].exists()
        assert len(set(correspondence.asked)) == 1, "one key, however often it is asked for"
        assert not (home / enrolment_token.FILE).exists()
        rows = enroller.ledger.rows(Certificate, device=f"d{cut}")
        assert [row.revoked_at for row in rows] == [None]
    assert writes >= 4


def test_a_second_token_replaces_the_certificate_and_leaves_no_old_key(
    enroller: Enroller, correspondence: Correspondence, tmp_path: Path
) -> None:
    for _ in range(2):
        enrolment_token.save(tmp_path / "home" / enrolment_token.FILE, enroller.token("d0"))
        enrolment.enroll(
            tmp_path / "home", tmp_path / "home" / enrolment_token.FILE, limit_s=PATIENCE_S, log=enroller.lines.append
        )
    assert len(list((tmp_path / "home").glob("identity-*"))) == 2
    assert tls_files(tmp_path / "home", settings_of(tmp_path / "home"))["key"].exists()


def test_plain_mqtt_leaves_a_machine_only_when_it_is_requested_by_name(enroller: Enroller) -> None:
    for url in ("mqtt://10.0.0.7", "mqtt://pi.local:1883", "mqtt://localhost.evil"):
        settings = Settings(Identity("d0", "t", "0" * 64, url))
        with pytest.raises(ConfigError, match=r"plain MQTT that leaves this machine(.|\n)*--plain"):
            tls_files(Path(), settings)
        assert tls_files(Path(), settings, plain=True) == {}
        assert tls_files(Path(), Settings(Identity("d0", "t", "0" * 64, url, plain=True))) == {}
    for url in ("mqtt://127.0.0.1", "mqtt://localhost", "mqtt://[::1]:7"):
        assert tls_files(Path(), Settings(Identity("d0", "t", "0" * 64, url))) == {}


def test_a_token_of_this_moment_is_known_and_one_that_was_revoked_in_it_is_not(tmp_path: Path) -> None:
    """The aggregator polls the command line's requests four times a second; a device must not wait for that."""
    w = world(tmp_path, config_text())
    server, device = w.start_server(), LoopbackLink(w.broker, "bearer")
    assert w.pump(lambda: server.link.connected)
    device.open()
    device.poll(0)
    for revoked in (False, True):
        made = issue_token(w.fleet, "d9", tmp_path / f"{revoked}.token", "mqtts://h:1", HOURS_S)
        if revoked:
            server.ledger.request("revoke/d9", repr(time.time() + 1))
        device.subscribe(enrolment_answer("t", made.id))
        device.publish(enrolment_request("t", made.id), signed_request(made, certificates.new_key()))
        w.step(tick_s=0)
        (answer,) = [answer_in(event.payload) for event in device.poll(0) if isinstance(event, Message)]
        assert (bool(answer.certificate), bool(answer.refused)) == (not revoked, revoked)
    w.close()
