"""Access on a mosquitto with the fleet's configuration: what each certificate may read and write, and nothing more."""

from __future__ import annotations

import datetime
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cloud_server.broker.mosquitto_config import BrokerSetup, address
from cloud_server.broker.private_broker import Broker
from cloud_server.identity import fleet_certificates
from cloud_server.identity.token_enrolment import make_token
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Certificate, Device
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base.errors import ConfigError
from fleet_core.link.interface import Connected, Disconnected, Message, Will
from fleet_core.link.mqtt import MqttLink
from fleet_core.protocol import certificates
from tests.support.brokers import NEEDS_MOSQUITTO, RecordingLink, until
from tests.support.pki import (
    HOURS_S,
    Credentials,
    aggregator_credentials,
    credentials_for,
    fleet_without_model,
    reload_broker,
    reload_count,
    secured_broker,
    token_credentials,
)

pytestmark = NEEDS_MOSQUITTO

TOP = "fl1/t"
OWN = ("a/{0}/up/1/m", "a/{0}/up/1/0", "a/{0}/st", "a/{0}/rep", "a/{0}/an/x", "a/{0}/alarm")
TOLD = ("a/{0}/dn", "a/{0}/q/x")
EVERYONES = ("r/cur", "b/00/0/0", "srv")
TOKENS = ("en/abc/req", "en/abc/ans")
EVERYTHING = (
    *(t.format(d) for d in ("good", "evil", ".aggregator", ".operator-0") for t in (*OWN, *TOLD)), *EVERYONES, *TOKENS,
    "en/evil/req", "en/evil/ans", "r", "x", "a/evil", "a/evil/x", "a/evil/up", "a/evil/st/x", "a//st",
    "a/evil/../good/st",
)
ELSEWHERE = ("x", "fl1", "fl1/u/a/evil/st", "$SYS/broker/x", "fl1/t2/a/evil/st", "FL1/t/a/evil/st")
WILDCARDS = (
    "#", "+/#", "fl1/#", "fl1/+/#", "fl1/t/#", "fl1/t/a/#", "fl1/t/a/+/+", "fl1/t/a/+/dn", "fl1/t/a/good/#",
    "fl1/t/a/+/up/+/+", "fl1/t/en/#", "fl1/t/+", "+/+/+/+/+", "$SYS/#", "fl1/t/a/good/dn", "fl1/t/a/good/q/x",
    "$share/g/fl1/t/#", "$share/g/fl1/t/a/good/dn",
)


@dataclass
class Yard:
    """A broker with the fleet's configuration, and clients that connect to it."""

    fleet: Fleet
    broker: Broker
    place: BrokerSetup
    folder: Path

    def connect(self, who: Credentials, client_id: str, *filters: str, port: int = 0, **options: Any) -> RecordingLink:
        url = address("127.0.0.1", port or self.place.port)
        watched = RecordingLink(who.link(url, client_id, **options))
        for start in range(0, len(filters), 8):
            watched.link.subscribe(*filters[start : start + 8])
        watched.link.open()
        until(lambda: watched.of(Connected), watched)
        return watched

    def device(self, name: str, *filters: str, **options: Any) -> RecordingLink:
        return self.connect(credentials_for(self.fleet, name, self.folder / name), name, *filters, **options)

    def aggregator(self, *filters: str) -> RecordingLink:
        return self.connect(aggregator_credentials(self.fleet), "aggregator", *filters)

    @contextmanager
    def operator(self, *filters: str) -> Iterator[RecordingLink]:
        with fleet_certificates.as_operator(self.fleet, self.broker.url) as tls:
            assert tls["ca"] is not None
            watched = self.connect(Credentials(tls["ca"], tls["cert"], tls["key"]), "operator", *filters)
            try:
                yield watched
            finally:
                watched.link.close()

    def turned_away(self, link: MqttLink, why: str = "") -> None:
        """Fails when the broker accepts the link, or the link never reports ``why`` not: the reason may be lost when
        the broker hangs up."""
        watched = RecordingLink(link)
        link.open()
        until(lambda: any(why in gone.reason for gone in watched.of(Disconnected)) or watched.of(Connected), watched)
        link.close()
        assert not watched.of(Connected)

    def revoke(self, name: str) -> None:
        with Ledger(self.fleet.ledger_path) as ledger:
            ledger.put(Device(name=name, status="revoked"))
            fleet_certificates.write_revocations(self.fleet, ledger)
        reload_broker(self.broker, self.fleet)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    folder = tmp_path / "yard"
    fleet = fleet_without_model(folder / "fleet")
    with secured_broker(fleet) as (broker, place):
        yield Yard(fleet, broker, place, folder)


def came_through(watched: RecordingLink, *others: RecordingLink) -> None:
    """Wait until everything published before has been answered."""
    until(lambda: not watched.link.unacknowledged, watched, *others)


def test_a_hostile_device_writes_nothing_but_its_own_topics(yard: Yard, stack: ExitStack) -> None:
    evil = yard.device("evil", protocol=5)
    good = yard.device("good", *(f"{TOP}/{t.format('good')}" for t in TOLD), *(f"{TOP}/{t}" for t in EVERYONES))
    server = yard.aggregator(f"{TOP}/r/#", f"{TOP}/b/#", f"{TOP}/a/+/st", f"{TOP}/a/+/rep", f"{TOP}/a/+/up/#",
                             f"{TOP}/en/+/req")
    operator = stack.enter_context(yard.operator(f"{TOP}/a/+/an/+", f"{TOP}/a/+/alarm"))
    for retain in (False, True):
        for topic in (*(f"{TOP}/{t}" for t in EVERYTHING), *ELSEWHERE):
            evil.link.publish(topic, b"evil", retain=retain)
        came_through(evil, good, server, operator)
    good.link.publish(f"{TOP}/a/good/rep", b"end")
    server.link.publish(f"{TOP}/a/good/dn", b"end")
    ends = (f"{TOP}/a/good/rep", f"{TOP}/a/good/dn")
    until(lambda: ends[0] in server.topics() and ends[1] in good.topics(), server, good, operator)
    allowed = {f"{TOP}/{t.format('evil')}" for t in OWN}
    for_operators = {f"{TOP}/a/evil/an/x", f"{TOP}/a/evil/alarm"}
    assert {m.topic for m in server.of(Message) if m.payload == b"evil"} == allowed - for_operators
    assert {m.topic for m in operator.of(Message)} == for_operators
    assert [m for m in good.of(Message) if m.payload == b"evil"] == []
    server.link.close()
    late = yard.aggregator("fl1/#", "#", "x")
    late.link.publish(f"{TOP}/r/end", b"end")
    until(lambda: f"{TOP}/r/end" in late.topics(), late)
    assert {m.topic for m in late.of(Message) if m.payload == b"evil"} == allowed, "to clear what is retained"
    for each in (evil, good, late):
        each.link.close()


def test_a_hostile_device_reads_nothing_but_what_is_told_to_it_and_to_everyone(
    yard: Yard, stack: ExitStack
) -> None:
    server = yard.aggregator()
    for topic in (*(t.format("good") for t in TOLD[:1]), "en/abc/ans", "r/kept", "b/kept"):
        server.link.publish(f"{TOP}/{topic}", b"secret", retain=True)
    came_through(server)
    evil = yard.device("evil", *WILDCARDS, protocol=5)
    good = yard.device("good", f"{TOP}/a/good/dn", f"{TOP}/a/good/q/+")
    operator = stack.enter_context(yard.operator())
    for topic in (*(t.format("good") for t in OWN), "a/good/st"):
        good.link.publish(f"{TOP}/{topic}", b"secret")
    for device in ("good", "evil"):
        server.link.publish(f"{TOP}/a/{device}/dn", b"secret")
        operator.link.publish(f"{TOP}/a/{device}/q/x", b"secret")
    came_through(server, good, operator)
    until(lambda: {f"{TOP}/a/good/dn", f"{TOP}/a/good/q/x"} <= set(good.topics()), good, evil)
    server.link.publish(f"{TOP}/r/end", b"for everyone")
    until(lambda: f"{TOP}/r/end" in evil.topics(), evil)
    read = {topic for topic in evil.topics() if not topic.startswith((f"{TOP}/r/", f"{TOP}/b/"))}
    assert read <= {f"{TOP}/a/evil/dn", f"{TOP}/a/evil/q/x", f"{TOP}/srv"}
    assert f"{TOP}/r/kept" in evil.topics(), "what is everyone's it may read"
    for each in (evil, good, server):
        each.link.close()


def test_nobody_is_disconnected_by_another_who_takes_the_same_client_id(yard: Yard) -> None:
    server, good = yard.aggregator(f"{TOP}/a/+/rep"), yard.device("good")
    for client_id in ("good", "aggregator", ".aggregator", "t-good", "t-aggregator"):
        evil = yard.connect(credentials_for(yard.fleet, "evil", yard.folder / "evil"), client_id)
        evil.link.close()
    good.link.publish(f"{TOP}/a/good/rep", b"still here")
    until(lambda: server.topics() == [f"{TOP}/a/good/rep"], good, server)
    assert not good.of(Disconnected)
    assert not server.of(Disconnected)
    for each in (good, server):
        each.link.close()


def test_the_operators_commands_do_not_disconnect_one_another(yard: Yard) -> None:
    good = yard.device("good", f"{TOP}/a/good/q/+")
    with yard.operator() as first, yard.operator() as second:
        for watched in (first, second, first):
            watched.link.publish(f"{TOP}/a/good/q/x", b"?")
            came_through(watched, first, second)
        until(lambda: len(good.of(Message)) == 3, good, first, second)
        assert not [*first.of(Disconnected), *second.of(Disconnected)]
    assert len(list((yard.fleet.folder / "operators").glob("*.key"))) == 2
    good.link.close()


def test_a_will_in_another_devices_name_is_not_published(yard: Yard) -> None:
    server = yard.aggregator(f"{TOP}/a/+/st", f"{TOP}/a/+/rep")
    evil = yard.device("evil", will=Will(f"{TOP}/a/good/st", b"evil"))
    assert isinstance(evil.link, MqttLink)
    evil.link.abort()
    good = yard.device("good", will=Will(f"{TOP}/a/good/st", b"gone"))
    assert isinstance(good.link, MqttLink)
    good.link.abort()
    until(lambda: any(m.payload == b"gone" for m in server.of(Message)), server)
    assert not any(m.payload == b"evil" and m.topic == f"{TOP}/a/good/st" for m in server.of(Message))
    server.link.close()


def test_a_client_without_a_certificate_of_the_fleet_gets_nothing(yard: Yard, tmp_path: Path) -> None:
    url = address("127.0.0.1", yard.place.port)
    ca = yard.fleet.folder / "ca.pem"
    yard.turned_away(MqttLink(url, client_id="good", ca=ca), "there is none")
    yard.turned_away(MqttLink(address("127.0.0.1", yard.place.port, "mqtt"), client_id="good", protocol=5))
    stranger = fleet_without_model(tmp_path / "other")
    theirs = credentials_for(stranger, "good", tmp_path / "good")
    yard.turned_away(MqttLink(url, client_id="g", ca=ca, cert=theirs.cert, key=theirs.key), "another authority")
    server = yard.fleet.folder / "mosquitto"
    yard.turned_away(MqttLink(url, client_id="g", ca=ca, cert=server / "server.pem", key=server / "server.key"))


def test_a_token_opens_its_own_enrolment_and_nothing_else(yard: Yard, tmp_path: Path) -> None:
    tokens = [make_token(yard.fleet, "good", "mqtts://h:1", "mqtts://h:2", HOURS_S)[0] for _ in range(2)]
    mine, other = (token_credentials(made, yard.fleet, tmp_path / made.id) for made in tokens)
    yard.turned_away(mine.link(address("127.0.0.1", yard.place.port), "x"), "another authority")
    device = credentials_for(yard.fleet, "evil", tmp_path / "evil")
    yard.turned_away(device.link(address("127.0.0.1", yard.place.enrolment_port), "evil"), "another authority")
    server = yard.aggregator(f"{TOP}/#", f"{TOP}/en/+/req", f"{TOP}/a/+/st")
    port = yard.place.enrolment_port
    hostile = yard.connect(mine, "x", *WILDCARDS, *(f"{TOP}/en/{made.id}/#" for made in tokens), port=port)
    waiting = yard.connect(other, "y", f"{TOP}/en/{tokens[1].id}/ans", port=port)
    for topic in (*EVERYTHING, *(f"en/{made.id}/{part}" for made in tokens for part in ("req", "ans", "x"))):
        hostile.link.publish(f"{TOP}/{topic}", b"hostile", retain=True)
    came_through(hostile, server)
    for made in tokens:
        server.link.publish(f"{TOP}/en/{made.id}/ans", b"answer")
    server.link.publish(f"{TOP}/r/cur", b"model")
    until(lambda: waiting.of(Message) and hostile.of(Message), waiting, hostile, server)
    came_through(server, hostile, waiting)
    assert {m.topic for m in server.of(Message) if m.payload == b"hostile"} == {f"{TOP}/en/{tokens[0].id}/req"}
    assert set(waiting.topics()) == {f"{TOP}/en/{tokens[1].id}/ans"}
    assert set(hostile.topics()) == {f"{TOP}/en/{tokens[0].id}/ans"}
    for each in (hostile, waiting, server):
        each.link.close()


def test_a_token_that_has_expired_opens_nothing(yard: Yard, tmp_path: Path) -> None:
    made, _ = make_token(yard.fleet, "good", "mqtts://h:1", "mqtts://h:2", -5)
    credentials = token_credentials(made, yard.fleet, tmp_path / "late")
    late = credentials.link(address("127.0.0.1", yard.place.enrolment_port), "x")
    yard.turned_away(late, "it has expired")


def test_a_device_does_not_speak_to_a_broker_that_its_authority_does_not_vouch_for(yard: Yard, tmp_path: Path) -> None:
    good, other = credentials_for(yard.fleet, "good", tmp_path / "good"), fleet_without_model(tmp_path / "other")
    url = address("127.0.0.1", yard.place.port)
    wrong = MqttLink(url, client_id="g", ca=other.folder / "ca.pem", cert=good.cert, key=good.key)
    yard.turned_away(wrong, "the broker's certificate is not trusted")
    elsewhere = good.link(address("localhost.localdomain", yard.place.port), "g")
    context = elsewhere._settings.tls
    assert context is not None
    sock = socket.create_connection(("127.0.0.1", yard.place.port))
    with sock, pytest.raises(ssl.SSLError, match="mismatch"):
        context.wrap_socket(sock, server_hostname="localhost.localdomain")


def test_a_revoked_device_is_cut_off_at_once_and_does_not_come_back(yard: Yard) -> None:
    own = credentials_for(yard.fleet, "leaver", yard.folder / "leaver")
    with Ledger(yard.fleet.ledger_path) as ledger:
        signed = certificates.load_certificate(own.cert)
        ledger.put(Certificate(
            serial=certificates.serial_of(signed), device="leaver", token="", public="", certificate="", issued_at=0.0,
            expires_at=1e10,
        ))
    leaver = yard.connect(own, "leaver", f"{TOP}/r/#", f"{TOP}/a/leaver/dn")
    server = yard.aggregator(f"{TOP}/a/+/rep")
    leaver.link.publish(f"{TOP}/a/leaver/rep", b"before")
    server.link.publish(f"{TOP}/r/cur", b"before")
    until(lambda: server.of(Message) and leaver.of(Message), server, leaver)
    yard.revoke("leaver")
    yard.turned_away(own.link(address("127.0.0.1", yard.place.port), "again"), "it is revoked")
    leaver.link.publish(f"{TOP}/a/leaver/rep", b"after")
    came_through(leaver, server)
    server.link.publish(f"{TOP}/r/cur", b"after")
    came_through(server, leaver)
    witness = yard.device("good", f"{TOP}/r/#")
    server.link.publish(f"{TOP}/r/cur", b"last")
    until(lambda: any(m.payload == b"last" for m in witness.of(Message)), witness, server, leaver)
    assert {m.payload for m in server.of(Message)} == {b"before"}
    assert b"after" not in {m.payload for m in leaver.of(Message)}
    for each in (leaver, server, witness):
        each.link.close()


def test_sighup_is_sent_twice_because_mosquitto_loses_one_that_arrives_during_a_reload(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a device that is revoked at that moment would be accepted until the next revocation."""
    begun, sent = reload_count(yard.fleet), list[int]()
    send = yard.broker.process.send_signal

    def record(number: int) -> None:
        sent.append(number)
        send(number)

    monkeypatch.setattr(yard.broker.process, "send_signal", record)
    yard.broker.reload()
    until(lambda: len(sent) == 2 and reload_count(yard.fleet) > begun)
    assert sent == [signal.SIGHUP] * 2


def test_a_link_over_tls_requires_1_2_or_later(yard: Yard, tmp_path: Path) -> None:
    own = credentials_for(yard.fleet, "good", tmp_path / "good")
    link = own.link("mqtts://h", "g")
    assert link._settings.tls is not None
    assert link._settings.tls.minimum_version.name == "TLSv1_2"
    assert link._settings.tls.check_hostname
    with pytest.raises(ConfigError, match="needs its key"):
        MqttLink("mqtts://h", client_id="g", ca=own.ca, cert=own.cert)


def test_a_device_whose_clock_is_wrong_gets_an_error_with_its_time(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates start a day ago; a clock that is further behind cannot be corrected, but the error names it."""
    monkeypatch.setattr(certificates, "BACK_DATED", -datetime.timedelta(days=2))
    folder = yard.fleet.folder / "mosquitto"
    key = certificates.load_key(folder / "server.key").public_key()
    signed = fleet_certificates.authority(yard.fleet.folder).server(["127.0.0.1"], key)
    (folder / "server.pem").write_bytes(certificates.certificate_pem(signed))
    reload_broker(yard.broker, yard.fleet)
    own = credentials_for(yard.fleet, "good", yard.folder / "good")
    today = time.strftime("%Y-%m-%d", time.gmtime())
    yard.turned_away(own.link(yard.broker.url, "g"), f"not yet valid; this machine's clock says {today}")
