"""The fleet gets another authority: devices renew onto it while rounds go on, then the old one is dropped."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloud_server.broker.private_broker import BrokerSupervisor, start_secured
from cloud_server.commands import cli
from cloud_server.devices import fleet_status
from cloud_server.identity import announce_keys, authorities, fleet_certificates
from cloud_server.identity.token_authority import INVITE
from cloud_server.identity.token_enrolment import make_token
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Certificate
from cloud_server.records import signing_keys
from cloud_server.records.fleet_folder import Fleet
from cloud_server.rounds.coordinator import Coordinator
from edge_agent.commands.run import service_of
from edge_agent.compute import adapter
from edge_agent.compute.trainer import InlineTrainer
from edge_agent.compute.worker import Inline
from edge_agent.connection.broker_login import tls_files
from edge_agent.connection.certificate_renewal import Renewal
from edge_agent.device import fleet_keys
from edge_agent.device.agent_costs import AgentCosts
from edge_agent.device.fleet_keys import FleetKeys
from edge_agent.device.state import DeviceState
from edge_agent.rounds.agent import Agent
from fleet_core.base import schema, storage
from fleet_core.base.errors import ConfigError, MessageError
from fleet_core.board.device_settings import settings_of
from fleet_core.data.samples import save
from fleet_core.link.interface import Disconnected
from fleet_core.link.mqtt import MqttLink
from fleet_core.protocol import certificates, messages
from fleet_core.protocol.signing import Signer
from fleet_core.protocol.succession import Authorities
from tests.edge_agent.connection.test_renewal import Clock, Line, answer, first_event, issued
from tests.support.brokers import NEEDS_MOSQUITTO
from tests.support.cli import runner
from tests.support.inprocess import config_text, toy, world
from tests.support.pki import fleet_without_model, secured_broker
from tests.support.powercut import PowerCut, cut_at
from tests.support.waiting import until


def announcement(made: Fleet, number: int, **other: Any) -> Authorities:
    texts = tuple(map(certificates.certificate_text, authorities.trusted(made.folder)))
    return Authorities(**{"fleet": "t", "number": number, "certificates": texts, **other})


# The aggregator's side ------------------------------------------------------------------------------------------------


def test_renewals_come_from_the_new_authority_and_everything_else_from_the_old_one_until_it_is_dropped(
    fleet: Fleet, ledger: Ledger
) -> None:
    old = fleet_certificates.authority(fleet.folder).certificate
    holder = issued(fleet, ledger, "d0")
    new = authorities.begin(fleet.folder, "t").certificate
    assert authorities.trusted(fleet.folder) == [old, new]
    assert old.subject != new.subject
    renewed = certificates.certificate_in(
        str(answer(fleet, ledger, holder.asks(certificates.new_key())).certificate), "answer")
    assert certificates.is_issued_by(renewed, new)
    token, _ = make_token(fleet, "d1", "mqtts://h:1", "mqtts://h:2", 60.0)
    assert certificates.certificate_in(token.authority, "token") == old, "as the broker's certificate is"
    setup = fleet_certificates.saved_setup(fleet.folder)
    assert setup is not None
    folder = fleet.folder / "mosquitto"
    fleet_certificates.configure(fleet, ledger, setup)
    assert certificates.all_in((folder / "ca.pem").read_bytes(), "ca.pem") == [old, new]
    assert (folder / "crl.pem").read_bytes().count(b"BEGIN X509 CRL") == 2
    assert certificates.is_issued_by(certificates.load_certificate(folder / "server.pem"), old)
    authorities.finish(fleet.folder)
    fleet_certificates.configure(fleet, ledger, setup)
    fleet_certificates.create_missing(fleet, ledger)
    assert certificates.all_in((folder / "ca.pem").read_bytes(), "ca.pem") == [new]
    for path in (folder / "server.pem", fleet.folder / "aggregator.pem"):
        assert certificates.is_issued_by(certificates.load_certificate(path), new)
    assert not list(fleet.folder.glob("ca-next*"))


def test_secure_sums_take_devices_of_both_authorities_meanwhile_and_of_no_other(fleet: Fleet, tmp_path: Path) -> None:
    issuers = [authorities.present(fleet.folder), authorities.begin(fleet.folder, "t"),
               authorities.present(fleet_without_model(tmp_path / "other").folder)]
    trusted, key = tuple(authorities.trusted(fleet.folder)), certificates.new_key().public_key()
    texts = [certificates.certificate_text(one.client("d0", key)) for one in issuers]
    for text in texts[:2]:
        assert certificates.issued_to(text, "d0", trusted, certificates.now()) == key
    for text, several in ((texts[2], trusted), (texts[1], trusted[:1])):
        with pytest.raises(MessageError, match="no certificate issued by"):
            certificates.issued_to(text, "d0", several, certificates.now())


def test_a_power_cut_at_any_step_leaves_an_authority_that_issues(tmp_path: Path) -> None:
    for cut in (1, 2):
        fleet = fleet_without_model(tmp_path / f"begin{cut}")
        old = authorities.present(fleet.folder).certificate
        with cut_at(cut):
            authorities.begin(fleet.folder, "t")
        assert authorities.trusted(fleet.folder) == [old]
        authorities.begin(fleet.folder, "t")
        new = authorities.trusted(fleet.folder)[1]
        steps, move = [0], storage.move

        def failing(path: Path, to: Path, steps: list[int] = steps, cut: int = cut, move: Any = move) -> None:
            steps[0] += 1
            if steps[0] == cut:
                raise PowerCut
            move(path, to)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "move", failing)
            with pytest.raises(PowerCut):
                authorities.finish(fleet.folder)
        assert authorities.present(fleet.folder).certificate == (old if cut == 1 else new)
        if cut == 1:
            authorities.finish(fleet.folder)
        assert authorities.present(fleet.folder).certificate == new
        assert authorities.successor(fleet.folder) is None


def test_the_command_says_who_needs_the_old_authority(
    fleet: Fleet, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(monkeypatch, capsys, "metafleet", cli.main)
    assert run("server", "roll-authority", fleet.folder, "--finish").code == 2
    issued(fleet, ledger, "d0")
    _, invitation = make_token(fleet, "d1", "mqtts://h:1", "mqtts://h:2", 60.0)
    ledger.request(f"{INVITE}{invitation.id}", json.dumps(schema.plain(invitation)))
    assert "2 still need the old one" in run("server", "roll-authority", fleet.folder).out
    facts = fleet_status.facts(fleet, ledger)
    assert facts["old_authority"] == announce_keys.needed(fleet, ledger) == ["d0", "d1"]
    assert any("2 devices still need the old one: d0, d1" in line for line in fleet_status.lines(facts, fleet.folder))
    with pytest.raises(ConfigError, match="is under way"):
        authorities.begin(fleet.folder, "t")
    assert "d0, d1" in run("server", "roll-authority", fleet.folder, "--finish").err
    assert (fleet.folder / "audit.ndjson").read_text().count(" authority") == 2


# The device's side ----------------------------------------------------------------------------------------------------


def renewal_of(home: Path, line: Line, trusted: list[str]) -> Renewal:
    link: Any = line
    return Renewal(home, settings_of(home), link, boot="b", take_up=lambda cert, key: None, clock=Clock(),
                   trust=lambda: trusted.append("trust"))


def test_authorities_that_the_fleet_has_not_signed_or_that_are_old_are_refused(fleet: Fleet, tmp_path: Path) -> None:
    keys = FleetKeys(tmp_path / "home", fleet.public_key(), "t", lambda: 1e9)

    def signed(signer: Signer, number: int, **other: Any) -> str:
        return signer.sign(messages.encode(announcement(fleet, number, **other))).decode()

    first = keys.authorities(signed(fleet.signer(), 5))
    assert first is not None
    keys.trusts(first)
    stranger = Signer(b"x" * 32)
    for wrong in (signed(stranger, 6), signed(fleet.signer(), 4), signed(fleet.signer(), 6, fleet="u"),
                  signed(fleet.signer(), 6, certificates=()), signed(fleet.signer(), 6, certificates=("x",) * 3)):
        with pytest.raises(MessageError):
            keys.authorities(wrong)
    assert keys.authorities(signed(fleet.signer(), 5)) is not None, "until its certificate is of the last one"
    keys.is_issued_by("a" * 40)
    assert keys.authorities(signed(fleet.signer(), 5)) is None
    assert FleetKeys(tmp_path / "home", fleet.public_key(), "t", lambda: 1e9).issuer == "a" * 40


def test_a_power_cut_at_any_write_leaves_a_device_that_changes_over_at_the_next_start(
    fleet: Fleet, ledger: Ledger, tmp_path: Path
) -> None:
    authorities.begin(fleet.folder, "t")
    told = announcement(fleet, 7)
    wanted = certificates.authority_id(authorities.trusted(fleet.folder)[1])
    for cut in range(1, 9):
        home = tmp_path / f"home{cut}"
        ledger.put(*(Certificate(**{**row.__dict__, "revoked_at": 1.0}) for row in ledger.rows(Certificate)))
        issued(fleet, ledger, "d0", home)

        def change(home: Path = home) -> str:
            keys = FleetKeys(home, fleet.public_key(), "t", lambda: 1e9)
            line, trusted = Line(), list[str]()
            renewal = renewal_of(home, line, trusted)
            renewal.on_authorities(told.certificates)
            keys.trusts(told)
            if not renewal.issuer:
                renewal.tick(0.0)
                renewal.on_answer(answer(fleet, ledger, line.sent[0]))
            keys.is_issued_by(renewal.issuer)
            return keys.issuer

        with cut_at(cut) as begun:
            change()
        settings = settings_of(home)
        MqttLink(settings.device.broker, client_id="d0", **tls_files(home, settings))
        assert change() == wanted
        assert len(certificates.all_in((home / "ca.pem").read_bytes(), "ca.pem")) == 2
        if begun[0] < cut:
            break
    assert cut == 8, "ca.pem, its number, a key to ask with, the pair, device.toml, the issuer"


def test_a_device_whose_broker_another_authority_vouches_for_keeps_that_one(
    fleet: Fleet, ledger: Ledger, tmp_path: Path
) -> None:
    home, other = tmp_path / "home", fleet_without_model(tmp_path / "other")
    issued(fleet, ledger, "d0", home)
    theirs = (other.folder / "ca.pem").read_bytes()
    (home / "ca.pem").write_bytes(theirs)
    authorities.begin(fleet.folder, "t")
    line, trusted = Line(), list[str]()
    renewal = renewal_of(home, line, trusted)
    renewal.on_authorities(announcement(fleet, 7).certificates)
    assert ((home / "ca.pem").read_bytes(), trusted) == (theirs, [])
    renewal.tick(0.0)
    assert len(line.sent) == 1, "its own certificate is changed all the same"


# Together -------------------------------------------------------------------------------------------------------------


def an_agent(home: Path, said: list[str]) -> Agent:
    settings = settings_of(home)
    link = MqttLink(settings.device.broker, client_id=settings.device.name, **tls_files(home, settings))
    renewal = Renewal(home, settings, link, boot="b", take_up=link.use_certificate, log=said.append,
                      trust=lambda: link.trust(**tls_files(home, settings_of(home))))
    agent = Agent(settings, DeviceState(home), link, service_of(home, settings), AgentCosts(), InlineTrainer(),
                  adapter=Inline(adapter.handle), renewal=renewal, log=said.append)
    link.open()
    return agent


@pytest.mark.slow
@NEEDS_MOSQUITTO
def test_rounds_go_on_over_mosquitto_across_both_roll_overs_and_a_device_that_was_off_follows(tmp_path: Path) -> None:
    made = world(tmp_path, config_text(rounds=5000, devices=2, fleet="first_wait_s = 0.0")).fleet
    with secured_broker(made) as (broker, place), Ledger(made.ledger_path) as ledger:
        homes = {name: tmp_path / name for name in ("d0", "d1", "d2")}
        for n, (name, home) in enumerate(homes.items()):
            issued(made, ledger, name, home, broker.url)
            text = (home / "device.toml").read_text()
            (home / "device.toml").write_text(text.replace("enabled = false", "enabled = true"))
            save(home / "samples.npz", toy(n))
        lines = list[str]()
        supervisor = BrokerSupervisor(broker, partial(start_secured, made.folder / "mosquitto/mosquitto.conf", place))
        link = MqttLink(broker.url, client_id="s", **fleet_certificates.as_aggregator(made, broker.url))

        def authority_changed() -> None:
            link.trust(**fleet_certificates.as_aggregator(made, broker.url))
            supervisor.replace()

        server = Coordinator(made, link, ledger, log=lines.append, authority_changed=authority_changed)
        link.open()
        agents = {name: an_agent(homes[name], lines) for name in ("d0", "d1")}

        def meanwhile() -> None:
            server.step(0.01)
            for agent in agents.values():
                agent.step(0.01)
            supervisor.tick(lines.append)

        def closes_two_rounds() -> None:
            closed = server.checkpoint.round
            until(lambda: server.checkpoint.round >= closed + 2, meanwhile)

        try:
            closes_two_rounds()
            old = authorities.present(made.folder).certificate
            new = signing_keys.roll(made.folder, "t", server._now())
            wanted = certificates.authority_id(authorities.begin(made.folder, "t").certificate)

            def changed(name: str) -> bool:
                kept = fleet_keys.kept(homes[name])
                ring = fleet_keys.ring_of(homes[name], settings_of(homes[name]).device.key)
                return (ring.newest, kept.issuer) == (new.new, wanted)

            until(lambda: changed("d0") and changed("d1"), meanwhile)
            closes_two_rounds()
            assert announce_keys.needed(made, ledger) == ["d2"]
            assert authorities.trusted(made.folder)[0] == old, "d2 still needs it"
            agents["d2"] = an_agent(homes["d2"], lines)
            until(lambda: changed("d2"), meanwhile)
            until(lambda: authorities.trusted(made.folder)[0] != old, meanwhile)
            until(lambda: all(len(certificates.all_in((home / "ca.pem").read_bytes(), "ca")) == 1
                              for home in homes.values()), meanwhile)
            closes_two_rounds()
            assert signing_keys.pending(made.folder) is None
            stale = MqttLink(broker.url, client_id="d0", ca=homes["d0"] / "ca.pem",
                             cert=homes["d0"] / "identity-first.pem", key=homes["d0"] / "identity-first.key")
            stale.open()
            assert isinstance(first_event(stale, meanwhile), Disconnected), "the old certificate counts no more"
            stale.close()
        finally:
            for agent in agents.values():
                agent.link.close()
            server.close()
            supervisor.broker.stop()
