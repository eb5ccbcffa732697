"""The first fleet.toml of a fleet that predicts numbers, and what such a fleet cannot have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cloud_server.choices.first_settings import fleet_toml, load_data, wanted_outputs
from cloud_server.records.fleet_folder import method_of
from cloud_server.records.fleet_settings import FleetConfig
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import config
from fleet_core.base.errors import ConfigError, DataError
from fleet_core.tasks.regression import Regression


def text_of(folder: Path, method: str = "fedavg-meta", loss: str | None = None) -> str:
    y = np.stack([np.arange(10.0), np.full(10, 3.0)], 1)
    np.savez(folder / "s.npz", x=np.ones((10, 4), np.float32), y=y, outputs=np.array(["speed", "load"]))
    samples, spec = load_data(str(folder / "s.npz"), outputs=())
    return fleet_toml(samples, "f", method, "mlp", rounds=1, seed=0, spec=spec, loss=loss)


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as told:
        method_of(config.parse(FleetConfig, text, "fleet.toml"), Path("fleet.toml"))
    return str(told.value)


def test_the_task_has_names_mean_and_deviation_of_the_file(tmp_path: Path) -> None:
    model = config.parse(FleetConfig, text_of(tmp_path, loss="squared"), "fleet.toml").model
    assert model.classes == ()
    assert isinstance(model.task, Regression)
    assert (model.task.outputs, model.task.mean, model.task.loss) == (("speed", "load"), (4.5, 3.0), "squared")
    assert model.task.deviation[0] == pytest.approx(np.arange(10).std())
    assert model.task.deviation[1] == 1.0


def test_a_method_that_needs_classes_is_refused_with_those_that_do_not(tmp_path: Path) -> None:
    told = refused(text_of(tmp_path, "pfldyn-proto"))
    assert "fleet.method: pfldyn-proto cannot learn regression: it compares samples with those of each class" in told
    able = told.partition("expected one of ")[2].split(", ")
    assert {"fedavg", "fedavg-meta", "pfldyn-maml", "pfedme", "per-fedavg-fo"} <= set(able)
    assert not any(METHODS[name].needs_classes for name in able)


def test_settings_that_need_accuracies_are_refused(tmp_path: Path) -> None:
    text = text_of(tmp_path).replace("roll_back = 0.0", "roll_back = 0.1")
    told = refused(text + "\n[budget]\ntarget_accuracy = 0.9\npatience = 2\n")
    for key in ("robust.roll_back", "budget.target_accuracy", "budget.patience"):
        assert f"{key}: needs accuracies, and a fleet of regression has none" in told


def test_a_model_has_classes_or_a_task(tmp_path: Path) -> None:
    assert "model.classes: a model of regression has no classes" in refused(
        text_of(tmp_path).replace("classes = []", 'classes = ["a"]'))


def test_the_options_of_init_name_outputs_only_for_numbers() -> None:
    assert wanted_outputs("classes", None, None) is None
    assert wanted_outputs("regression", None, None) == ()
    assert wanted_outputs("regression", "speed, load", "huber") == ("speed", "load")
    for options, message in (
        (("classes", "speed", None), "are for numbers to predict"), (("regresion", None, None), "is not a task"),
        (("regression", None, "l1"), "--loss: 'l1' is not a loss; expected huber or squared"),
    ):
        with pytest.raises(ConfigError, match=message):
            wanted_outputs(*options)


def test_a_named_set_has_classes() -> None:
    with pytest.raises(DataError, match="heartbeat: is a named set, which has classes"):
        load_data("heartbeat", outputs=())
