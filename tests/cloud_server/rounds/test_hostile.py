"""A device that lies, in a whole fleet: refused, told, noted, shown; and the same bits after a restart."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cloud_server.commands import server as commands
from cloud_server.ledger.ledger_tables import Round, Update
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base import trees
from fleet_core.base.errors import ConfigError
from tests.support import liars
from tests.support.inprocess import World, config_text, toy, without_fsync, world
from tests.support.liars import lie
from tests.support.world_checks import check_duals, checkpoint_bits, settled, statuses

DEVICES, ROUNDS = 5, 3


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fsync(monkeypatch)


def started(folder: Path, *, rule: str = "none", link: str = "", rounds: int = ROUNDS) -> World:
    return liars.started(folder, f'rule = "{rule}"\nshare = 0.2', devices=DEVICES, fewest=DEVICES, rounds=rounds,
                         link=link)


def ended(w: World, rounds: int = ROUNDS) -> World:
    assert w.pump(lambda: w.closed() == rounds and settled(w))
    return w


def closed(w: World, number: int) -> bool:
    return w.closed() >= number and settled(w)


def arrived(w: World, count: int) -> bool:
    return w.server.open is not None and len(w.server.open.received) >= count


def norm(w: World) -> float:
    return float(trees.norm(w.server.checkpoint.state.model))


def test_a_liar_is_refused_told_noted_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lie(monkeypatch, {"d2": -100.0})
    w = ended(started(tmp_path))
    for number in range(1, ROUNDS + 1):
        assert statuses(w, number) == {f"d{n}": "refused" if n == 2 else "counted" for n in range(DEVICES)}
    row, *_ = w.server.ledger.rows(Update, device="d2")
    assert "5 times the median of the last rounds" in row.reason
    assert w.logged(f"round 1: d2: update refused: {row.reason}")
    assert w.logged(f"d2: round 1: the update was refused: {row.reason}"), "the device says why"
    assert w.logged("d2: round 1: the update was not counted, its state is discarded")
    note = w.server.ledger.rows(Round, round=1)[0].note
    assert note == f"d2: {row.reason}"
    w.close()
    commands.rounds(w.fleet.folder)
    assert "refused" in capsys.readouterr().out.splitlines()[0]
    commands.rounds(w.fleet.folder, as_json=True)
    assert [one["refused"] for one in json.loads(capsys.readouterr().out)] == [1] * ROUNDS
    commands.rounds(w.fleet.folder, explain=True)
    assert capsys.readouterr().out.count("times the median") >= 2 * ROUNDS, "in the note, and with its device"
    commands.rounds(w.fleet.folder, explain=True, as_json=True)
    assert [set(one["reasons"]) for one in json.loads(capsys.readouterr().out)] == [{"d2"}] * ROUNDS


@pytest.mark.slow
def test_it_ruins_a_fleet_with_the_constant_bound_and_not_one_with_the_adaptive_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = norm(ended(started(tmp_path / "clean", rounds=6), 6))
    lie(monkeypatch, {"d2": -10.0})
    ruined = ended(started(tmp_path / "ruined", link="max_update_norm = 10000.0", rounds=6), 6)
    held = ended(started(tmp_path / "held", rounds=6), 6)
    assert norm(ruined) > 5 * clean
    assert norm(held) < 2 * clean


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["none", "krum", "history"])
def test_the_servers_dual_stays_the_mean_of_the_devices_duals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """The device keeps nothing of a refused update on its disk."""
    lie(monkeypatch, {"d2": -100.0})
    w = started(tmp_path, rule=rule)
    for number in range(1, ROUNDS + 1):
        assert w.pump(partial(closed, w, number))
        check_duals(w, feedback=False)
    w.close()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["none", "clip", "median", "krum", "history"])
def test_an_aggregator_that_was_killed_closes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    lie(monkeypatch, {"d2": -100.0})
    whole = checkpoint_bits(ended(started(tmp_path / "whole", rule=rule)))
    w = started(tmp_path / "killed", rule=rule)
    assert w.pump(partial(closed, w, 1))
    for late in ("d4", "d1"):
        agent = w.agents.pop(late)
        assert w.pump(partial(arrived, w, DEVICES - 1))
        w.kill_server()
        w.agents[late] = agent
        w.start_server()
        assert w.pump(partial(closed, w, w.closed() + 1))
    assert checkpoint_bits(ended(w)) == whole


def test_a_method_whose_rule_is_no_mean_refuses_a_robust_rule_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.toml:\d+: robust\.rule: 'median' replaces .* pfedhn does not sum"):
        world(tmp_path, f'{config_text("pfedhn")}\n[robust]\nrule = "median"\n')
    with pytest.raises(ConfigError, match=r"robust\.rule.*did you mean 'median'"):
        world(tmp_path, f'{config_text("fedavg")}\n[robust]\nrule = "medain"\n')


def test_the_log_says_where_duals_are_no_longer_exact(tmp_path: Path) -> None:
    w = world(tmp_path, f'{config_text("pfldyn-proto")}\n[robust]\nrule = "median"\n')
    assert any("beside the minimiser" in line for line in Fleet.load(w.fleet.folder).remarks())
    path = w.fleet.folder / "fleet.toml"
    path.write_text(path.read_text().replace('"median"', '"krum"'))
    assert not any("minimiser" in line for line in Fleet.load(w.fleet.folder).remarks())


@pytest.mark.slow
def test_the_same_bits_in_any_order_of_arrival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch, {"d2": -100.0})
    one = ended(started(tmp_path / "one", rule="history"))
    other = world(tmp_path / "other", (one.fleet.folder / "fleet.toml").read_text())
    other.start_server()
    for n in reversed(range(DEVICES)):
        other.start_agent(f"d{n}", toy(n))
    ended(other)
    assert checkpoint_bits(one) == checkpoint_bits(other)
    assert np.isfinite(norm(other))
