"""Samples that do not fit a fleet are refused with the way to convert them; recordings of readings on a device and for
a fleet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cloud_server.choices.first_settings import load_data
from cloud_server.commands import cli
from cloud_server.laboratory.advise.recordings import recordings
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload
from edge_agent.commands import device_commands
from edge_agent.device.local_samples import LocalData
from edge_agent.inference import relearn
from export.graph import export_graph
from fleet_core.base import trees
from fleet_core.base.errors import DataError
from fleet_core.data import model_input, unlabelled
from fleet_core.learning import models
from fleet_core.model.layout import InputSpec
from tests.fleet_core.data.test_windows import HEADER, SERIES, lines, readings
from tests.support import homes, lab


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "data.csv"
    path.write_text(text, encoding="utf-8")
    return path


# Shapes that do not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [
        ((5, 64, 3), (3, 64), "np.moveaxis(x, -1, 1)"),
        ((5, 28, 28, 3), (3, 28, 28), "np.moveaxis(x, -1, 1)"),
        ((64, 3), (3, 64), "np.moveaxis(x, -1, 0)[None]"),
        ((3, 64), (3, 64), "x[None]"),
        ((5, 192), (3, 64), "x.reshape(-1, 3, 64)"),
        ((5, 192), (3, 64), "a_0 … a_63 for each of 3 channels"),
        ((192,), (3, 64), "x.reshape(-1, 3, 64)"),
        ((5, 784), (1, 28, 28), "x.reshape(-1, 1, 28, 28)"),
        ((5, 28, 28), (1, 28, 28), "x.reshape(-1, 1, 28, 28)"),
        ((5, 3, 64), (192,), "x.reshape(-1, 192)"),
        ((5, 3, 32), (3, 64), "windows of 64 steps, not 32"),
        ((900, 3), (3, 64), "cut into windows of 64"),
        ((5, 3, 64), (3, 64), None),
        ((5, 4), (3,), None),
        ((), (3,), None),
        ((5, 4, 3, 5), (3, 4, 5), None),
    ],
)
def test_a_shape_that_does_not_fit_is_reported_with_the_way_to_convert_it(
    found: tuple[int, ...], wanted: tuple[int, ...], said: str | None
) -> None:
    hint = model_input.conversion(found, wanted)
    assert hint is None if said is None else said in (hint or "")


@pytest.mark.parametrize(("found", "wanted"), [
    ((5, 7, 3), (3, 7)), ((7, 3), (3, 7)), ((3, 7), (3, 7)), ((5, 21), (3, 7)), ((21,), (3, 7)), ((5, 4, 6), (1, 4, 6)),
    ((5, 3, 7), (21,)), ((5, 1, 21), (3, 7)), ((5, 4, 6, 3), (3, 4, 6)),
])  # fmt: skip
def test_the_way_that_is_told_gives_samples_that_fit(found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    hint = model_input.conversion(found, wanted)
    if hint is not None:
        parts = hint.replace(", if", ": ").split(": ")
        code = next(part for part in parts if part.startswith(("x[", "x.reshape", "np.")))
        made = eval(code, {"x": np.zeros(found), "np": np})
        assert made.shape[1:] == wanted


def test_a_file_of_training_samples_or_questions_that_does_not_fit_is_told_how(tmp_path: Path) -> None:
    path = tmp_path / "samples.npz"
    np.savez(path, x=np.zeros((4, 3, 2)), y=["on", "off"] * 2)
    data = LocalData(path, ("off", "on"), "float32", shape=(2, 3))
    for ask in (data.own, data.held_back, lambda: unlabelled.load(path, SERIES)):
        with pytest.raises(DataError, match=r"has shape \[4, 3, 2\]; expected \[n, 2, 3\]") as told:
            ask()
        assert "hint: channels come first: np.moveaxis(x, -1, 1)" in str(told.value)
        assert "samples.npz" in str(told.value)


@pytest.mark.parametrize("name", ["bytes.npz", "bytes.npy"])
def test_bytes_are_refused_where_the_fleet_has_floats(tmp_path: Path, name: str) -> None:
    x = np.zeros((4, 2, 3), np.uint8)
    if name.endswith("z"):
        np.savez(tmp_path / name, x=x, y=["on", "off"] * 2)
        with pytest.raises(DataError, match=r"has uint8 values, and the model takes float32\nhint: .*astype"):
            LocalData(tmp_path / name, ("off", "on"), "float32", shape=(2, 3)).own()
    else:
        np.save(tmp_path / name, x)
    with pytest.raises(DataError, match=r"has bytes, and the model takes float32\nhint: .*astype"):
        unlabelled.load(tmp_path / name, SERIES)
    assert len(unlabelled.load(tmp_path / name, InputSpec((2, 3), "uint8"))) == 4


# On a device and for a fleet ------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A device of a fleet with windows [2, 3], with a served model and a recording of readings."""
    layout = models.describe("mlp", InputSpec((2, 3)), ("off", "on"), {"hidden": [4]})
    home = homes.home(tmp_path / "home", toml='[data]\nsamples = "readings.csv"\nstride = 1\n[serve]\nworse_by = 1.0\n')
    rows = [*readings("d0", "off", range(20)), *readings("d0", "on", range(20, 40), 5)]
    (home / "readings.csv").write_text(lines(HEADER, *rows))
    graph = export_graph(layout, kinds=("embed", "predict"))
    params = layout.ordered(trees.scale(models.initial(layout, 1), np.float32(2)))
    homes.service_with_model(home, "fedavg", graph=graph, params=params)
    return home


@pytest.mark.slow
def test_a_device_answers_and_adds_readings_and_tells_what_is_left_over(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, lines("time,ax,ay", *[f"{n},{n},{-n}" for n in (0, 1, 2, 3, 5)]))
    device_commands.predict(path, place, as_json=True)
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["labels"]) == 2, "windows of 3, one every reading, none across the gap"
    assert "1 readings are left over" in printed.err
    device_commands.add(path, "on", place, new_class=False)
    assert "2 samples of class on added" in capsys.readouterr().out
    device_commands.list_samples(place, as_json=True)
    printed = capsys.readouterr()
    assert [row["recorded"] + row["held_back"] for row in json.loads(printed.out)] == [18, 18]
    assert "40 readings give 36 windows of 3, one every 1" in printed.err


@pytest.mark.slow
def test_every_way_to_a_device_tells_how_samples_that_do_not_fit_are_converted(place: Path, tmp_path: Path) -> None:
    last = np.zeros((4, 3, 2), np.float32)
    np.save(tmp_path / "last.npy", last)
    service = homes.restored(place)
    for ask in (
        lambda: device_commands.predict(tmp_path / "last.npy", place, as_json=True),
        lambda: device_commands.add(tmp_path / "last.npy", "on", place, new_class=False),
        lambda: service.answers(last),
        lambda: relearn.learn(service, last, ["on"] * 4),
    ):
        with pytest.raises(DataError) as told:
            ask()
        assert told.value.hint == "channels come first: np.moveaxis(x, -1, 1)"
    with pytest.raises(DataError, match="the input is uint8") as told:
        service.answers(np.zeros((4, 2, 3), np.uint8))
    assert told.value.hint == model_input.BYTES


def test_init_demo_and_advise_cut_readings(tmp_path: Path) -> None:
    rows = [row for client in "abcd" for k, label in enumerate(("on", "off"))
            for row in readings(client, label, np.arange(60) + 60 * k, 7 * k)]
    path = write(tmp_path, lines(HEADER, *rows))
    log_lines: list[str] = []
    found, spec = load_data(str(path), log_lines.append, window=4, stride=2)
    assert (len(found), spec.shape) == (4 * 2 * 29, (2, 4))
    assert "480 readings give 232 windows of 4, one every 2" in log_lines[0]
    assert "left over" not in log_lines[0]
    advised = recordings(str(path), 4, 2)
    assert (advised.section["window"], advised.section["stride"]) == (4, 2)
    assert "480 readings give" in advised.remarks[0]
    asked_of = experiments.read(lab.settings(path, data={"path": str(path), "window": 4, "stride": 2}))
    assert workload.build(asked_of).samples.x.shape == (232, 2, 4)
    with pytest.raises(DataError, match="is a named set, which is not cut into windows"):
        load_data("heartbeat", window=4)
    with pytest.raises(DataError, match="is a named set, which is not cut into windows"):
        recordings("heartbeat", 4)


def same_as_init(path: Path, **form: Any) -> InputSpec:
    """The input of the experiments that ``advise`` runs on these samples, which are bit by bit those of ``init``."""
    wanted, spec = load_data(str(path), **form)
    advised = recordings(str(path), form.pop("window", None), form.pop("stride", None), **form)
    settings: dict[str, Any] = {"data": advised.section, "model": {"name": "mlp"}, "partition": {"kind": "natural"}}
    found = workload.build(experiments.read(lab.settings(path, **settings)))
    np.testing.assert_array_equal(found.samples.x, wanted.x)
    assert replace(found.spec, mean=spec.mean, std=spec.std) == spec
    return found.spec


def test_advise_takes_images_sound_and_readings_in_the_form_of_a_fleet(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    client, y = [f"c{k // 20}" for k in range(80)], np.tile(["on", "off"], 40)
    np.savez(tmp_path / "photos.npz", x=rng.integers(0, 256, (80, 3, 6, 9), dtype=np.uint8), client=client, y=y)
    assert same_as_init(tmp_path / "photos.npz", size="8x4", fit="stretch").shape == (3, 4, 8)
    np.savez(tmp_path / "sound.npz", x=(1000 * rng.normal(size=(80, 4000))).astype(np.int16), client=client, y=y)
    assert same_as_init(tmp_path / "sound.npz", rate=8000, seconds=0.5).sound_hz == 8000
    rows = [row for client in "abcd" for k, label in enumerate(("on", "off"))
            for row in readings(client, label, np.arange(60) + 60 * k, 7 * k)]
    path = write(tmp_path, lines(HEADER, *rows))
    spec = same_as_init(path, window=4, stride=2, rate=50)
    assert (spec.rate_hz, spec.stride, spec.sound_hz) == (50.0, 2, 0)
    for data, form, said in (("heartbeat", {"rate": 8000}, "whose samples are as they are"),
                             (str(path), {"window": 4, "size": "8"}, "holds no images"),
                             (str(path), {"window": 4, "fit": "crop"}, "'crop' is not a way to fit images"),
                             (str(path), {"seconds": 1.0}, "holds no sound"),
                             (str(path), {"rate": 50}, "50 Hz is not a valid rate for sound")):
        with pytest.raises(DataError, match=said):
            recordings(data, **form)


@pytest.mark.slow
def test_init_takes_the_window_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, lines(HEADER, *readings("a", "on", range(9)), *readings("a", "off", range(9, 18))))
    made = CliRunner().invoke(cli.app, ["init", str(tmp_path / "fleet"), "--data", str(path), "--window", "3",
                                        "--model", "mlp", "--method", "fedavg"])
    assert made.exit_code == 0, made.output
    assert "shape = [2, 3]" in (tmp_path / "fleet" / "fleet.toml").read_text()
    assert "18 readings give 6 windows of 3" in made.stderr
    alone = CliRunner().invoke(cli.app, ["init", str(tmp_path / "other"), "--window", "3"])
    assert "--window without --data" in str(alone.exception)
