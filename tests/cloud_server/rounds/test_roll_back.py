"""Training goes back to an earlier served model: by hand, and when devices lose accuracy."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cloud_server.commands import server as commands
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device, Evaluation, Round
from cloud_server.records.checkpoint import served_rounds
from cloud_server.results.accuracy_drop import better_round, newest_evaluated
from cloud_server.rounds.decide_roll_back import FACT
from fleet_core.base import trees
from fleet_core.base.errors import StateError
from fleet_core.base.trees import Params
from fleet_core.link.loopback import LoopbackBroker
from tests.support import deaths, liars
from tests.support.deaths import Death, deadly
from tests.support.inprocess import World, without_fsync
from tests.support.liars import lie
from tests.support.world_checks import check_duals, opened, settled

DEVICES, ROUNDS = 5, 8


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fsync(monkeypatch)


def started(folder: Path, robust: str = "", *, method: str = "pfldyn-proto") -> World:
    return liars.started(folder, robust, devices=DEVICES, fewest=DEVICES, rounds=ROUNDS, method=method,
                         link="max_update_norm = 1e6", every=2)


def closed(w: World, number: int) -> bool:
    return w.closed() >= number and settled(w)


def until_evaluated(w: World, number: int) -> None:
    assert w.pump(lambda: len(w.server.ledger.rows(Evaluation, round=number, stage="after")) == DEVICES)


def went_back(w: World) -> dict[str, object]:
    return dict(json.loads(w.server.ledger.fact(FACT) or "{}"))


def distance(left: Params, right: Params) -> float:
    return float(trees.norm(trees.subtract(left, right)))


@pytest.mark.parametrize("method", ["pfldyn-proto", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("pflscaf-proto", "fedavg-meta", "fedper")
)])
def test_an_operator_takes_training_back_to_an_earlier_served_model(tmp_path: Path, method: str) -> None:
    w = started(tmp_path, method=method)
    assert w.pump(partial(closed, w, 2))
    early = w.server.checkpoint.state.served
    assert w.pump(partial(closed, w, 5))
    assert served_rounds(w.fleet.folder / "state") == [2, 4]
    commands.roll_back(w.fleet.folder, to=2)
    number = w.closed()
    assert w.pump(lambda: bool(went_back(w)))
    back = went_back(w)
    assert (back["to"], back["why"]) == (2, "an operator asked for it")
    assert back["from"] in (number, number + 1), "the open round is completed before"
    assert w.logged("training continues from the model of round 2: an operator asked for it")
    assert distance(w.server.checkpoint.state.served, early) == 0.0
    assert w.server.served_round == back["from"], "what is served is the earlier model, under the last round's number"
    assert 4 not in served_rounds(w.fleet.folder / "state") or back["from"] == 4
    assert w.pump(partial(closed, w, ROUNDS)), "the run goes on to its end"
    w.close()


@pytest.mark.slow
def test_the_devices_of_a_dual_method_start_again_from_zero_with_the_server(tmp_path: Path) -> None:
    w = started(tmp_path)
    assert w.pump(partial(closed, w, 4))
    before = w.server.checkpoint.state.dual_epoch
    commands.roll_back(w.fleet.folder, to=2)
    assert w.pump(lambda: bool(went_back(w)))
    assert w.server.checkpoint.state.dual_epoch == before + 1
    assert float(trees.norm(w.server.checkpoint.state.memory["dual"])) == 0.0
    number = w.closed()
    assert w.pump(partial(closed, w, number + 1))
    check_duals(w, feedback=False)
    w.close()


@pytest.mark.slow
def test_a_request_outlives_the_aggregator_and_an_interrupted_round(tmp_path: Path) -> None:
    w = started(tmp_path)
    assert w.pump(partial(closed, w, 4))
    late = w.agents.pop("d4")
    assert w.pump(lambda: w.server.open is not None and len(w.server.open.received) == DEVICES - 1)
    w.kill_server()
    commands.roll_back(w.fleet.folder, to=2)
    w.agents["d4"] = late
    w.start_server()
    assert w.pump(lambda: bool(went_back(w)))
    assert went_back(w)["from"] == 5, "the interrupted round is closed first"
    assert w.server.ledger.requests() == {}
    assert w.pump(partial(closed, w, ROUNDS))
    w.close()


@pytest.mark.slow
def test_a_model_that_costs_the_devices_accuracy_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One device ruins the model where the bound is a constant; the devices' evaluations show it."""
    w = started(tmp_path, "roll_back = 0.1", method="fedavg-meta")
    until_evaluated(w, 2)
    good = np.mean([row.accuracy for row in w.server.ledger.rows(Evaluation, round=2, stage="before")])
    with monkeypatch.context() as patch:
        lie(patch, {"d2": -1000.0})
        assert w.pump(lambda: bool(went_back(w)))
    assert "the median device lost" in str(went_back(w)["why"])
    assert w.pump(partial(closed, w, ROUNDS))
    assert w.pump(lambda: len(w.server.ledger.rows(Evaluation, round=ROUNDS, stage="before")) == DEVICES)
    end = np.mean([row.accuracy for row in w.server.ledger.rows(Evaluation, round=ROUNDS, stage="before")])
    assert end > good - 0.1
    w.close()


@pytest.fixture
def worse(tmp_path: Path) -> World:
    """A paused fleet that has closed five rounds. Its devices say that the model of round 4 is worse."""
    w = started(tmp_path / "founded", "roll_back = 0.1", method="fedavg-meta")
    until_evaluated(w, 2)
    assert w.pump(lambda: opened(w, 5))
    w.server.ledger.request("paused", "yes")
    assert w.pump(lambda: w.closed() == 5)
    w.close()
    with Ledger(w.fleet.ledger_path) as ledger:
        for number, accuracy in ((2, 0.9), (4, 0.2)):
            evaluated(ledger, number, [accuracy] * DEVICES)
    return w


def rolled_back(worse: World, folder: Path, at: int | None, asked: bool) -> tuple[World, Death]:
    """The aggregator of a copy, without devices, until it has gone back; it dies at its ``at``-th act. asked: an
    operator asks for it, and nobody says that the model is worse."""
    shutil.copytree(worse.folder, folder)
    w = World(folder, replace(worse.fleet, folder=folder / "fleet"), LoopbackBroker())
    with Ledger(w.fleet.ledger_path) as ledger:
        if asked:
            evaluated(ledger, 4, [0.9] * DEVICES)
            ledger.request("roll_back", "2")
    death = Death("server", at, w)
    with pytest.MonkeyPatch.context() as patch:
        w.start_server()
        deadly(patch, death, facts=True)
        assert deaths.run(w, death, lambda: bool(went_back(w)) and not w.server.ledger.requests()), death.where
        deaths.run(w, death, lambda: False, steps=5)
    return w, death


@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True])
def test_an_aggregator_killed_at_any_act_between_decision_and_publication_goes_back_once_and_says_why(
    worse: World, tmp_path: Path, asked: bool
) -> None:
    w, undisturbed = rolled_back(worse, tmp_path / "whole", None, asked)
    wanted, good, told = w.server.checkpoint.state, w.server._parts.served.reference.model, went_back(w)
    assert (told["from"], told["to"]) == (5, 2)
    assert str(told["why"]).startswith("an operator" if asked else "with the one of round 4 the median device lost")
    assert undisturbed.points > 5
    w.close()
    for at in range(1, undisturbed.points + 1):
        w, death = rolled_back(worse, tmp_path / "killed", at, asked)
        assert death.where
        assert went_back(w) == told, death.where
        assert distance(w.server.checkpoint.state.model, wanted.model) == 0, death.where
        assert (w.server.served_round, w.server._parts.served.reference.model) == (5, good), death.where
        assert w.server.ledger.rows(Round, round=5)[0].served_id == good, death.where
        assert served_rounds(w.fleet.folder / "state") in ([2, 5], [2]), death.where
        w.close()
        shutil.rmtree(w.folder)


@pytest.mark.slow
def test_what_is_refused_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w = started(tmp_path)
    with pytest.raises(StateError, match="no earlier served model"):
        commands.roll_back(w.fleet.folder)
    until_evaluated(w, 2)
    assert w.pump(partial(closed, w, 4))
    w.close()
    with pytest.raises(StateError, match=r"round 3 is not kept.*2, 4"):
        commands.roll_back(w.fleet.folder, to=3)
    capsys.readouterr()
    commands.roll_back(w.fleet.folder, listed=True)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("round 2: accuracy ")
    assert first.endswith("on 5 devices")
    assert second == "round 4: not evaluated"
    commands.roll_back(w.fleet.folder, listed=True, as_json=True)
    assert [one["round"] for one in json.loads(capsys.readouterr().out)] == [2, 4]
    commands.roll_back(w.fleet.folder)
    assert "the model of round 2 when the aggregator runs" in capsys.readouterr().out


def evaluated(ledger: Ledger, number: int, accuracies: list[float]) -> None:
    if not ledger.rows(Round, round=number):
        ledger.put(Round(round=number, opened_at=1.0, status="closed"))
    for n, accuracy in enumerate(accuracies):
        ledger.put(Evaluation(round=number, device=f"d{n}", stage="after", method="fedavg", confusion=((1,),),
                              accuracy=accuracy, macro_f1=accuracy))


@pytest.mark.parametrize(("newest", "found"), [
    ([0.7] * 5, (2, pytest.approx(0.2))),
    ([0.9, 0.9, 0.9, 0.0, 0.0], None),  # two of five say so, and may be lying
    ([0.0, 0.0], None),  # too few have reported
    ([0.85] * 5, None),
])
def test_the_median_device_decides(
    tmp_path: Path, newest: list[float], found: tuple[int, float] | None
) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.put(*(Device(name=f"d{n}") for n in range(5)))
        evaluated(ledger, 1, [0.8] * 5)
        evaluated(ledger, 2, [0.9] * 5)
        evaluated(ledger, 3, newest)
        assert better_round(ledger, 3, [1, 2, 3], 0.1) == found


@pytest.mark.parametrize(("of_3", "newest"), [([], 2), ([0.9], 2), ([0.9] * 3, 3)])
def test_a_model_is_compared_though_a_newer_one_is_served_that_too_few_have_evaluated(
    tmp_path: Path, of_3: list[float], newest: int
) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.put(*(Device(name=f"d{n}") for n in range(5)))
        evaluated(ledger, 1, [0.9] * 5)
        assert newest_evaluated(ledger, [1]) is None, "there is no earlier one"
        evaluated(ledger, 2, [0.5] * 5)
        evaluated(ledger, 3, of_3)
        assert newest_evaluated(ledger, [1, 2, 3]) == newest


@pytest.mark.slow
def test_while_no_round_opens_the_ledger_is_asked_for_requests_alone(tmp_path: Path) -> None:
    w = started(tmp_path, "roll_back = 0.1", method="fedavg-meta")
    until_evaluated(w, 2)
    assert w.pump(partial(closed, w, ROUNDS))
    assert w.pump(lambda: len(w.server.ledger.rows(Evaluation, round=ROUNDS, stage="before")) == DEVICES)
    w.pump(lambda: False, steps=20)
    asked: list[str] = []
    w.server.ledger._db.set_trace_callback(asked.append)
    assert not w.pump(lambda: False, steps=200)
    w.server.ledger._db.set_trace_callback(None)
    assert {text for text in asked if text.startswith("SELECT")} == {"SELECT key, value FROM control ORDER BY key"}
    w.close()
