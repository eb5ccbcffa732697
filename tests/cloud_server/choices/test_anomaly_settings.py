"""``metafleet init --task anomaly``: the task of quiet samples, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cloud_server.choices import first_settings
from cloud_server.choices.first_settings import anomaly_task, fleet_toml, load_data
from cloud_server.records.fleet_settings import FleetConfig
from fleet_core.base import config
from fleet_core.base.errors import ConfigError, DataError
from fleet_core.tasks.anomaly import Anomaly


def table(path: Path, labels: bool = False) -> str:
    """80 readings, 50 a second; of every four windows of ten the last is labelled ``bad``."""
    names = ["bad" if k // 10 % 4 == 3 else "N" for k in range(80)]
    rows = "".join(f"{k / 50},{k % 10}" + f",{names[k]}" * labels + "\n" for k in range(80))
    path.write_text("time,a" + ",label" * labels + "\n" + rows)
    return str(path)


def test_the_task_knows_the_samples_width_and_the_time_between_them(tmp_path: Path) -> None:
    samples, spec = load_data(table(tmp_path / "s.csv"), window=10, normal=())
    assert anomaly_task(samples, spec, (), 20.0) == Anomaly(10, false_alarms_per_day=20.0, seconds=0.2)
    samples, spec = load_data(table(tmp_path / "s.csv"), window=10, stride=5, rate=50, normal=())
    assert anomaly_task(samples, spec, (), None) == Anomaly(10, seconds=0.1)


def test_only_quiet_samples_define_a_fleet(tmp_path: Path) -> None:
    samples, _ = load_data(table(tmp_path / "s.csv", labels=True), window=10, normal=("N",))
    assert len(samples) == 6
    with pytest.raises(DataError, match="has no quiet samples: no label is M"):
        load_data(str(tmp_path / "s.csv"), window=10, normal=("M",))
    with pytest.raises(DataError, match="has no quiet samples: it has labels"):
        load_data(str(tmp_path / "s.csv"), window=10, normal=())


def test_the_first_settings_are_those_of_a_model_that_repeats(tmp_path: Path) -> None:
    samples, spec = load_data(table(tmp_path / "s.csv"), window=10, normal=())
    task = anomaly_task(samples, spec, (), None)
    for method, rates in (("fedavg-meta", first_settings.REPEATING_RATES), ("fedavg", {"client_lr": 0.5})):
        text = fleet_toml(samples, "t", method, None, rounds=2, seed=0, spec=spec, quiet=task)
        read = config.parse(FleetConfig, text, "fleet.toml")
        assert (read.model.name, read.model.classes, read.model.task) == ("mlp", (), task)
        assert read.model.options == {"hidden": [64, 8, 64], "activation": "elu"}
        assert {name: read.hyper[name] for name in rates} == rates


def test_what_cannot_be_repeated_or_counted_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "wide.npz", x=np.zeros((4, 5000), np.float32))
    with pytest.raises(DataError, match="samples of 5000 numbers are too large to be repeated; expected at most 4096"):
        anomaly_task(*load_data(str(tmp_path / "wide.npz"), normal=()), (), None)
    with pytest.raises(DataError, match="is a named set, which has classes; expected a file of quiet samples"):
        load_data("heartbeat", normal=())
    np.savez(tmp_path / "s.npz", x=np.zeros((4, 5), np.float32))
    samples, spec = load_data(str(tmp_path / "s.npz"), normal=())
    with pytest.raises(DataError, match="has no times, so false alarms a day cannot be counted"):
        anomaly_task(samples, spec, (), 1.0)
    for normal, per_day in (("N", None), (None, 1.0)):
        with pytest.raises(ConfigError, match="--normal and --false-alarms are for anomalies"):
            first_settings.wanted_outputs("classes", None, None, normal=normal, per_day=per_day)
