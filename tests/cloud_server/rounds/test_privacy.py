"""Private updates in a whole fleet: clipped and hidden as told, epsilon noted and shown, a limit that ends the run, and
one version of each update, whatever is killed."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.commands import server as commands
from cloud_server.devices import fleet_status
from cloud_server.ledger.ledger_tables import Round, RoundPrivacy, Update
from cloud_server.records.fleet_folder import Fleet
from cloud_server.reports import html_report
from cloud_server.results import outcome
from edge_agent.rounds import reports
from fleet_core.base import trees
from fleet_core.base.errors import ConfigError
from fleet_core.privacy.accountant import Accountant
from fleet_core.privacy.gaussian import Private
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Presence
from fleet_core.protocol.round_messages import WHOLE, UploadManifest, whole_update
from tests.support.deaths import founded, two_rounds
from tests.support.fleet_processes import json_of
from tests.support.inprocess import World, config_text, toy, world
from tests.support.stand_ins import BrokerFaults
from tests.support.world_checks import check_duals, opened, settled

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

DEVICES, ROUNDS = 3, 3
FULL = "quorum = 1.0\ndeadline_s = 1e6"


def text(privacy: str, method: str = "pfldyn-proto", *, rounds: int = ROUNDS, more: str = "", link: str = "") -> str:
    base = config_text(method, rounds=rounds, devices=DEVICES, fleet=FULL, link=link or 'up = "fp32"')
    return f"{base}\n{more}\n[privacy]\n{privacy}\n"


def started(folder: Path, privacy: str, method: str = "pfldyn-proto", **settings: Any) -> World:
    w = world(folder, text(privacy, method, **settings))
    w.start_server()
    for n in range(DEVICES):
        w.start_agent(f"d{n}", toy(n))
    return w


def ended(w: World, rounds: int = ROUNDS) -> World:
    assert w.pump(lambda: w.closed() == rounds and settled(w))
    return w


def test_local_noise_is_added_before_anything_leaves_and_the_duals_follow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: list[float] = []
    honest = Private.of

    def seen(self: Private, update: Any) -> Any:
        assert (self.clip, self.noise) == (0.25, 2.0)
        own.append(trees.norm(update))
        return honest(self, update)

    monkeypatch.setattr(Private, "of", seen)
    w = ended(started(tmp_path, 'mode = "local"\nclip = 0.25\nnoise_multiplier = 2.0', link='up = "int8"'))
    assert len(own) == DEVICES * ROUNDS
    check_duals(w, feedback=True)
    for row in w.server.ledger.rows(Update):
        assert (row.status, row.samples, row.loss) == ("counted", None, None)
    assert w.server.ledger.rounds()[0].loss is None
    w.close()


@pytest.mark.slow
def test_central_noise_is_in_the_sum_and_devices_only_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noises: list[float] = []
    honest = Private.of

    def seen(self: Private, update: Any) -> Any:
        noises.append(self.noise)
        return honest(self, update)

    monkeypatch.setattr(Private, "of", seen)
    w = started(tmp_path / "noisy", 'mode = "central"\nclip = 0.25\nnoise_multiplier = 40.0', "fedavg")
    before = trees.norm(w.server.checkpoint.state.model)
    ended(w)
    assert set(noises) == {0.0}
    size = sum(a.size for named in w.server.checkpoint.state.model.values() for a in named.values())
    expected = np.sqrt(before**2 + ROUNDS * size * (0.25 * 40 / DEVICES) ** 2)
    assert trees.norm(w.server.checkpoint.state.model) == pytest.approx(expected, rel=0.4)
    assert all(row.loss is not None for row in w.server.ledger.rows(Update))
    w.close()


def test_epsilon_is_noted_shown_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w = ended(started(tmp_path, 'mode = "local"\nnoise_multiplier = 4.0\nepsilon = 100'))
    accountant = Accountant(1e-5)
    rows = w.server.ledger.rows(RoundPrivacy)
    assert [(row.round, row.most) for row in rows] == [(1, 1), (2, 2), (3, 3)]
    assert [row.spent for row in rows] == [accountant.epsilon({4.0: k}) for k in (1, 2, 3)]
    assert {row.epsilon for row in rows} == {accountant.epsilon({4.0: 1})}
    facts = fleet_status.facts(w.fleet, w.server.ledger)
    assert facts["privacy"] == {
        "mode": "local", "clip": 1.0, "noise_multiplier": 4.0, "epsilon": rows[-1].spent, "rounds": 3, "delta": 1e-5,
        "limit": 100.0,
    }
    said = f"privacy, local: epsilon {rows[-1].spent:.3g} of 100 at delta 1e-05, for a device asked in 3 rounds"
    assert any(line.startswith(said) for line in fleet_status.lines(facts, w.fleet.folder))
    w.close()
    commands.rounds(w.fleet.folder, explain=True, as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert listed[1]["privacy"]["spent"] == rows[1].spent
    commands.rounds(w.fleet.folder, explain=True)
    assert f"{rows[1].spent:.3g}" in capsys.readouterr().out
    found = outcome.of_fleet(w.fleet.folder)
    assert found["rounds"][2]["privacy"]["spent"] == rows[2].spent
    assert "<h2>Privacy</h2>" in html_report.render(found, title="t")


def test_an_aggregator_without_the_accountant_does_not_start_a_private_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    w = world(tmp_path, text('mode = "local"'))
    with pytest.raises(ConfigError, match="epsilon needs dp-accounting, which is not installed"):
        w.start_server()
    w.close()


def test_the_run_ends_before_the_round_that_would_pass_the_limit(tmp_path: Path) -> None:
    limit = (Accountant(1e-5).epsilon({4.0: 2}) + Accountant(1e-5).epsilon({4.0: 3})) / 2
    w = started(tmp_path, f'mode = "local"\nnoise_multiplier = 4.0\nepsilon = {limit}', rounds=9)
    assert w.pump(lambda: bool(w.server.ended) and settled(w))
    assert w.closed() == 2
    assert w.server.ended.startswith("the privacy budget is spent: epsilon")
    assert w.server.ended.endswith("no round opens after round 2; [privacy] in fleet.toml has the limit")
    assert w.pump(lambda: w.server.served_round == 2)
    assert fleet_status.facts(w.fleet, w.server.ledger)["ended"] == w.server.ended
    w.kill_server()
    w.start_server()
    assert w.pump(lambda: bool(w.server.ended))
    assert w.closed() == 2
    w.close()


def test_a_device_that_was_killed_offers_the_same_bits_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[Private] = []
    honest = Private.of

    def seen(self: Private, update: Any) -> Any:
        draws.append(self)
        return honest(self, update)

    monkeypatch.setattr(Private, "of", seen)
    w = started(tmp_path, 'mode = "local"')
    pending = tmp_path / "devices" / "d1" / "methods"
    assert w.pump(lambda: any(pending.glob("*/pending.safetensors")))
    bits = next(pending.glob("*/pending.safetensors")).read_bytes()
    w.kill_agent("d1")
    w.kill_server()
    w.start_server()
    w.start_agent("d1")
    assert w.pump(lambda: w.closed() >= 1)
    (row,) = w.server.ledger.rows(Update, round=1, device="d1")
    assert row.update_id.encode() in bits
    assert row.status == "counted"
    ended(w)
    assert len({one.key for one in draws}) == len(draws) == DEVICES * ROUNDS  # one for every update
    w.close()


def asked(w: World) -> dict[str, int]:
    """Device -> in how many rounds epsilon counts it, as the ledger's rows say after a restart."""
    w.kill_server()
    w.start_server()
    spent = w.server._parts.privacy._spent
    return {name: sum(rounds.values()) for name, rounds in spent._rounds.items()}


def released(w: World, faults: BrokerFaults) -> Counter[str]:
    """Device or model -> how many different noised versions of it left the machine that made them: a device's updates,
    by the offers' ids, and with central noise the models of a round, by the manifests'."""
    versions = set[tuple[str, str]]()
    for _, message in faults.seen:
        place = topics.parse(w.name, message.topic)
        kind = "" if place is None else place.kind
        if place is not None and kind == "up" and place.part in ("m", WHOLE):
            whole = place.part == WHOLE
            offer = whole_update(message.payload)[0] if whole else messages.decode(UploadManifest, message.payload)
            versions.add((place.device, offer.id))
        manifest = json_of(message) if kind == "cur" else {}
        if manifest.get("open", kind == "cur"):
            versions.add((f"model of round {manifest['round']}", manifest["model"]["model"]))
    return Counter(what for what, _ in versions)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["local", "central"])
@pytest.mark.parametrize("actor", ["server", "d1"])
def test_a_death_at_any_act_releases_no_second_version_and_epsilon_counts_each_round_once(
    tmp_path: Path, mode: str, actor: str
) -> None:
    fleet = founded(tmp_path / "founded", text(f'mode = "{mode}"', "fedavg", rounds=2), DEVICES)
    w, _, _, points = two_rounds(fleet, tmp_path / "whole", actor, None, DEVICES)
    w.close()
    assert points > 8
    for at in range(1, points + 1):
        w, death, faults, _ = two_rounds(fleet, tmp_path / "killed", actor, at, DEVICES)
        assert death.where
        versions = released(w, faults)
        assert all(versions[f"d{n}"] == 2 for n in range(DEVICES)), (death.where, versions)
        assert {versions[f"model of round {n}"] for n in (1, 2)} == {1}, (death.where, versions)
        last = w.server.ledger.rows(RoundPrivacy, round=2)[0]
        assert (last.most, last.spent) == (2, Accountant(1e-5).epsilon({1.0: 2})), death.where
        assert asked(w) == {f"d{n}": 2 for n in range(DEVICES)}, death.where
        w.close()
        shutil.rmtree(w.folder)


def test_epsilon_still_counts_a_device_that_another_has_replaced_after_a_kill(tmp_path: Path) -> None:
    """It was asked, and part of its update may have arrived."""
    more = text('mode = "local"', "fedavg").replace("quorum = 1.0", "quorum = 1.0\ncohort = 2")
    w = world(tmp_path, more)
    w.start_server()
    for n in range(DEVICES):
        w.start_agent(f"d{n}", toy(n))
    assert w.pump(lambda: opened(w, 1))
    gone, kept = w.server.open.cohort
    w.kill_agent(gone)
    assert w.pump(lambda: w.logged(f"round 1: no update will come from {gone}"), tick_s=0.1)
    w.kill_server()
    w.start_server()
    assert w.pump(lambda: w.closed() == 1)
    assert gone not in w.server.ledger.rows(Round, round=1)[0].cohort
    assert gone not in {row.device for row in w.server.ledger.rows(Update)}
    w.server.ledger.request("paused", "yes")
    counted = asked(w)
    assert counted[gone] == 1
    assert counted[kept] >= 1
    w.close()


def test_an_agent_too_old_to_hide_its_updates_takes_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(tmp_path, text('mode = "local"').replace(f"min_devices = {DEVICES}", f"min_devices = {DEVICES - 1}"))
    w.start_server()
    def presence(**values: Any) -> Presence:
        if values["boot"].startswith("d0"):
            values.pop("private", None)
        return Presence(**values)

    monkeypatch.setattr(reports, "Presence", presence)
    for n in range(DEVICES):
        w.start_agent(f"d{n}", toy(n))
    ended(w)
    row = w.server.ledger.device("d0")
    assert row.cannot == "cannot clip and hide its updates, as [privacy] asks: its agent is too old"
    assert all("d0" not in one.cohort for one in w.server.ledger.rows(Round))
    w.close()


def test_an_update_made_by_other_rules_is_refused(tmp_path: Path) -> None:
    w = started(tmp_path, 'mode = "local"')
    assert w.pump(lambda: w.server.open is not None)
    w.server._parts.receiver._privacy = "local clip 9.0 noise 1.0"
    assert w.pump(lambda: w.logged("privacy local clip 1.0 noise 1.0, expected local clip 9.0 noise 1.0"))
    w.close()


@pytest.mark.parametrize(
    ("method", "privacy", "more", "said"),
    [
        ("pfldyn-proto", 'mode = "central"', "", "moves away from its minimum"),
        ("pfedhn", 'mode = "local"', "", "does not sum or average"),
        ("fedavg", 'mode = "central"', '[robust]\nrule = "median"', "robust rule 'median'"),
        ("fedavg", 'mode = "lokal"', "", "did you mean 'local'"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(
    tmp_path: Path, method: str, privacy: str, more: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        world(tmp_path, text(privacy, method, more=more))


@pytest.mark.parametrize(("link", "said"), [('up = "auto"', "the codec auto"), ("skip_below = 0.2", "skip_below")])
def test_what_would_show_numbers_without_noise_is_refused(tmp_path: Path, link: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        world(tmp_path, text('mode = "local"', "fedavg", link=link))


def test_a_fleet_does_not_become_private_after_rounds_that_were_not(tmp_path: Path) -> None:
    w = ended(started(tmp_path, 'mode = "none"'))
    w.close()
    path = w.fleet.folder / "fleet.toml"
    path.write_text(path.read_text().replace('mode = "none"', 'mode = "local"'))
    assert Fleet.load(w.fleet.folder).config.privacy.on
    with pytest.raises(ConfigError, match="is 'local', and round 1 here was with 'none'"):
        w.start_server()
