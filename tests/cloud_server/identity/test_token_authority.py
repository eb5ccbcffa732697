"""The enrolment port gets another authority, and tokens made before stay valid until they are used or expire."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cloud_server.broker.private_broker import start_secured
from cloud_server.commands import cli
from cloud_server.devices import fleet_status
from cloud_server.identity import fleet_certificates, token_authority
from cloud_server.identity.announce_keys import COUNT_S, AnnouncedKeys
from cloud_server.identity.audit_log import Recorder
from cloud_server.identity.token_enrolment import issue_token, make_token
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Invitation
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base import storage
from fleet_core.base.errors import ConfigError
from fleet_core.link.interface import Connected, Disconnected
from fleet_core.protocol import certificates
from fleet_core.protocol.enrolment_token import Token
from tests.support.brokers import NEEDS_MOSQUITTO, RecordingLink, until
from tests.support.cli import runner
from tests.support.pki import fleet_without_model, secured_broker, token_credentials
from tests.support.powercut import PowerCut

LATER_S = token_authority.SLACK_S + 1.0


def token(fleet: Fleet, ledger: Ledger, device: str, *, ago_s: float = 60.0, valid_s: float = 3600.0) -> Token:
    """A token that the aggregator knows, made ``ago_s`` seconds ago."""
    made, row = make_token(fleet, device, "mqtts://h:1", "mqtts://h:2", valid_s)
    ledger.put(replace(row, made_at=row.made_at - ago_s))
    return made


def used(ledger: Ledger, made: Token) -> None:
    ledger.put(*(replace(row, spent_at=time.time()) for row in ledger.rows(Invitation, id=made.id)))


def opens(made: Token, fleet: Fleet, ledger: Ledger) -> bool:
    """Whether the enrolment port trusts the token's certificate."""
    shown = certificates.certificate_in(made.certificate, "token")
    return any(certificates.is_issued_by(shown, one) for one in token_authority.trusted(fleet.folder, ledger))


def roll(fleet: Fleet, ledger: Ledger) -> None:
    token_authority.roll(fleet.folder, "t", ledger)


def test_tokens_made_before_open_the_port_until_the_last_is_used_or_has_expired(fleet: Fleet, ledger: Ledger) -> None:
    first, second = token(fleet, ledger, "d0"), token(fleet, ledger, "d1")
    expired = token(fleet, ledger, "d2", valid_s=-1.0)
    roll(fleet, ledger)
    assert opens(first, fleet, ledger)
    assert opens(second, fleet, ledger)
    assert token_authority.behind(fleet.folder, ledger) == ["d0", "d1"]
    new = token(fleet, ledger, "d3", ago_s=-LATER_S)
    assert opens(new, fleet, ledger)
    used(ledger, first)
    assert opens(second, fleet, ledger)
    used(ledger, second)
    assert [opens(one, fleet, ledger) for one in (first, second, expired, new)] == [False, False, False, True]
    assert token_authority.behind(fleet.folder, ledger) == []


def test_tokens_of_several_authorities_stay_valid_and_a_forgotten_one_is_no_longer_listed(
    fleet: Fleet, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, now = list[Token](), certificates.now()
    for n in range(3):
        monkeypatch.setattr(certificates, "now", lambda n=n: now.replace(year=now.year - 3 + n))
        monkeypatch.setattr(time, "time", lambda n=n: now.replace(year=now.year - 3 + n).timestamp())
        roll(fleet, ledger)
        made.append(token(fleet, ledger, f"d{n}", ago_s=-LATER_S, valid_s=9e8))
    monkeypatch.undo()
    assert all(opens(one, fleet, ledger) for one in made)
    used(ledger, made[0])
    assert [opens(one, fleet, ledger) for one in made] == [False, True, True]
    roll(fleet, ledger)
    listed = certificates.all_in((fleet.folder / "tokens-ca.pem").read_bytes(), "tokens-ca.pem")
    assert len(listed) == 3, "the present one, and those of the two unused tokens"
    assert [opens(one, fleet, ledger) for one in made] == [False, True, True]


def test_finishing_cuts_off_tokens_made_before_and_no_others(fleet: Fleet, ledger: Ledger) -> None:
    old = token(fleet, ledger, "d0")
    with pytest.raises(ConfigError, match="no roll-over of the tokens' authority is under way"):
        token_authority.finish(fleet.folder)
    roll(fleet, ledger)
    new = token(fleet, ledger, "d1")
    token_authority.finish(fleet.folder)
    assert (opens(old, fleet, ledger), opens(new, fleet, ledger)) == (False, True)


def test_the_old_key_is_gone_after_a_roll_over(fleet: Fleet, ledger: Ledger) -> None:
    before = (fleet.folder / "tokens-ca.key").read_bytes()
    roll(fleet, ledger)
    assert {path.name for path in fleet.folder.glob("tokens-ca*")} == {"tokens-ca.key", "tokens-ca.pem"}
    assert all(path.read_bytes() != before for path in fleet.folder.glob("*.key"))


def test_a_roll_over_that_is_killed_at_any_act_leaves_the_old_or_the_new_authority(tmp_path: Path) -> None:
    seen, number, ended = list[bool](), 0, False
    while not ended:
        number += 1
        fleet = fleet_without_model(tmp_path / f"fleet{number}")
        with Ledger(fleet.ledger_path) as ledger:
            earlier = token(fleet, ledger, "d0")
            old = token_authority.present(fleet.folder).certificate
            ended = not cut(number, fleet, ledger)
            present = token_authority.present(fleet.folder).certificate
            seen.append(present != old)
            assert opens(earlier, fleet, ledger)
            assert opens(token(fleet, ledger, "d1"), fleet, ledger)
            roll(fleet, ledger)
            assert token_authority.present(fleet.folder).certificate != present
            assert opens(earlier, fleet, ledger)
            assert not list(fleet.folder.glob("tokens-ca-next*"))
    assert seen == [False, False, False, False, True, True], "key, certificate, list; the renaming of the key decides"


def cut(number: int, fleet: Fleet, ledger: Ledger) -> bool:
    """Rolls over; the ``number``-th write or renaming is a power cut. Whether it came to that."""
    acts = [0]

    def failing(act: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            acts[0] += 1
            if acts[0] == number:
                raise PowerCut
            act(*arguments, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write_atomic", "move"):
            patch.setattr(storage, name, failing(getattr(storage, name)))
        try:
            roll(fleet, ledger)
        except PowerCut:
            return True
    return False


def test_a_running_aggregator_lets_the_broker_trust_the_new_authority_and_later_drops_the_old_one(
    fleet: Fleet, ledger: Ledger
) -> None:
    clock, lines, restarts = [0.0], list[str](), list[int]()
    keys = AnnouncedKeys(
        fleet, ledger, cast("Any", SimpleNamespace(connected=False)),
        audit=Recorder(fleet.folder, time.time, lines.append),
        clock=lambda: clock[0], now=time.time, log=lines.append, authority_changed=lambda: restarts.append(1),
    )
    file = fleet.folder / "mosquitto/tokens-ca.pem"

    def later() -> int:
        clock[0] += COUNT_S
        keys.tick()
        return len(certificates.all_in(file.read_bytes(), "tokens-ca.pem"))

    made = token(fleet, ledger, "d0")
    assert (later(), restarts) == (1, [])
    roll(fleet, ledger)
    assert (later(), later(), restarts) == (2, 2, [1])
    used(ledger, made)
    assert (later(), later(), restarts) == (1, 1, [1, 1])
    assert lines == ["the enrolment port has a new authority", "the enrolment port's old authority is dropped"]
    text = (fleet.folder / "audit.ndjson").read_text()
    assert (text.count("trust tokens"), text.count("drop tokens")) == (1, 1)


def test_the_command_says_who_has_a_token_of_the_old_authority(
    fleet: Fleet, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(monkeypatch, capsys, "metafleet", cli.main)
    assert run("server", "roll-authority", fleet.folder, "--tokens", "--finish").code == 2
    issue_token(fleet, "d0", fleet.folder / "d0.token", "mqtts://h:1", 3600.0)
    assert "1 devices have an unused token of the old one" in run(
        "server", "roll-authority", fleet.folder, "--tokens").out
    port = fleet.folder / "mosquitto/tokens-ca.pem"
    assert len(certificates.all_in(port.read_bytes(), "port")) == 2, "no aggregator runs, so the command writes it"
    facts = fleet_status.facts(fleet, ledger)
    assert facts["old_tokens"] == ["d0"]
    assert any("1 devices have an unused token of the old one: d0" in line
               for line in fleet_status.lines(facts, fleet.folder))
    done = run("server", "roll-authority", fleet.folder, "--tokens", "--finish", "--json")
    assert json.loads(done.out) == {"finished": True, "need_old": ["d0"], "aggregator": "off"}
    assert len(certificates.all_in(port.read_bytes(), "port")) == 1
    assert "old_tokens" not in fleet_status.facts(fleet, ledger)


@NEEDS_MOSQUITTO
def test_mosquitto_takes_tokens_of_both_authorities_and_then_of_the_new_one_only(
    fleet: Fleet, ledger: Ledger, tmp_path: Path
) -> None:
    old = token(fleet, ledger, "d0")

    def comes_in(made: Token, port: int) -> bool:
        who = token_credentials(made, fleet, tmp_path / made.device)
        watched = RecordingLink(who.link(f"mqtts://127.0.0.1:{port}", made.id))
        watched.link.open()
        until(lambda: watched.of(Connected) or watched.of(Disconnected), watched)
        watched.link.close()
        return bool(watched.of(Connected))

    with secured_broker(fleet) as (broker, place):
        assert comes_in(old, place.enrolment_port)
        roll(fleet, ledger)
        new = token(fleet, ledger, "d1")
        assert not comes_in(new, place.enrolment_port), "the broker has not been told yet"
        path = fleet_certificates.configure(fleet, ledger, place)
        broker.stop()
        broker = start_secured(path, place)
        try:
            assert comes_in(old, place.enrolment_port)
            assert comes_in(new, place.enrolment_port)
            token_authority.finish(fleet.folder)
            fleet_certificates.configure(fleet, ledger, place)
            broker.stop()
            broker = start_secured(path, place)
            assert not comes_in(old, place.enrolment_port)
            assert comes_in(new, place.enrolment_port)
        finally:
            broker.stop()
