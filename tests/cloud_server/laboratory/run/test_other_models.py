"""A run evaluated under the server's model, a running mean, and the mean of every device's latest model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan.experiment import KINDS, LATEST, RUNNING, SERVER
from cloud_server.laboratory.run.engine import MODELS, Engine, Stopped
from cloud_server.laboratory.run.other_models import OtherModels
from cloud_server.laboratory.run.run_folder import OTHER_MODELS, Store
from fleet_core.algorithms.interface import Payload, ServerState, Update
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.errors import ConfigError
from tests.support import lab

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

ASKED: dict[str, Any] = {"evaluation": {"every": 2, "models": list(KINDS)}}


def tree(value: float) -> dict[str, dict[str, Any]]:
    return {"body": {"w": np.array([value])}}


def update(device: str, change: float) -> Update:
    return Update(device, Payload(tree(change)), 5)


def kept(folder: Path, method: str = "p-avg-proto", **hyper: Any) -> OtherModels:
    row = METHODS[method]
    return OtherModels(KINDS, row, row.hyper(**hyper), folder, ("a", "b", "c", "d"), tree(8.0))


def values(models: OtherModels, number: int) -> dict[str, float]:
    state = ServerState(model=tree(-1.0), served=tree(0.0))
    return {kind: float(one["body"]["w"][0]) for kind, one in models.weights(number, state).items()}


def test_the_three_models_are_what_their_names_say(tmp_path: Path) -> None:
    models = kept(tmp_path)
    models.close(1, tree(8.0), [update("a", -4.0), update("b", -8.0)], ())
    assert values(models, 1) == {SERVER: -1.0, RUNNING: 8 + (2 - 8) / 2, LATEST: (4 + 0 + 8 + 8) / 4}
    models.close(2, tree(2.0), [update("a", 1.0), update("c", 1e9)], ("c",))
    assert values(models, 2) == {SERVER: -1.0, RUNNING: 5 + (3 - 5) / 4, LATEST: (3 + 0 + 8 + 8) / 4}


def test_what_a_killed_run_wrote_for_a_round_that_does_not_count_is_dropped(tmp_path: Path) -> None:
    models = kept(tmp_path)
    models.close(1, tree(8.0), [update("a", -4.0)], ())
    models.saved(1)
    before = values(models, 1)
    models.close(2, tree(8.0), [update("a", 50.0)], ())
    again = kept(tmp_path)
    again.resume(1)
    assert values(again, 2) == values(again, 1) == before


@pytest.mark.parametrize(("method", "hyper"), [("fedmeta-maml", {}), ("fedproto", {}), ("local", {})])
def test_where_no_device_sends_a_change_of_the_model_there_is_at_most_the_server_s(
    tmp_path: Path, method: str, hyper: dict[str, Any]
) -> None:
    models = kept(tmp_path, method, **hyper)
    models.close(1, tree(8.0), [update("a", -4.0)], ())
    assert set(models.weights(1, ServerState(model={"body": {}, "head": {}}, served={}))) <= {SERVER}


@pytest.mark.parametrize("method", ["pfldyn-proto", "pflscaf-proto"])
def test_the_served_model_of_pfldyn_and_pflscaf_is_the_running_mean(tmp_path: Path, method: str) -> None:
    asked = lab.experiment(lab.recordings(tmp_path / "all.npz"), method, **ASKED)
    rows = lab.run_first(asked, tmp_path / "run").rounds()
    evaluated = [row for row in rows if MODELS in row]
    assert [row["round"] for row in evaluated] == [2, 4]
    for row in evaluated:
        assert set(row[MODELS]) == set(KINDS)
        assert row[MODELS][RUNNING]["accuracy"] == row["accuracy"]
    assert any(row[MODELS][SERVER]["devices"] != row["devices"] or row[MODELS][LATEST]["devices"] != row["devices"]
               for row in evaluated)
    Store(tmp_path / "run").forget_clients()
    assert not (tmp_path / "run" / OTHER_MODELS).exists()


def test_a_run_that_goes_on_evaluates_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    asked = lab.experiment(lab.recordings(tmp_path / "all.npz"), "p-avg-proto", **ASKED)
    whole = [row.get(MODELS) for row in lab.run_first(asked, tmp_path / "whole").rounds()]
    run, store, asked_so_far = experiments.runs(asked)[0], Store(tmp_path / "parts"), [0]

    def stop_once() -> bool:
        asked_so_far[0] += 1
        return asked_so_far[0] == 4

    with store.begun({"run": run.name}), pytest.raises(Stopped):
        Engine(lab.laboratory(asked, run, tmp_path / "parts", stopped=stop_once), run, store).run()
    with store.begun({"run": run.name}):
        Engine(lab.laboratory(asked, run, tmp_path / "parts"), run, store).run()
    assert [row.get(MODELS) for row in store.rounds()] == whole


def test_an_unknown_kind_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown value 'newest'"):
        lab.experiment(tmp_path, "p-avg-proto", evaluation={"models": ["newest"]})
