"""A certificate is renewed before it expires: with the present one as proof, by the device alone, also over
mosquitto."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cloud_server.identity import certificate_authority, fleet_certificates
from cloud_server.identity.audit_log import Recorder
from cloud_server.identity.renewals import DAY_S, Renewals
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Certificate, Device
from cloud_server.records.fleet_folder import Fleet
from cloud_server.rounds.coordinator import Coordinator
from edge_agent.commands import doctor
from edge_agent.commands.run import service_of
from edge_agent.connection.broker_login import tls_files
from edge_agent.connection.certificate_renewal import NEXT_KEY, RETRY_AFTER_REFUSAL_S, RETRY_S, Renewal
from edge_agent.device.agent_costs import AgentCosts
from edge_agent.device.state import DeviceState
from edge_agent.rounds.agent import Agent
from fleet_core.base import config
from fleet_core.base.errors import MessageError, RevokedError
from fleet_core.board.device_settings import Settings, settings_of
from fleet_core.link.interface import Connected, Disconnected, Event
from fleet_core.link.mqtt import MqttLink
from fleet_core.protocol import certificates, messages
from fleet_core.protocol.device_messages import Down, RenewalRequest, Report
from tests.support.brokers import NEEDS_MOSQUITTO
from tests.support.inprocess import config_text, world
from tests.support.pki import aggregator_credentials, reload_broker, secured_broker
from tests.support.powercut import cut_at
from tests.support.waiting import until

YEAR_S = 365 * DAY_S
DUE_S = 2.6 * YEAR_S  # after this every certificate of five years, less at most one, is past its middle


@dataclass
class Holder:
    """A device with a certificate that the ledger knows."""

    name: str
    key: certificates.PrivateKey
    serial: str
    fleet: str = "t"

    def asks(self, key: certificates.PrivateKey, **wrong: Any) -> RenewalRequest:
        csr = certificates.request(key, self.name)
        body = certificates.renewal_to_sign(wrong.get("fleet", self.fleet), wrong.get("serial", self.serial), csr)
        signature = certificates.sign(wrong.get("signer", self.key), body)
        return RenewalRequest(certificates.encoded(csr), signature, self.serial)


def issued(fleet: Fleet, ledger: Ledger, name: str, home: Path | None = None, broker: str = "mqtts://h:1") -> Holder:
    """A device after enrolment, with its home if one is given."""
    key = certificates.new_key()
    signed = fleet_certificates.authority(fleet.folder).client(
        name, key.public_key(), certificate_authority.devices_until()
    )
    serial = certificates.serial_of(signed)
    ledger.put(Device(name=name), Certificate(
        serial=serial, device=name, token="0" * 32, public=certificates.public_text(key.public_key()),
        certificate=certificates.certificate_text(signed), issued_at=time.time(),
        expires_at=signed.not_valid_after_utc.timestamp(),
    ))
    if home is not None:
        home.mkdir(parents=True)
        certificates.save_key(home / "identity-first.key", key)
        (home / "identity-first.pem").write_bytes(certificates.certificate_pem(signed))
        (home / "ca.pem").write_bytes((fleet.folder / "ca.pem").read_bytes())
        who = {"name": name, "fleet": fleet.config.fleet.name, "key": fleet.public_key(), "broker": broker}
        tls = {"ca": "ca.pem", "certificate": "identity-first.pem", "key": "identity-first.key",
               "renew_after": certificates.renew_after(signed)}
        tables = {"device": who, "tls": tls, "train": {"enabled": False}}
        (home / "device.toml").write_text(config.toml(tables))
    return Holder(name, key, serial)


# The aggregator's side ------------------------------------------------------------------------------------------------


def renewals(fleet: Fleet, ledger: Ledger, after_s: float = DUE_S) -> Renewals:
    def now() -> float:
        return time.time() + after_s

    return Renewals(fleet, ledger, audit=Recorder(fleet.folder, now, print), now=now, log=lambda line: None)


def test_a_new_key_gets_a_certificate_once_and_the_old_one_holds_on(fleet: Fleet, ledger: Ledger) -> None:
    holder, key = issued(fleet, ledger, "d0"), certificates.new_key()
    first = renewals(fleet, ledger).certificate("d0", holder.asks(key))
    assert renewals(fleet, ledger).certificate("d0", holder.asks(key)) == first, "an answer can be lost"
    found = certificates.certificate_in(first, "the answer")
    found.verify_directly_issued_by(fleet_certificates.authority(fleet.folder).certificate)
    assert (certificates.name_of(found), found.public_key()) == ("d0", key.public_key())
    rows = ledger.rows(Certificate, device="d0")
    assert [row.revoked_at for row in rows] == [None, None]
    assert fleet_certificates.certificate_facts(ledger)["d0"].serial == certificates.serial_of(found)


def test_certificates_of_one_day_neither_end_nor_are_renewed_on_one(fleet: Fleet, ledger: Ledger) -> None:
    until = [certificate_authority.devices_until().timestamp() - time.time() for _ in range(200)]
    assert 4 * YEAR_S - DAY_S < min(until) < 4.2 * YEAR_S
    assert 4.8 * YEAR_S < max(until) < 5 * YEAR_S + DAY_S
    holder = issued(fleet, ledger, "d0")
    (row,) = ledger.rows(Certificate, serial=holder.serial)
    found = certificates.certificate_in(row.certificate, "row")
    assert 1.9 * YEAR_S < certificates.renew_after(found) - time.time() < DUE_S


@pytest.mark.parametrize(
    ("wrong", "after_s", "said"),
    [
        ({"signer": certificates.new_key()}, DUE_S, "not signed with the key of the present"),
        ({"fleet": "u"}, DUE_S, "not signed with"),
        ({"serial": "abc"}, DUE_S, "not signed with"),
        ({}, 0.0, "can be renewed from 20"),
        ({}, 6 * YEAR_S, "is not valid"),
    ],
)
def test_what_the_present_certificate_does_not_vouch_for_is_refused(
    fleet: Fleet, ledger: Ledger, wrong: dict[str, Any], after_s: float, said: str
) -> None:
    holder = issued(fleet, ledger, "d0")
    with pytest.raises(MessageError, match=said):
        renewals(fleet, ledger, after_s).certificate("d0", holder.asks(certificates.new_key(), **wrong))
    assert len(ledger.rows(Certificate)) == 1


def test_another_devices_certificate_and_a_revoked_one_vouch_for_nothing(fleet: Fleet, ledger: Ledger) -> None:
    holder, evil = issued(fleet, ledger, "d0"), issued(fleet, ledger, "evil")
    asked = evil.asks(certificates.new_key())
    with pytest.raises(MessageError, match="is not valid"):
        renewals(fleet, ledger).certificate("d0", asked)
    world_of = [row for row in ledger.rows(Certificate) if row.device == holder.name]
    for row in world_of:
        ledger.put(Certificate(**{**row.__dict__, "revoked_at": time.time()}))
    with pytest.raises(MessageError, match="is not valid"):
        renewals(fleet, ledger).certificate("d0", holder.asks(certificates.new_key()))


def test_a_device_gets_one_certificate_a_day_and_not_for_the_key_that_it_has(fleet: Fleet, ledger: Ledger) -> None:
    holder = issued(fleet, ledger, "d0")
    with pytest.raises(MessageError, match="the key that it already has"):
        renewals(fleet, ledger).certificate("d0", holder.asks(holder.key))
    renewals(fleet, ledger).certificate("d0", holder.asks(certificates.new_key()))
    with pytest.raises(MessageError, match="less than a day ago"):
        renewals(fleet, ledger).certificate("d0", holder.asks(certificates.new_key()))
    later = renewals(fleet, ledger, DUE_S + 2 * DAY_S)
    assert later.certificate("d0", holder.asks(certificates.new_key())), "one that was put back from a backup"


def test_the_aggregators_and_the_brokers_own_are_made_anew_from_their_middle_on(
    fleet: Fleet, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [fleet.folder / "aggregator.pem", fleet.folder / "mosquitto/server.pem"]
    before, keys = [path.read_bytes() for path in paths], (fleet.folder / "aggregator.key").read_bytes()
    place = fleet_certificates.saved_setup(fleet.folder)
    assert place is not None
    for years, same in ((4.9, True), (5.1, False)):
        at = time.time() + years * YEAR_S
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda at=at: at)
            fleet_certificates.create_missing(fleet, ledger)
            fleet_certificates.configure(fleet, ledger, place)
        assert [path.read_bytes() == old for path, old in zip(paths, before, strict=True)] == [same, same]
    assert (fleet.folder / "aggregator.key").read_bytes() == keys


# The device's side ----------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """A link that carries reports to the aggregator's side."""

    connected: bool = True
    sent: list[RenewalRequest] = field(default_factory=list)

    def publish(self, topic: str, payload: bytes) -> None:
        assert topic == "fl1/t/a/d0/rep"
        report = messages.decode(Report, payload)
        assert report.renew is not None
        self.sent.append(report.renew)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def device(home: Path, line: Line, clock: Clock, said: list[str]) -> Renewal:
    link: Any = line
    return Renewal(home, settings_of(home), link, boot="b", take_up=lambda cert, key: said.append(cert.name),
                   clock=clock, log=said.append)


def answer(fleet: Fleet, ledger: Ledger, asked: RenewalRequest) -> Down:
    return Down("renewed", 0, device="d0", certificate=renewals(fleet, ledger).certificate("d0", asked))


def test_a_device_asks_in_the_middle_of_its_certificates_life_and_takes_the_next_one(
    fleet: Fleet, ledger: Ledger, tmp_path: Path
) -> None:
    holder, home = issued(fleet, ledger, "d0", tmp_path / "home"), tmp_path / "home"
    due, line, clock, said = settings_of(home).tls.renew_after or 0, Line(), Clock(), list[str]()
    renewal = device(home, line, clock, said)
    for now, times in ((due - 1, 0), (due + 1, 1), (due + 2, 2)):
        renewal.tick(now)
        renewal.tick(now)
        assert len(line.sent) == times, "once an hour"
        clock.now += RETRY_S
    renewal.on_answer(answer(fleet, ledger, line.sent[-1]))
    renewal.on_answer(answer(fleet, ledger, line.sent[-1]))
    settings = settings_of(home)
    new = certificates.load_certificate(home / (settings.tls.certificate or ""))
    assert settings.tls.renew_after == certificates.renew_after(new) != due
    assert not settings.train.enabled, "what else is in device.toml stays"
    assert said[0] == settings.tls.certificate != "identity-first.pem"
    assert (home / "identity-first.key").exists(), "what a flash that is taken back would name"
    assert not (home / NEXT_KEY).exists()
    assert (home / (settings.tls.key or "")).stat().st_mode & 0o077 == 0
    assert holder.serial not in said[-1]
    clock.now += RETRY_S
    renewal.tick(certificates.renew_after(new) - 1)
    assert len(line.sent) == 2


def test_a_refused_device_requests_again_the_next_day_and_never_offline(
    fleet: Fleet, ledger: Ledger, tmp_path: Path
) -> None:
    issued(fleet, ledger, "d0", tmp_path / "home")
    line, clock, said = Line(), Clock(), list[str]()
    renewal = device(tmp_path / "home", line, clock, said)
    renewal.tick(1e11)
    renewal.on_answer(Down("renewed", 0, ok=False, device="d0", reason="it does not hold"))
    assert "it does not hold" in said[0]
    clock.now += 2 * RETRY_S
    renewal.tick(1e11)
    assert len(line.sent) == 1
    clock.now += RETRY_AFTER_REFUSAL_S
    line.connected = False
    renewal.tick(1e11)
    line.connected = True
    renewal.tick(1e11)
    assert len(line.sent) == 2


@pytest.mark.parametrize("wrong", ["device", "key", "no base64"])
def test_a_certificate_of_another_device_or_key_is_refused(
    fleet: Fleet, ledger: Ledger, tmp_path: Path, wrong: str
) -> None:
    issued(fleet, ledger, "d0", tmp_path / "home")
    line = Line()
    renewal = device(tmp_path / "home", line, Clock(), [])
    renewal.tick(1e11)
    told = answer(fleet, ledger, line.sent[0])
    before = {path.name for path in (tmp_path / "home").iterdir()}
    if wrong == "device":
        told = Down("renewed", 0, device="d1", certificate=told.certificate)
    elif wrong == "not base64":
        told = Down("renewed", 0, device="d0", certificate="%%%")
    else:
        certificates.save_key(tmp_path / "home" / NEXT_KEY, certificates.new_key())
    with pytest.raises(MessageError):
        renewal.on_answer(told)
    assert {path.name for path in (tmp_path / "home").iterdir()} == before
    assert settings_of(tmp_path / "home").tls.certificate == "identity-first.pem"


def test_a_certificate_of_another_authority_is_never_renewed(fleet: Fleet, ledger: Ledger, tmp_path: Path) -> None:
    home = tmp_path / "home"
    issued(fleet, ledger, "d0", home)
    tables = config.tables((home / "device.toml").read_text(), "device.toml")
    del tables["tls"]["renew_after"]
    (home / "device.toml").write_text(config.toml(tables))
    line = Line()
    device(home, line, Clock(), []).tick(1e11)
    assert line.sent == []


def test_the_doctor_reports_an_expired_certificate_and_a_clock_that_is_behind(
    fleet: Fleet, ledger: Ledger, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    issued(fleet, ledger, "d0", home)
    settings = settings_of(home)
    assert doctor.certificate_of(home, settings) == doctor.certificate_of(home, None) == ()
    for at, said in ((time.time() + 6 * YEAR_S, "ended on 20"), (0.0, "begins on 20")):
        (complaint,) = doctor.certificate_of(home, settings, at)
        assert complaint.problem.startswith(said)
    (home / "identity-first.pem").unlink()
    (complaint,) = doctor.certificate_of(home, settings)
    assert "devices enroll" in complaint.hint


def test_a_power_cut_at_any_write_leaves_a_whole_identity_and_the_next_attempt_renews_it(
    fleet: Fleet, ledger: Ledger, tmp_path: Path
) -> None:
    writes = 0
    for cut in range(1, 6):
        home = tmp_path / f"home{cut}"
        ledger.put(*(Certificate(**{**row.__dict__, "revoked_at": 1.0}) for row in ledger.rows(Certificate)))
        issued(fleet, ledger, "d0", home)

        def renew(home: Path = home) -> None:
            line = Line()
            renewal = device(home, line, Clock(), [])
            renewal.tick(1e11)
            renewal.on_answer(answer(fleet, ledger, line.sent[0]))

        with cut_at(cut) as begun:
            renew()
        writes = max(writes, *begun)
        pair_of(home, settings_of(home))
        if settings_of(home).tls.certificate == "identity-first.pem":
            renew()
        assert pair_of(home, settings_of(home)) != "identity-first.pem"
        holds = [row for row in ledger.rows(Certificate, device="d0") if row.revoked_at is None]
        assert len(holds) == 2, "one key, however often it is asked for"
    assert writes == 4


def pair_of(home: Path, settings: Settings) -> str:
    """The name of the device's certificate; OpenSSL accepts it and its key as a pair."""
    MqttLink(settings.device.broker, client_id="d0", **tls_files(home, settings))
    return str(settings.tls.certificate)


# Together -------------------------------------------------------------------------------------------------------------


@NEEDS_MOSQUITTO
def test_an_agent_renews_over_mosquitto_and_a_revoked_one_does_not(tmp_path: Path) -> None:
    made = world(tmp_path, config_text(devices=2)).fleet
    later = DUE_S
    with secured_broker(made) as (broker, _), Ledger(made.ledger_path) as ledger:
        homes = {name: tmp_path / name for name in ("d0", "d1")}
        holders = {name: issued(made, ledger, name, home, broker.url) for name, home in homes.items()}
        server_link = aggregator_credentials(made).link(broker.url, "aggregator")
        lines = list[str]()
        server = Coordinator(made, server_link, ledger, boot="s", now=lambda: time.time() + later, log=lines.append)
        server_link.open()
        agents = {name: an_agent(home, lines, later) for name, home in homes.items()}
        left = set[str]()

        def meanwhile() -> None:
            server.step(0.01)
            for name in agents.keys() - left:
                try:
                    agents[name].step(0.01)
                except RevokedError:
                    left.add(name)

        until(lambda: all(settings_of(home).tls.certificate != "identity-first.pem" for home in homes.values()),
              meanwhile)
        rows = {row.serial: row for row in ledger.rows(Certificate)}
        ledger.put(*(Certificate(**{**rows[holder.serial].__dict__, "revoked_at": 1.0}) for holder in holders.values()))
        ledger.request("revoke/d1", repr(time.time() + later))
        until(lambda: "d1 revoked" in lines, meanwhile)
        reload_broker(broker, made)
        assert left <= {"d1"}, "told before the broker denies it, if it was quick"
        for name, back in (("d0", True), ("d1", False)):
            agents.pop(name).link.close()
            settings = settings_of(homes[name])
            link = MqttLink(broker.url, client_id=name, **tls_files(homes[name], settings))
            link.open()
            assert isinstance(first_event(link, meanwhile), Connected if back else Disconnected), name
            link.close()
        server.close()


def an_agent(home: Path, said: list[str], later: float) -> Agent:
    settings = settings_of(home)
    link = MqttLink(settings.device.broker, client_id=settings.device.name, **tls_files(home, settings))
    renewal = Renewal(home, settings, link, boot="b", take_up=link.use_certificate, log=said.append)
    agent = Agent(settings, DeviceState(home), link, service_of(home, settings), AgentCosts(), None, renewal=renewal,
                  now_ms=lambda: int((time.time() + later) * 1000), log=said.append)
    link.open()
    return agent


def first_event(link: MqttLink, meanwhile: Callable[[], object]) -> Event:
    events = list[Event]()
    while not events:
        meanwhile()
        events += link.poll(0.05)
    return events[0]
