"""How raw samples become a model's input when nothing is configured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.choices.first_settings import fleet_toml, load_data
from cloud_server.records.fleet_settings import FleetConfig
from edge_agent.device.local_samples import LocalData
from fleet_core.base import config
from fleet_core.base.errors import DataError
from fleet_core.data import heartbeat, model_input, time_split
from fleet_core.data.samples import Samples
from fleet_core.data.sets.registry import entries
from fleet_core.model.layout import InputSpec


def samples(x: Any) -> Samples:
    return Samples(np.asarray(x), np.zeros(len(x), np.int64))


def test_every_channel_is_standardized_and_a_constant_one_only_centred() -> None:
    found = model_input.standardized(np.array([[[0, 2], [5, 5]], [[4, 6], [5, 5]]], np.float32))
    assert found == InputSpec((2, 2), "float32", 1.0, (3.0, 5.0), (2.23606798, 1.0))


@pytest.mark.parametrize(("offset", "unit"), [(0.0, 1e-9), (101_325.0, 3.0), (-1e6, 40.0), (0.0, 1e20)])
def test_channels_of_any_unit_are_standardized(offset: float, unit: float) -> None:
    x = (offset + unit * np.random.default_rng(0).normal(size=(500, 2))).astype(np.float32)
    found = model_input.standardized(x)
    scaled = (x.astype(np.float64) - found.mean) / found.std
    np.testing.assert_allclose([scaled.mean(0), scaled.std(0)], [[0, 0], [1, 1]], atol=1e-3)


@pytest.mark.parametrize(
    ("x", "scale"),
    [
        (np.zeros((2, 3, 4), np.uint8), 1 / 255),
        (np.zeros((2, 8), np.int64), 1.0),
        (np.zeros((2, model_input.MAX_CHANNELS + 1), np.float32), 1.0),
    ],
)
def test_bytes_tokens_and_many_channels_are_taken_as_they_are(x: Any, scale: float) -> None:
    assert model_input.standardized(x) == InputSpec(x.shape[1:], x.dtype.name, scale)


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ((32, 32, 3), "uint8", "images of 32 channels, 32 by 3 pixels"),
        ((28, 28, 1), "float32", "images of 28 channels, 28 by 1 pixels"),
        ((3, 32, 32), "uint8", None),
        ((1, 28, 28), "uint8", None),
        ((3, 3, 3), "float32", None),
        ((128, 9), "float32", "series of 128 channels and 9 steps"),
        ((9, 128), "float32", None),
        ((20,), "int64", "text"),
        ((20,), "float32", None),
    ],
)
def test_what_a_person_may_not_have_meant_is_reported(shape: tuple[int, ...], dtype: str, said: str | None) -> None:
    found = model_input.remarks(np.zeros((2, *shape), dtype))
    assert (found == []) if said is None else (len(found) == 1 and f"x is read as {said}" in found[0])


def test_a_fleet_standardizes_a_files_readings_and_takes_a_named_set_as_is_recommended(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 4096, (40, 5)).astype(np.int16)
    np.savez(tmp_path / "adc.npz", x=x, y=np.array(["off", "on"])[np.arange(40) % 2])
    lines: list[str] = []
    samples, spec = load_data(str(tmp_path / "adc.npz"), lines.append)
    assert lines == []
    assert (spec.dtype, spec.shape) == ("float32", (5,))
    np.testing.assert_allclose((x - np.array(spec.mean)).std(0) / spec.std, 1, rtol=1e-4)
    text = fleet_toml(samples, "f", "fedavg", None, rounds=1, seed=0, spec=spec)
    made = config.parse(FleetConfig, text, "fleet.toml")
    assert (made.model.name, made.model.input) == ("mlp", spec)
    assert load_data("heartbeat")[1] == entries()["heartbeat"].input_spec
    np.savez(tmp_path / "late.npz", x=np.zeros((4, 128, 3)), y=np.array(["off", "on"])[np.arange(4) % 2])
    load_data(str(tmp_path / "late.npz"), lines.append)
    assert lines == model_input.remarks(np.zeros((4, 128, 3)))


def test_heart_beats_are_standardized_by_what_the_demos_training_patients_learn_from() -> None:
    everything = heartbeat.load_heartbeat()
    rows = np.isin(np.asarray(everything.client), heartbeat.DEVICES)
    found = model_input.standardized(time_split.by_time(everything.take(rows), 0.6)[0].x)
    for name in ("heartbeat", "heartbeat-22"):
        spec = entries()[name].input_spec
        np.testing.assert_allclose([spec.mean, spec.std], [found.mean, found.std], atol=1e-4)


def test_a_device_reads_whole_numbers_as_its_fleets_readings(tmp_path: Path) -> None:
    """Although all are below the number of classes, which would make a new fleet read them as text."""
    path = tmp_path / "samples.npz"
    np.savez(path, x=np.ones((10, 3), np.int16), y=np.arange(10) % 2)
    data = LocalData(path, ("off", "on"), "float32")
    assert data.every().x.dtype == np.float32
    data.add(np.full((1, 3), 0.5, np.float32), ["on"])
    assert (str(data.own().x.dtype), len(data.own())) == ("float32", 7)
    tokens = LocalData(path, ("off", "on"), "int64")
    assert tokens.every().x.dtype == np.int64


def test_added_tokens_stay_tokens_though_they_are_more_than_the_classes(tmp_path: Path) -> None:
    """A model's vocabulary may be larger than its classes."""
    data = LocalData(tmp_path / "samples.npz", ("off", "on"), "int64")
    for _ in range(2):
        data.add(np.full((1, 3), 7, np.int64), ["on"])
    assert (str(data.every().x.dtype), len(data.every())) == ("int64", 2)


def test_samples_whose_classes_have_no_names_are_refused_with_what_is_missing(tmp_path: Path) -> None:
    np.savez(tmp_path / "bare.npz", x=np.ones((4, 3)), y=[0, 1, 2, 1])
    said = r"bare\.npz: names no classes; expected an array 'classes' with 3 or more names"
    with pytest.raises(DataError, match=said):
        load_data(str(tmp_path / "bare.npz"))


def test_a_file_of_another_name_beside_the_missing_samples_is_named(tmp_path: Path) -> None:
    data = LocalData(tmp_path / "samples.npz", ("off", "on"), "float32")
    with pytest.raises(DataError) as refused:
        data.every()
    assert refused.value.hint == "edge-agent samples add"
    with pytest.raises(DataError, match="no samples yet"):
        LocalData(tmp_path / "nowhere" / "samples.npz", ("off", "on"), "float32").every()
    (tmp_path / "greenhouse.csv").write_text("label,a\noff,1\n")
    with pytest.raises(DataError) as refused:
        data.every()
    assert refused.value.hint == 'edge-agent samples add, or samples = "greenhouse.csv" under [data] in device.toml'


@pytest.mark.parametrize(
    ("x", "spec", "warned"),
    [
        (np.full((2, 3), 2048, np.float32), {}, True),
        (np.full((2, 3), 2048, np.float32), {"scale": 1 / 4096}, False),
        (np.full((2, 3), 2048, np.float32), {"mean": (2048.0,) * 3, "std": (1.0,) * 3}, False),
        (np.array([[-50], [50]], np.float32), {}, True),
        (np.array([[-1], [3]], np.float32), {}, False),
        (np.full((2, 3), 200, np.uint8), {}, False),
    ],
)
def test_an_experiment_warns_of_readings_that_are_far_from_one(x: Any, spec: dict[str, Any], warned: bool) -> None:
    found = model_input.unscaled(x, InputSpec(x.shape[1:], x.dtype.name, **spec))
    assert (len(found) == 1 and "data.standardize" in found[0]) if warned else found == []
