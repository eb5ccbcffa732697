"""Experiments whose models predict numbers: what is refused, the figures of a run, a comparison, a rehearsal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metafleet
from cloud_server.laboratory.compare import comparison, comparison_files, finished_runs, tables
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload as workloads
from cloud_server.laboratory.plan.planned_bytes import Asked
from cloud_server.laboratory.run import rehearsal, simulate
from cloud_server.laboratory.run.run_progress import Progress
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.errors import ConfigError
from fleet_core.data.samples import Samples, save
from fleet_core.learning import models
from fleet_core.model.layout import InputSpec
from fleet_core.tasks.regression import Regression

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

OUTPUTS = ("speed", "load")
HYPER = {"local_steps": 10, "batch": 20, "client_lr": 0.1}


def recordings(path: Path, devices: int = 4, count: int = 60) -> Path:
    """Two numbers in units of their own; each device has an offset."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(devices * count, 6)).astype(np.float32)
    device = np.repeat(np.arange(devices), count)
    level = np.tanh(x[:, :2].sum(1)) + 0.2 * device
    y = np.stack([200 + 40 * level, -0.5 * level], 1) + rng.normal(size=(len(x), 2)) * (2, 0.02)
    save(path, Samples(x, y, np.array([f"d{k}" for k in device]), np.arange(len(x), dtype=np.float64),
                       outputs=OUTPUTS))
    return path


def settings(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "data": {"path": str(path)}, "model": {"name": "mlp", "options": {"hidden": [8]}, "task": "regression"},
        "budget": {"rounds": 6}, "evaluation": {"every": 3}, "seeds": [0],
        "method": [{"name": "fedavg", "hyper": HYPER}, {"name": "local", "hyper": HYPER}], **more,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    evaluation = {"every": 3, "new_devices": 0.25, "support": [0.3]}
    asked = experiments.read(settings(recordings(folder / "r.npz"), evaluation=evaluation))
    simulate.simulate(asked, folder / "runs", simulate.Options(jobs=1))
    return folder / "runs"


def test_a_run_has_errors_in_place_of_accuracies(runs: Path) -> None:
    found = json.loads((runs / "fedavg-s0" / "result.json").read_text())
    first, last = (row for row in found["rounds"] if "error" in row)
    assert (first["round"], last["round"]) == (3, 6)
    assert "accuracy" not in last
    assert "macro_f1" not in last
    assert last["error"]["best"] <= last["error"]["mean"] <= last["error"]["worst"]
    assert last["error"]["mean"] == pytest.approx(np.mean(list(last["devices"].values())))
    assert set(last["measures"]["mae"]) == set(OUTPUTS)
    assert last["measures"]["r2"]["speed"] > 0.5
    assert set(last["before"]) == {"error", "measures"}
    assert last["new_devices"]["0.3"]["error"]["mean"] > 0
    assert found["evaluated"] == {"round": 6, "error": last["error"]["pooled"], "measures": last["measures"]}


def test_a_comparison_ranks_the_smaller_error_first_and_says_what_reaches_it(runs: Path, tmp_path: Path) -> None:
    found, _ = finished_runs.gather([runs])
    compared = comparison.compare(found)
    assert compared.figure.key == "error"
    first, second = compared.entries
    assert first.accuracy.mean < second.accuracy.mean
    assert list(compared.targets) == sorted(compared.targets, reverse=True)
    (target,) = compared.targets
    best = min(step.accuracy.mean for step in first.curve)
    assert best <= target < best + 0.001
    assert (first.reached[0].seeds, second.reached[0].seeds) == (1, 0)
    assert second.reached[0].at["rounds"].sign == ">"
    closing = tables.closing(compared)
    assert "MAE in deviations" in closing
    assert "MAE speed" in closing
    assert "accuracy" not in closing
    assert f"to error {target:g}" in tables.targets_text(compared)
    pages = {path.name: path for path in comparison_files.write(compared, tmp_path)}
    page = pages["compare.html"].read_text()
    assert "Lowest MAE in deviations, mean over devices" in page
    assert "MAE in deviations against" in page
    assert "R² load" in page
    assert "Highest" not in page
    assert json.loads(pages["compare.json"].read_text())["target_of"] == "error"
    (row, *_) = metafleet.read_runs(runs)[0].curve()
    assert row["mae speed"] > 0


def test_errors_are_not_compared_with_accuracies(runs: Path, tmp_path: Path) -> None:
    found, _ = finished_runs.gather([runs])
    with pytest.raises(ConfigError, match="these runs have no macro-f1"):
        comparison.compare(found, target_of="macro-f1")
    data = json.loads((runs / "local-s0" / "result.json").read_text())
    for row in data["rounds"]:
        row.pop("measures", None)
        if error := row.pop("error", None):
            row["accuracy"] = {key: min(1.0, value) for key, value in error.items()}
        row.pop("new_devices", None)
    (tmp_path / "result.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"has MAE in deviations, and .* accuracy"):
        comparison.compare([*found[:1], finished_runs.read(tmp_path / "result.json")], mixed=True)


def test_progress_names_the_error() -> None:
    progress = Progress(["a"], 2)
    progress.round_ended("a", {"round": 1, "loss": 0.5, "error": {"mean": 0.25}})
    assert "MAE in deviations 0.250" in progress.line("a")


def test_targets_are_scaled_by_the_training_samples_of_devices_that_train(tmp_path: Path) -> None:
    asked = experiments.read(settings(recordings(tmp_path / "r.npz"), data={"path": str(tmp_path / "r.npz"),
                                                                            "outputs": ["load"]}))
    work = workloads.build(asked)
    assert isinstance(work.task, Regression)
    assert work.task.outputs == ("load",)
    rows = np.concatenate([share.train for share in work.train])
    assert work.task.mean[0] == pytest.approx(work.samples.y[rows, 0].mean())
    assert work.classes == ()


@pytest.mark.parametrize(("changed", "why"), [
    ({"partition": {"kind": "dirichlet"}}, "'dirichlet' divides classes: give natural or iid"),
    ({"data": {"set": "har"}}, "has classes, and the task is regression"),
    ({"evaluation": {"novel_classes": [1]}}, "has no classes"),
    ({"model": {"name": "mlp", "loss": "squared"}}, "give model.task = 'regression"),
    ({"data": {"path": "r.npz", "outputs": ["load"]}, "model": {"name": "mlp"}}, "give model.task = 'regression"),
])
def test_what_needs_classes_is_refused_before_anything_is_read(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        experiments.read(settings(Path("r.npz"), **changed))


def test_a_method_that_compares_classes_is_refused_by_name(tmp_path: Path) -> None:
    asked = experiments.read(settings(recordings(tmp_path / "r.npz"), method=[{"name": "pfldyn-proto"}]))
    with pytest.raises(ConfigError, match="pfldyn-proto cannot learn regression"):
        simulate.checked(asked, experiments.runs(asked))


def test_a_rehearsal_takes_numbers() -> None:
    task = Regression(OUTPUTS, (200.0, 0.0), (40.0, 0.5))
    layout = models.describe("mlp", InputSpec((2, 16)), (), {"hidden": [8]}, task)
    asked = Asked(label="t", method=METHODS["fedavg"], hyper=METHODS["fedavg"].hyper(), layout=layout, rounds=10,
                  devices=4, codec_up="int8", codec_down="int8")
    work = rehearsal.generated(layout, 4)
    assert work.samples.y.mean(0) == pytest.approx([200, 0], abs=10)
    found = rehearsal.rehearsed(asked, 1e6)
    assert 0 < found.up < 4 * layout.parameters(("body", "head"))
    assert "generated samples" in found.about
