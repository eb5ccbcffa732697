"""What papers do and a fleet does not: devices that train and are not averaged, a step on the test samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload
from cloud_server.laboratory.run.simulate import Options, simulate
from fleet_core.base import storage
from fleet_core.base.errors import ConfigError
from fleet_core.learning import local_training, models
from fleet_core.protocol import cohort
from tests.support import lab

PFEDME = {"local_steps": 3, "batch": 12, "personal_lr": 0.05}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return lab.recordings(tmp_path / "all.npz")


@pytest.mark.slow
def test_devices_that_train_and_are_not_averaged_do_not_move_the_model(data: Path) -> None:
    few = lab.run_first(lab.experiment(data, "pfedme", PFEDME, cohort=2), data.parent / "few")
    all_train = lab.experiment(data, "pfedme", PFEDME, cohort=0, averaged=2)
    many = lab.run_first(all_train, data.parent / "many")
    assert lab.server_state(few) == lab.server_state(many)


def test_every_device_that_trains_keeps_its_personal_model_of_that_round(data: Path) -> None:
    asked = {averaged: lab.experiment(data, "pfedme", PFEDME, cohort=0, averaged=averaged, budget={"rounds": 1})
             for averaged in (0, 1)}
    stores = {averaged: lab.run_first(one, data.parent / str(averaged)) for averaged, one in asked.items()}
    for name in ("d0", "d1", "d2"):
        assert lab.device_state(stores[1], name)
        assert lab.device_state(stores[1], name) == lab.device_state(stores[0], name)


def test_who_is_not_averaged_receives_a_model_and_sends_none(data: Path) -> None:
    asked = lab.experiment(data, "pfedme", PFEDME, cohort=0, averaged=2)
    row = lab.run_first(asked, data.parent / "run").rounds()[0]
    size = row["payload_bytes"]["down"] / 3
    assert (row["participants"], row["models_transmitted"]) == (3, 5)
    assert row["payload_bytes"] == {"down": 3 * size, "up": 2 * size}


@pytest.mark.parametrize("method", ["pfldyn-proto", "scaffold"])
def test_a_state_that_moves_with_what_is_averaged_is_kept_by_nobody_else(data: Path, method: str) -> None:
    with pytest.raises(ConfigError, match=r"averaged: .* which needs every update to be averaged"):
        lab.experiment(data, method, {}, cohort=0, averaged=2)


def test_no_more_are_averaged_than_are_asked(data: Path) -> None:
    with pytest.raises(ConfigError, match="more than the cohort of 2"):
        lab.experiment(data, "fedavg", {}, cohort=2, averaged=3)


def test_a_personal_model_of_the_last_round_answers_as_it_is(data: Path) -> None:
    hyper = {**PFEDME, "answer": "last"}
    asked = lab.experiment(data, "pfedme", hyper, cohort=1, budget={"rounds": 2}, evaluation={"every": 0})
    store, work = lab.run_first(asked, data.parent / "run"), workload.build(asked)
    layout = workload.layout_of(asked, work)
    trained = {name for number in (1, 2) for name in cohort.select(0, number, work.names, 1)}
    assert trained != set(work.names)
    for share in work.train:
        later = work.later(share)
        state = store.clients.load(share.name, 2)
        assert bool(state) == (share.name in trained)
        if state:
            logits = local_training.predict_logits(models.build(layout), state["personal"], later.x)
            right = (logits.argmax(1) == later.y).mean()
            assert store.rounds()[-1]["devices"][share.name] == pytest.approx(right)


def test_both_ways_to_take_the_step_are_evaluated_in_one_run(data: Path) -> None:
    hyper = {**lab.EPISODES, "inner_lr": 0.7}
    evaluates = {"own": {}, "theirs": {"test_step": True}, "both": {"also_test_step": True}}
    rows = {
        name: lab.run_first(lab.experiment(data, "per-fedavg-fo", hyper, evaluation={"every": 0, **evaluation}),
                     data.parent / name).rounds()[-1]
        for name, evaluation in evaluates.items()
    }
    assert rows["both"]["devices"] == rows["own"]["devices"]
    assert rows["both"]["test_step"]["devices"] == rows["theirs"]["devices"]
    assert rows["both"]["test_step"]["accuracy"] == rows["theirs"]["accuracy"]
    assert rows["own"]["devices"] != rows["theirs"]["devices"]


def test_a_run_that_is_older_than_a_key_continues_where_the_key_has_its_default(data: Path) -> None:
    asked, out = lab.experiment(data, "pfedme", PFEDME), data.parent / "out"
    simulate(asked, out, Options(jobs=1, device="cpu"))
    run = out / experiments.runs(asked)[0].name
    for path, tables in ((run / "run.json", ("experiment", "hyper")), (out / "experiment.json", ())):
        kept = json.loads(path.read_text())
        (kept[tables[0]] if tables else kept).pop("averaged")
        for table in tables[1:]:
            kept[table].pop("answer")
        storage.write_json(path, kept)
    simulate(asked, out, Options(jobs=1, device="cpu"))
    with pytest.raises(ConfigError, match="holds another experiment: averaged differ"):
        simulate(lab.experiment(data, "pfedme", PFEDME, averaged=1), out, Options(jobs=1, device="cpu"))
    last = {**PFEDME, "answer": "last"}
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        simulate(lab.experiment(data, "pfedme", last), out, Options(jobs=1, device="cpu"))


def test_features_are_standardized_over_all_samples_where_that_is_asked(data: Path) -> None:
    found = workload.build(lab.experiment(data, data={"path": str(data), "standardize": True}))
    plain = workload.build(lab.experiment(data))
    mean, deviation = plain.samples.x.mean(0), plain.samples.x.std(0)
    assert np.allclose(found.samples.x, (plain.samples.x - mean) / (deviation + 1e-3), atol=1e-5)
    assert (found.spec.scale, found.spec.mean) == (1.0, ())
    assert found.samples.x.dtype == np.float32


@pytest.mark.parametrize("side_by_side", [1, 16])
def test_bfloat16_moves_the_model_nearly_as_float32_and_both_keep_float32(data: Path, side_by_side: int) -> None:
    weights = {}
    for precision in ("float32", "bfloat16"):
        asked = lab.experiment(data, "per-fedavg-exact", {**lab.EPISODES, "inner_lr": 0.05}, precision=precision)
        store = lab.run_first(asked, data.parent / f"{precision}-{side_by_side}", side_by_side=side_by_side)
        path = sorted((store.folder / "state").glob("round-*"))[-1]
        found = storage.unpack(path.read_bytes())[0]
        weights[precision] = {name: array for name, array in found.items() if name.startswith("model")}
        assert weights[precision]
        assert not any(array.dtype.name == "bfloat16" for array in found.values())
    away = [float(np.abs(weights["bfloat16"][name] - weights["float32"][name]).max()) for name in weights["float32"]]
    assert 0 < max(away) < 0.02
