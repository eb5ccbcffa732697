"""The fleet gets another signing key while devices train: rounds go on, all follow, and a power cut leaves no half
state."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloud_server.commands import cli
from cloud_server.devices import fleet_status
from cloud_server.identity import device_folder
from cloud_server.ledger.ledger import Ledger
from cloud_server.records import key_files, signing_keys
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.signing_keys import CUT_S, FILE, NEXT
from edge_agent.commands import install
from edge_agent.device import fleet_keys, signed_program
from fleet_core.base.errors import ConfigError, MessageError
from fleet_core.protocol import topics
from fleet_core.protocol.signing import Verifier, key_id, load_public
from fleet_core.protocol.succession import Keyring, Succession
from tests.support.cli import runner
from tests.support.inprocess import World, config_text, toy, without_fsync, world
from tests.support.pki import fleet_without_model
from tests.support.powercut import cut_at

OVERLAP_S = 1000.0


@pytest.fixture
def w(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    without_fsync(monkeypatch)
    made = world(tmp_path, config_text(rounds=5000, devices=2))
    first = made.fleet.public_key()
    monkeypatch.setattr(Fleet, "public_key", lambda fleet: first)  # what devices were given
    made.start_server()
    for n in range(3):
        made.start_agent(f"d{n}", toy(n))
    assert made.pump(lambda: made.closed() >= 1)
    return made


def roll(w: World, *, cut: bool = False) -> Succession:
    return signing_keys.roll(w.fleet.folder, "t", w.clock.wall(), overlap_s=OVERLAP_S, cut=cut)


def signs(w: World) -> str:
    """The key that signed the retained manifest."""
    return w.broker.retained[topics.current("t")].split(b":")[1].decode()


def signs_with(w: World, key: str) -> bool:
    return signs(w) == key_id(key)


def has(w: World, name: str) -> str:
    """The newest key of a device."""
    return str(w.agents[name]._check.keys.ring.newest)


def comes(w: World, what: Callable[[], bool]) -> bool:
    """Whether it happens, in steps of half a second, so that few rounds pass meanwhile."""
    return w.pump(what, tick_s=0.5)


def goes_on(w: World) -> bool:
    closed = w.closed()
    return w.pump(lambda: w.closed() >= closed + 2, tick_s=0.1)


def test_rounds_go_on_across_a_roll_over_that_every_device_follows(w: World) -> None:
    new = roll(w)
    assert signs(w) == key_id(new.old)
    assert comes(w, lambda: {has(w, name) for name in w.agents} == {new.new})
    assert comes(w, lambda: signs(w) == key_id(new.new)), "nobody needs the old one any more"
    assert not (w.fleet.folder / NEXT).exists()
    assert load_public(w.fleet.folder / "fleet.pub") == new.new
    assert goes_on(w)
    assert not w.logged("refused")
    with Ledger(w.fleet.ledger_path) as ledger:
        facts = fleet_status.facts(w.fleet, ledger)["key"]
    assert (facts["followed"], facts["behind"], facts["signs"]) == (3, [], True)


def test_a_device_that_was_off_during_two_roll_overs_follows_them_when_it_comes_back(w: World) -> None:
    w.kill_agent("d2")
    for _ in range(2):
        new = roll(w)
        w.clock.seconds += OVERLAP_S + 1
        assert comes(w, partial(signs_with, w, new.new))
        assert goes_on(w)
    w.start_agent("d2")
    assert comes(w, lambda: has(w, "d2") == new.new)
    joined = w.agents["d2"]
    assert comes(w, lambda: joined.manifest is not None)
    w.kill_agent("d2")
    w.start_agent("d2")
    assert has(w, "d2") == new.new, "it is on its disk"
    w.kill_agent("d0")
    assert goes_on(w), "its updates count"


def test_one_device_that_does_not_follow_keeps_the_old_key_signing_until_the_middle_of_the_overlap(w: World) -> None:
    w.kill_agent("d2")
    new = roll(w)
    assert comes(w, lambda: has(w, "d0") == has(w, "d1") == new.new)
    assert goes_on(w)
    assert signs(w) == key_id(new.old)
    with Ledger(w.fleet.ledger_path) as ledger:
        facts = fleet_status.facts(w.fleet, ledger)
    assert facts["key"]["behind"] == ["d2"]
    assert any("is announced: 2 devices have switched, 1 have not (d2)" in line
               for line in fleet_status.lines(facts, w.fleet.folder))
    with pytest.raises(ConfigError, match="is under way"):
        roll(w)
    w.clock.seconds += OVERLAP_S / 2
    assert comes(w, lambda: signs(w) == key_id(new.new))
    assert goes_on(w)


def test_a_cut_takes_the_devices_that_are_on_along_and_no_other(w: World) -> None:
    w.kill_agent("d2")
    old = w.fleet.signer()
    new = roll(w, cut=True)
    assert comes(w, lambda: signs(w) == key_id(new.new) and has(w, "d0") == has(w, "d1") == new.new)
    assert goes_on(w)
    for name in ("d0", "d1"):
        with pytest.raises(MessageError, match="signed by key"):
            w.agents[name]._check.keys.ring.verify(old.sign(b"x"))
    retained = w.broker.retained[topics.keys("t")]
    w.clock.seconds += CUT_S + 1
    assert comes(w, lambda: topics.keys("t") not in w.broker.retained), "nobody else follows"
    w.start_agent("d2")
    w.broker.publish(topics.keys("t"), retained, retain=True)
    assert comes(w, lambda: w.logged("has cut the key that this device has"))
    assert has(w, "d2") == new.old
    assert w.agents["d2"].manifest is None


def test_a_cut_during_a_roll_over_ends_both_old_keys(w: World) -> None:
    w.kill_agent("d2")
    first = roll(w)
    assert comes(w, lambda: has(w, "d0") == first.new)
    second = roll(w, cut=True)
    assert comes(w, lambda: has(w, "d0") == has(w, "d1") == second.new and signs(w) == key_id(second.new))
    assert w.agents["d0"]._check.keys.ring.accepted() == [second.new]
    assert goes_on(w)


def test_a_roll_over_that_was_asked_for_while_no_aggregator_ran_is_taken_up_at_its_start(w: World) -> None:
    w.kill_server()
    new = roll(w)
    w.start_server()
    assert comes(w, lambda: signs(w) == key_id(new.new))
    assert goes_on(w)


def test_a_token_of_before_leads_a_device_to_the_new_key_and_its_home_takes_both(w: World, tmp_path: Path) -> None:
    new = roll(w)
    assert comes(w, lambda: signs(w) == key_id(new.new))
    w.start_agent("d3", toy(3))
    assert comes(w, lambda: has(w, "d3") == new.new)
    home = tmp_path / "home"
    device_folder.write_device_folder(w.fleet, "d4", home, "mqtt://127.0.0.1:1")
    text = (home / "device.toml").read_text()
    (home / "device.toml").write_text(text.replace(w.fleet.public_key(), new.new))
    device_folder.check_folder(w.fleet, "d4", home)
    (home / "device.toml").write_text(text.replace(w.fleet.public_key(), "0" * 64))
    with pytest.raises(ConfigError, match="another device's folder: its key"):
        device_folder.check_folder(w.fleet, "d4", home)


# On the disk ----------------------------------------------------------------------------------------------------------


def test_a_power_cut_at_any_write_of_a_roll_over_leaves_a_fleet_that_signs_and_can_roll(tmp_path: Path) -> None:
    for cutting in (False, True):
        for cut in range(1, 9):
            fleet = fleet_without_model(tmp_path / f"fleet{cutting}{cut}")
            anchor = fleet.public_key()
            with cut_at(cut) as begun:
                signing_keys.roll(fleet.folder, "t", 1e9, cut=cutting)
                signing_keys.promote(fleet.folder)
            done = begun[0] < cut
            for now in (1e9, 1.1e9):  # in the first half of the overlap, and after it
                ring = Keyring(anchor, signing_keys.announced(fleet.folder, 1e9), fleet="t", now=lambda: 1e9)
                ring.verify(signing_keys.signer(fleet.folder, now).sign(b"a round"))
            assert fleet.lasting_id() == anchor[:8]
            last = signing_keys.last(fleet.folder)
            if last is not None:
                assert fleet.public_key() == last.new == signing_keys.signer(fleet.folder, 1.1e9).public
            signing_keys.roll(fleet.folder, "t", 1.1e9)
            assert signing_keys.pending(fleet.folder) is not None
            if done:
                break
        assert cut == 5, "four writes: key, succession, key, public key"


def test_a_power_cut_on_the_device_leaves_the_key_before_or_the_new_one(tmp_path: Path) -> None:
    fleet = fleet_without_model(tmp_path / "fleet")
    anchor = fleet.public_key()
    new = signing_keys.roll(fleet.folder, "t", 1e9)
    links = signing_keys.announced(fleet.folder, 1e9)
    home = tmp_path / "home"
    with cut_at(1):
        fleet_keys.FleetKeys(home, anchor, "t", lambda: 1e9).take(links)
    assert fleet_keys.ring_of(home, anchor).newest == anchor
    fleet_keys.FleetKeys(home, anchor, "t", lambda: 1e9).take(links)
    assert fleet_keys.ring_of(home, anchor).newest == new.new
    for damaged in (b"{", b'{"links": ["x"]}', b"\xff", b"[]"):
        (home / fleet_keys.FILE).write_bytes(damaged)
        assert fleet_keys.ring_of(home, anchor).newest == anchor
    (home / fleet_keys.FILE).write_text(json.dumps({"links": list(links)}))
    assert fleet_keys.ring_of(home, "0" * 64).newest == "0" * 64, "a new token"


def test_a_device_takes_bundles_of_the_old_key_until_the_overlap_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, home = fleet_without_model(tmp_path / "fleet"), tmp_path / "home"
    device_folder.write_device_folder(fleet, "d0", home, "mqtt://127.0.0.1:1")
    new = signing_keys.roll(fleet.folder, "t", 1e9)

    def taken(key: str, at: float) -> bool:
        monkeypatch.setattr(install, "ring_of", partial(fleet_keys.ring_of, now=lambda: at))
        manifest: Any = SimpleNamespace(fleet="t", key=key)
        try:
            return install._settings(manifest, home, None).device.name == "d0"
        except ConfigError:
            return False

    assert (taken(new.old, 1e9), taken(new.new, 1e9)) == (True, False)
    fleet_keys.FleetKeys(home, new.old, "t", lambda: 1e9).take(signing_keys.announced(fleet.folder, 1e9))
    assert (taken(new.old, 1e9), taken(new.new, 1e9)) == (True, True)
    assert (taken(new.old, new.until), taken(new.new, new.until)) == (False, True)


def test_an_encrypted_key_rolls_over_to_an_encrypted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_files, "COST", 1 << 14)
    fleet = fleet_without_model(tmp_path / "fleet")
    (tmp_path / "secret").write_text("a long passphrase")
    monkeypatch.setenv(key_files.FROM_FILE, str(tmp_path / "secret"))
    key_files.encrypt(fleet.folder)
    for cut in (False, True):
        signing_keys.roll(fleet.folder, "t", 1e9, cut=cut)
        assert key_files.state(fleet.folder) == "encrypted"
        signing_keys.promote(fleet.folder)
        Verifier(fleet.public_key()).verify(fleet.signer().sign(b"x"))
    key_files.forget()


def test_a_program_signed_by_the_new_key_is_verified_from_the_key_that_root_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleet_without_model(tmp_path / "fleet")
    root, agent = tmp_path / "fleet.pub", tmp_path / "agent"
    root.write_text(fleet.public_key())
    monkeypatch.setattr(signed_program, "AGENT", agent)
    signing_keys.roll(fleet.folder, "t", 1e9)
    signing_keys.promote(fleet.folder)
    signed = fleet.signer().sign(b"metafleet program 1\n")
    with pytest.raises(MessageError):
        signed_program.verifier_of(root).verify(signed)
    fleet_keys.FleetKeys(agent, root.read_text(), "t", lambda: 1e9).take(signing_keys.announced(fleet.folder, 1e9))
    assert signed_program.verifier_of(root).verify(signed)


def test_the_command_rolls_the_key_and_says_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = fleet_without_model(tmp_path / "fleet")
    run, old = runner(monkeypatch, capsys, "metafleet", cli.main), fleet.public_key()
    said = run("server", "roll-key", fleet.folder, "--overlap", "7d")
    assert f"replaces {key_id(old)}: devices are told when the aggregator runs" in said.out
    assert "make a new backup" in said.err
    refused = run("server", "roll-key", fleet.folder)
    assert (refused.code, "is under way" in refused.err) == (2, True)
    told = json.loads(run("server", "roll-key", fleet.folder, "--cut", "--json").out)
    assert (told["number"], told["cut"], told["new"]) == (2, True, key_id(fleet.public_key()))
    assert json.loads((fleet.folder / FILE).read_text())["number"] == 2
    assert (fleet.folder / "audit.ndjson").read_text().count('"roll key"') == 2
