"""Rounds that train a part of the model, in a fleet: signed, checked, cheap, in the ledger with the reason, the same
after a restart, shown to people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.commands import server as commands
from cloud_server.identity.create_fleet import create_fleet
from cloud_server.ledger.ledger_tables import Device, Flops, Round, RoundArrays, Traffic
from cloud_server.membership.inability import inability
from cloud_server.records.fleet_settings import LinkSection
from cloud_server.reports import html_report, terminal_view
from cloud_server.results import outcome, result
from edge_agent.device.state import DeviceState
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage
from fleet_core.base.errors import ConfigError
from fleet_core.model import choose_frozen, payloads
from fleet_core.protocol.device_messages import Presence
from fleet_core.protocol.round_messages import Manifest
from tests.support.inprocess import World, config_text, toy, without_fsync, world
from tests.support.stand_ins import FakeDevice, SlowTrainer
from tests.support.world_checks import check_duals, finished, opened, settled, start, state_key, statuses

HEAD = 'only = ["head.*"]'
AUTO = 'freeze = "auto"'
TICK_S = 0.25


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fsync, and a schedule that freezes and probes within some rounds."""
    without_fsync(monkeypatch)
    for name, value in {"WINDOW": 2, "SMALL": 0.9, "AGAIN": 0.95, "REST": 2}.items():
        monkeypatch.setattr(choose_frozen, name, value)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Make worlds and end them."""
    made: list[World] = []

    def make(train: str, method: str = "feddyn", **options: Any) -> World:
        made.append(world(tmp_path / str(len(made)), f"{config_text(method, **options)}\n[train]\n{train}\n"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def arrays(w: World) -> dict[int, tuple[set[str], str]]:
    return {row.round: (set(row.frozen), row.reason) for row in w.server.ledger.rows(RoundArrays)}


def manifest(w: World) -> Manifest:
    return next(iter(w.agents.values())).manifest


def has_closed(w: World, number: int) -> bool:
    return w.closed() >= number


def is_open(w: World, number: int) -> bool:
    """Whether the round is open and a device has heard of it."""
    heard = [agent.manifest for agent in w.agents.values() if agent.manifest is not None]
    return opened(w, number) and any(m.round == number and m.open for m in heard)


def down(w: World, number: int, device: str, kind: str = "model") -> int:
    rows = w.server.ledger.rows(Traffic, round=number, device=device, direction="down", kind=kind)
    return sum(row.payload_bytes for row in rows)


def weights(w: World, name: str) -> dict[str, bytes]:
    held = w.agents[name].home.weights("model")
    return {key: np.asarray(array).tobytes() for key, array in storage.flatten(held.params).items()}


# By patterns ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_signed_manifest_says_what_is_trained_and_what_a_delta_has(fleet: Callable[..., World]) -> None:
    w = fleet(HEAD, rounds=3)
    start(w, "d0", "d1", "d2")
    for number in (1, 2, 3):
        assert w.pump(partial(is_open, w, number))
        assert manifest(w).train == "2-3", "the places of head.weight and head.bias"
        assert manifest(w).model.arrays == (None if number == 1 else "2-3")
    assert w.pump(lambda: finished(w))
    assert arrays(w) == {n: ({"body/layers.0.weight", "body/layers.0.bias"}, "") for n in (1, 2, 3)}
    assert manifest(w).train is None, "no round is open"


def test_frozen_arrays_stay_as_in_the_first_model_on_every_device_and_at_the_aggregator(
    fleet: Callable[..., World]
) -> None:
    w = fleet(HEAD, rounds=4, fleet="cohort = 2")
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: finished(w) and settled(w))
    first = storage.flatten(w.fleet.weights(w.server.layout))
    for name in w.agents:
        held = weights(w, name)
        assert held["body/layers.0.weight"] == first["body/layers.0.weight"].tobytes()
        assert held["head/head.weight"] != first["head/head.weight"].tobytes()
    state = w.server.checkpoint.state
    assert state.model["body"]["layers.0.weight"].astype("f4").tobytes() == first["body/layers.0.weight"].tobytes()
    assert not np.any(state.memory["dual"]["body"]["layers.0.weight"])
    check_duals(w, feedback=True)


@pytest.mark.slow
def test_bytes_and_operations_are_those_of_what_moves(fleet: Callable[..., World]) -> None:
    """Of a model whose body is much larger than its head, also for devices that were not asked in the last round."""
    sent = {}
    for train in ("", HEAD):
        w = fleet(train, rounds=8, fleet="cohort = 2")
        text = w.fleet.folder / "fleet.toml"
        text.write_text(text.read_text().replace("serve_every = 8", "serve_every = 100"))
        start(w, "d0", "d1", "d2", "d3")
        assert w.pump(partial(finished, w))
        flops = {row.round: row.flops for row in w.server.ledger.rows(Flops)}
        cohorts = {row.round: row.cohort for row in w.server.ledger.rows(Round)}
        met: set[str] = set()
        sent[train] = {"down": [], "fresh": [], "flops": flops[2]}
        for number, cohort in cohorts.items():
            for name in cohort:
                sent[train]["down" if name in met else "fresh"].append(down(w, number, name))
            met |= set(cohort)
    whole, part = sent[""], sent[HEAD]
    assert len(whole["down"]) == len(part["down"]) > 5
    assert max(part["down"]) < min(whole["down"])
    assert max(part["fresh"]) == pytest.approx(max(whole["fresh"]), rel=0.02), "frozen arrays go to each device once"
    assert part["flops"] < whole["flops"]


def test_a_device_that_missed_rounds_takes_what_moves_and_holds_the_same_bits(fleet: Callable[..., World]) -> None:
    w = fleet(HEAD, rounds=6, fleet="cohort = 2", link='down = "int4"')
    start(w, "d0", "d1", "d2", "d3")
    parts = []
    for number in range(1, 7):
        assert w.pump(partial(has_closed, w, number))
        row = w.server.ledger.rows(Round, round=number)[0]
        for name in row.cohort:
            assert payloads.identity(w.agents[name].home.weights("model").params) == row.model_id
        parts += [number] if manifest(w).model.part is not None else []
    assert parts, "somebody lacked the base"


@pytest.mark.slow
def test_a_part_that_does_not_fit_gives_way_to_the_whole(fleet: Callable[..., World]) -> None:
    """A device is wrong about which frozen arrays it holds."""
    w = fleet(HEAD, rounds=8, fleet="cohort = 2")
    start(w, "d0", "d1", "d2", "d3")
    for agent in w.agents.values():
        agent._tasks.models._has_rest = lambda ref, groups: True
        agent._tasks.models._with_rest = lambda ref, groups, a=agent: a.service.layout.seeded(3)
    assert w.pump(lambda: finished(w), tick_s=TICK_S)
    assert w.logged("the part does not fit what is held here: the whole model is needed")
    assert set(statuses(w, 8).values()) == {"counted"}


def test_an_update_that_carries_other_arrays_is_refused(fleet: Callable[..., World]) -> None:
    w = fleet(HEAD, method="fedavg", devices=1, link='up = "int4"')
    w.start_server()
    liar = FakeDevice(w, "liar")
    liar.announce(parts=True)
    assert w.pump(lambda: opened(w, 1))
    w.step()
    for train, said in ((None, "all"), ("0-1", "0-1"), ("0-3", "0-3")):
        upload = liar.update(b"x" * 60, codec="int4", train=train)
        liar.offer(upload, 1)
        w.step()
        assert f"arrays {said}, expected 2-3" in liar.downs()[-1].reason
    whole = payloads.encode("int4", w.server.layout.seeded(1))
    upload = liar.update(whole, codec="int4", train="2-3")
    liar.offer(upload, 1)
    w.step()
    liar.send(upload, 1, whole)
    w.step()
    assert liar.downs()[-1].t == "reject", "it says what it should, and brings the whole model"


def test_agents_of_the_version_before_are_not_asked_and_the_reason_is_told(
    fleet: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = fleet(HEAD, devices=2, rounds=2)
    w.start_server()
    old = FakeDevice(w, "old")
    old.announce()
    for n in range(2):
        w.start_agent(f"d{n}", toy(n))
    assert w.pump(lambda: finished(w))
    assert {row.cohort for row in w.server.ledger.rows(Round)} == {("d0", "d1")}
    (row,) = w.server.ledger.rows(Device, name="old")
    assert row.cannot == "cannot train a part of the model: its agent is too old"


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_an_old_agent_takes_part_where_everything_is_trained(method: str) -> None:
    known = Presence(st="on", boot="b", methods={method: METHODS[method].version}, codecs=("fp32", "int8"))
    told = partial(inability, known, method=METHODS[method], link=LinkSection(), parameters=1)
    assert told() is None
    assert "too old" in str(told(parts=True))


@pytest.mark.slow
def test_a_device_that_only_answers_follows_also_with_an_agent_of_the_version_before(
    fleet: Callable[..., World]
) -> None:
    """It does not know ``arrays``: the delta does not fit, and it takes the whole."""
    w = fleet(HEAD, rounds=6)
    text = w.fleet.folder / "fleet.toml"
    text.write_text(text.read_text().replace("serve_every = 6", "serve_every = 2"))
    start(w, "d0", "d1", "d2")
    for name in ("old", "new"):
        w.start_agent(name, toy(9), train=False)
    models: Any = w.agents["old"]._tasks.models
    models.blob_for = lambda ref, groups: ref.blob if ref.base is None or models._fits(ref, groups) else ref.full
    decode = models._decode
    models._decode = lambda m, groups, ref, blob, data: decode(
        m, groups, replace(ref, arrays=None, part=None, rest=None), blob, data)
    assert w.pump(lambda: finished(w))
    held = [payloads.identity(w.agents[name].service.slots.weights().params) for name in ("old", "new", "d0")]
    assert held[0] == held[1] == held[2]
    assert w.logged("old: the delta does not fit what is held here: the whole model is needed")
    assert not w.logged("new: the delta does not fit")
    served = [sum(down(w, n, name, "serve") for n in range(7)) for name in ("old", "new")]
    assert served[0] > served[1], "the frozen arrays came once to the one that knows"


def test_patterns_may_change_between_two_lives_also_while_a_round_is_open(fleet: Callable[..., World]) -> None:
    """What was trained for other arrays is dropped on both sides and trained anew."""
    w = fleet(HEAD, rounds=4, fleet="quorum = 1.0", link='down = "int8"')
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: w.closed() == 1)
    before = {name: weights(w, name) for name in w.agents}
    w.trainers["d2"].inner = SlowTrainer()
    assert w.pump(lambda: opened(w, 2) and len(w.server.open.received) == 2)
    w.kill_server()
    text = w.fleet.folder / "fleet.toml"
    text.write_text(text.read_text().replace(HEAD, 'only = ["layers.*"]'))
    w.start_server()
    assert w.pump(lambda: w.closed() == 2, tick_s=TICK_S)
    assert w.logged("the kept update of")
    assert arrays(w)[2][0] == {"head/head.weight", "head/head.bias"}
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    for name in w.agents:
        now = weights(w, name)
        assert now["body/layers.0.weight"] != before[name]["body/layers.0.weight"]
        row = w.server.ledger.rows(Round, round=4)[0]
        assert payloads.identity(w.agents[name].home.weights("model").params) == row.model_id
    check_duals(w, feedback=True)


@pytest.mark.slow
def test_a_devices_frozen_dual_and_residual_keep_their_bits_on_its_disk(fleet: Callable[..., World]) -> None:
    w = fleet("", rounds=4)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: w.closed() == 2 and settled(w) and opened(w, 3))
    w.kill_server()
    text = w.fleet.folder / "fleet.toml"
    text.write_text(text.read_text().replace("[train]", f"[train]\n{HEAD}"))

    def state() -> dict[str, bytes]:
        found = DeviceState(w.folder / "devices" / "d0").state(state_key(w, w.server.checkpoint.state.dual_epoch))
        assert found is not None
        return {key: np.asarray(array).tobytes() for key, array in storage.flatten_roles(found).items()}

    w.start_server()
    before = state()
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    after = state()
    kept = {key for key in before if "/body/" in key}
    assert {key.partition("/")[0] for key in kept} == {"dual", "residual"}
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
    assert all(after[key] != before[key] for key in before.keys() - kept)


@pytest.mark.parametrize(("train", "method", "said"), [
    ('only = ["hed.*"]', "fedavg", r"train\.only\[0\]: no array of the model mlp is named 'hed\.\*' \(did you mean"),
    (HEAD, "pfldyn-proto", "names no array of the body"),
    (HEAD, "pfedhn", "train.only: pfedhn makes the whole model of every device anew"),
    (AUTO, "fedproto", "train.freeze: fedproto shares prototypes"),
    ('freeze = "autom"', "fedavg", "unknown value 'autom', expected one of auto, never"),
])
def test_what_does_not_go_is_refused_when_the_fleet_is_made_and_nothing_is_written(
    tmp_path: Path, train: str, method: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        world(tmp_path, f"{config_text(method)}\n[train]\n{train}\n")
    assert not (tmp_path / "fleet" / "fleet.toml").exists()
    assert not (tmp_path / "fleet" / "weights.safetensors").exists()


def test_a_pattern_that_fits_no_more_is_said_with_its_line_when_the_server_starts(fleet: Callable[..., World]) -> None:
    w = fleet(HEAD)
    text = w.fleet.folder / "fleet.toml"
    text.write_text(text.read_text().replace(HEAD, 'only = ["heda.*"]'))
    with pytest.raises(ConfigError, match=r"fleet\.toml:\d+: train\.only\[0\]"):
        w.start_server()
    with pytest.raises(ConfigError, match="head"):
        create_fleet(w.fleet.folder, None, lambda settings, head: (b"", b""))


# By a schedule --------------------------------------------------------------------------------------------------------

ROUNDS = 12


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A fleet whose rounds are closed; its server is open."""
    with pytest.MonkeyPatch.context() as patch:
        without_fsync(patch)
        for name, value in {"WINDOW": 2, "SMALL": 0.9, "AGAIN": 0.95, "REST": 2}.items():
            patch.setattr(choose_frozen, name, value)
        w = world(tmp_path_factory.mktemp("auto"), f"{config_text('feddyn', rounds=ROUNDS)}\n[train]\n{AUTO}\n")
        start(w, "d0", "d1", "d2", shift=0.3)
        assert w.pump(lambda: finished(w) and settled(w))
        return w


@pytest.mark.slow
def test_arrays_are_frozen_probed_and_the_duals_stay_right(ended: World) -> None:
    found = arrays(ended)
    assert found[1] == (set(), "none at rest")
    assert any(frozen for frozen, _ in found.values())
    assert any(reason.startswith("a probe of all arrays") and not frozen for frozen, reason in found.values())
    check_duals(ended, feedback=True)
    moves = {row.round: set(row.moves) for row in ended.server.ledger.rows(RoundArrays)}
    every = moves[1]
    assert len(every) == 4
    assert all(moves[number] == every - frozen for number, (frozen, _) in found.items())


@pytest.mark.slow
def test_a_restart_in_the_middle_of_every_round_trains_the_same_arrays(tmp_path: Path, ended: World) -> None:
    w = world(tmp_path, f"{config_text('feddyn', rounds=ROUNDS)}\n[train]\n{AUTO}\n")
    start(w, "d0", "d1", "d2", shift=0.3)
    for number in range(1, ROUNDS + 1):
        assert w.pump(partial(is_open, w, number))
        before = w.server.open.arrays
        w.kill_server()
        w.start_server()
        assert w.pump(lambda: w.server.open is not None)
        assert w.server.open.arrays == before
    assert w.pump(lambda: finished(w))
    assert arrays(w) == arrays(ended)
    w.close()


def test_rounds_explain_says_what_rests_and_why(ended: World, capsys: pytest.CaptureFixture[str]) -> None:
    commands.rounds(ended.fleet.folder, explain=True)
    lines = capsys.readouterr().out.splitlines()
    heads = [line.split() for line in lines].index(["round", "frozen", "why"])
    assert lines[heads + 1].split(maxsplit=2) == ["1", "none", "none at rest"]
    assert any("came to rest, by the share of their largest move" in line for line in lines[heads:])
    commands.rounds(ended.fleet.folder, explain=True, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert {row["round"]: (set(row["arrays"]["frozen"]), row["arrays"]["reason"]) for row in rows} == arrays(ended)
    assert all(row["arrays"]["moves"] for row in rows)


def test_the_reports_have_the_arrays_of_the_rounds(ended: World) -> None:
    data = outcome.of_fleet(ended.fleet.folder)
    assert result.validate(data) == []
    assert data["rounds"][0]["arrays"]["frozen"] == []
    page = html_report.render(data, title="t")
    assert "<h2>Arrays</h2>" in page
    table = terminal_view.closing_table(result.parse(data))
    frozen = [len(one) for one, _ in arrays(ended).values() if one]
    assert f"arrays   {len(frozen)} of {ROUNDS} rounds trained a part, {min(frozen)} to {max(frozen)} arrays" in table


def test_a_fleet_that_trains_everything_has_no_rows_and_no_section(fleet: Callable[..., World]) -> None:
    w = fleet("", rounds=1)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: finished(w))
    assert w.server.ledger.rows(RoundArrays) == []
    data = outcome.of_fleet(w.fleet.folder)
    assert "arrays" not in data["rounds"][0]
    assert "<h2>Arrays</h2>" not in html_report.render(data, title="t")
    assert "arrays" not in terminal_view.closing_table(result.parse(data))


def test_a_round_opened_for_a_part_that_closes_with_everything_is_booked_so(fleet: Callable[..., World]) -> None:
    w = fleet(HEAD, rounds=2)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: is_open(w, 2))
    w.kill_server()
    text = w.fleet.folder / "fleet.toml"
    text.write_text(text.read_text().replace(HEAD, ""))
    w.start_server()
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert arrays(w) == {1: ({"body/layers.0.weight", "body/layers.0.bias"}, ""), 2: (set(), "")}
    assert w.server.checkpoint.moving.everything


@pytest.mark.slow
def test_a_fleet_trains_all_but_the_adapters_and_then_adapters_alone(tmp_path: Path) -> None:
    text = config_text("fedavg", rounds=2).replace("hidden = [6]", "hidden = [6]\nadapter = 2")
    w = world(tmp_path, f'{text}\n[train]\nonly = ["*.base.*", "head.*"]\n')
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: finished(w) and settled(w))
    before = weights(w, "d0")
    assert not np.frombuffer(before["body/layers.0.adapter.up.weight"], np.float32).any()
    w.kill_server()
    path = w.fleet.folder / "fleet.toml"
    later = path.read_text().replace('["*.base.*", "head.*"]', '["*.adapter.*"]')
    path.write_text(later.replace("rounds = 2", "rounds = 4"))
    w.start_server()
    assert w.pump(lambda: w.closed() == 4 and finished(w) and settled(w), tick_s=TICK_S)
    after = weights(w, "d0")
    assert np.frombuffer(after["body/layers.0.adapter.up.weight"], np.float32).any()
    served = storage.flatten(w.agents["d0"].service.slots.weights().params)
    model = storage.flatten(w.server.checkpoint.state.model)
    for name in ("body/layers.0.base.weight", "head/head.weight"):
        published = np.frombuffer(after[name], np.float32)
        np.testing.assert_array_equal(published, model[name].astype(np.float32).ravel())
        np.testing.assert_array_equal(published, served[name].ravel())
    w.close()
