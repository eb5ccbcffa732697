"""The first fleet.toml of a fleet whose samples carry any number of labels, and what such a fleet cannot have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cloud_server.choices.first_settings import fleet_toml, load_data, wanted_outputs
from cloud_server.records.fleet_folder import method_of
from cloud_server.records.fleet_settings import FleetConfig
from fleet_core.base import config
from fleet_core.base.errors import ConfigError, DataError
from fleet_core.tasks.labels import MultiLabel


def text_of(folder: Path, method: str = "fedavg-meta") -> str:
    y = np.arange(20).reshape(10, 2) % 3 == 0
    np.savez(folder / "s.npz", x=np.ones((10, 4), np.float32), y=y, labels=np.array(["speech", "music"]))
    samples, spec = load_data(str(folder / "s.npz"), outputs=(), labels=True)
    return fleet_toml(samples, "f", method, "mlp", rounds=1, seed=0, spec=spec, labels=True)


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as told:
        method_of(config.parse(FleetConfig, text, "fleet.toml"), Path("fleet.toml"))
    return str(told.value)


def test_the_task_has_the_names_of_the_labels(tmp_path: Path) -> None:
    model = config.parse(FleetConfig, text_of(tmp_path), "fleet.toml").model
    assert model.classes == ()
    assert model.task == MultiLabel(("speech", "music"))


def test_a_task_without_a_kind_or_with_another_is_refused(tmp_path: Path) -> None:
    text = text_of(tmp_path)
    for changed, told in (('kind = "multilabel"', "model.task.kind: unknown value 'multilabel'"),
                          ("", "model.task.kind: missing, expected one of anomaly, multi-label, regression")):
        with pytest.raises(ConfigError, match=told):
            config.parse(FleetConfig, text.replace('kind = "multi-label"', changed), "fleet.toml")
    with pytest.raises(DataError, match="the labels are"):
        config.parse(FleetConfig, text.replace('outputs = ["speech", "music"]', "outputs = []"), "fleet.toml")


def test_methods_and_settings_that_need_classes_are_refused(tmp_path: Path) -> None:
    for method in ("pfldyn-proto", "knn-per", "pfedgp", "fedproto"):
        told = refused(text_of(tmp_path, method))
        assert f"fleet.method: {method} cannot learn multi-label" in told
        assert "fedavg-meta" in told.partition("expected one of ")[2]
    told = refused(text_of(tmp_path).replace("roll_back = 0.0", "roll_back = 0.1"))
    assert "robust.roll_back: needs accuracies, and a fleet of multi-label has none" in told


def test_the_options_of_init_name_labels_only_for_labels() -> None:
    assert wanted_outputs("multi-label", None, None) == ()
    assert wanted_outputs("multi-label", None, None, "speech, music") == ("speech", "music")
    for options, message in (
        (("classes", None, None, "speech"), r"--labels are those of .*\nhint: --task multi-label"),
        (("regression", None, None, "speech"), "--labels are those of"),
        (("multi-label", "speech", None), "--outputs and --loss are for numbers to predict"),
        (("multi-label", None, "huber"), "--outputs and --loss are for numbers to predict"),
    ):
        with pytest.raises(ConfigError, match=message):
            wanted_outputs(*options)


def test_a_named_set_has_one_class_for_each_sample() -> None:
    with pytest.raises(DataError, match=r"heartbeat: is a named set(.|\n)*leave out --task multi-label"):
        load_data("heartbeat", outputs=(), labels=True)
