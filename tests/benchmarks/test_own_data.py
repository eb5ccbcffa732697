"""The default model for a user's data: chosen by shape, and suited to sensor windows with free phase."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.own_data import choose, series, table
from benchmarks.own_data.baseline import features
from cloud_server.choices.first_settings import fleet_toml, load_data, model_for
from cloud_server.laboratory.advise.recordings import recordings
from fleet_core.base import config
from fleet_core.data import model_input
from fleet_core.data.samples import load
from fleet_core.data.sets.registry import entries
from fleet_core.learning import models
from fleet_core.model.layout import InputSpec

# The choice


@pytest.mark.parametrize(
    ("shape", "dtype", "model"),
    [
        ((6, 64), "float32", "ds-cnn"), ((1, 3), "float32", "ds-cnn"), ((3, 128), "uint8", "ds-cnn"),
        ((1, 28, 28), "uint8", "ds-cnn"), ((3, 5, 4), "float32", "ds-cnn"), ((12,), "float32", "mlp"),
        ((2, 3, 4, 5), "float32", "mlp"), ((20,), "int64", "char-lstm"),
    ],
)  # fmt: skip
def test_a_model_is_chosen_by_the_shape_of_the_samples_and_takes_them(
    shape: tuple[int, ...], dtype: str, model: str
) -> None:
    assert model_input.default_model(shape, dtype) == model
    for name in model_input.models_for(shape, dtype):
        assert models.describe(name, InputSpec(shape, dtype), ("a", "b"), {}).classes == ("a", "b")


def test_every_way_to_start_takes_the_same_model(tmp_path: Path) -> None:
    path = series.write(tmp_path, "vibration-free")
    samples, spec = load_data(str(path))
    chosen = model_input.default_model(spec.shape, spec.dtype)
    assert model_for(str(path), samples) == recordings(str(path)).models[0].name == chosen
    text = fleet_toml(samples, "f", "fedavg", None, rounds=1, seed=0, spec=spec)
    assert config.tables(text, "fleet.toml")["model"]["name"] == chosen


def test_a_named_set_has_the_model_that_is_recommended_for_it() -> None:
    samples, _ = load_data("heartbeat")
    recommended = entries()["heartbeat"].model
    assert model_for("heartbeat", samples) == recordings("heartbeat").models[0].name == recommended == "cnn1d"
    for one in entries().values():
        if one.model:
            models.describe(one.model, one.input_spec, [str(k) for k in range(one.classes)], {})


# Generated series


@pytest.mark.parametrize("name", series.names())
def test_generated_series_are_those_of_their_seed_and_can_be_read(name: str, tmp_path: Path) -> None:
    few = {"devices": 3, "per_class": 4}
    first, again, other = (series.generated(name, seed, **few) for seed in (0, 0, 1))
    for key, array in first.items():
        np.testing.assert_array_equal(array, again[key])
    assert not np.array_equal(first["x"], other["x"])
    np.savez(tmp_path / "made.npz", allow_pickle=False, **first)
    samples = load(tmp_path / "made.npz")
    family = series.FAMILIES[name.rpartition("-")[0]]
    assert (samples.x.shape[1:], samples.classes) == (family.shape, tuple(sorted(family.classes)))
    assert samples.clients == ("sensor-1", "sensor-2", "sensor-3")
    assert len(samples) == 3 * 4 * len(family.classes)


def test_free_windows_of_a_class_are_nowhere_alike_and_aligned_ones_are() -> None:
    for cut, least, most in (("free", -0.1, 0.1), ("aligned", 0.3, 1.0)):
        made = series.generated(f"vibration-{cut}", devices=1)
        x = made["x"][made["y"] == "idle"]
        x = (x - x.mean(2, keepdims=True)).reshape(40, -1)
        assert least < np.corrcoef(x)[np.triu_indices(40, 1)].mean() < most, cut


def test_the_spectrum_does_not_know_when_a_window_was_cut() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 32))
    np.testing.assert_allclose(features(np.roll(x, 5, axis=2)), features(x), atol=1e-5)


# A fleet on free windows


def score_of(model: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    part = dataclasses.replace(choose.PARTS["series"], candidates={model: choose.Candidate(model)})
    monkeypatch.setitem(choose.PARTS, "series", part)
    job = choose.Job("series", "test", "vibration-free", model, "pfldyn-proto", 0)
    figures = choose.run(job, out, float("inf"))
    assert figures is not None
    return float(figures["score"])


@pytest.mark.slow
def test_the_default_model_separates_vibrations_of_any_phase_and_a_position_bound_model_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "ROUNDS", 6)
    default = model_input.default_model((6, 64), "float32")
    assert score_of(default, tmp_path, monkeypatch) > 0.8
    assert score_of("cnn1d", tmp_path, monkeypatch) < 0.6


def test_what_is_evaluated_is_not_looked_at_in_validation(tmp_path: Path) -> None:
    jobs = [job for job in choose.jobs("series") if job.set == "level-free"]
    assert {job.takes(tmp_path).evaluation.within_training for job in jobs if job.stage == "validation"} == {True}
    assert {job.takes(tmp_path).evaluation.within_training for job in jobs if job.stage == "test"} == {False}
    assert {job.label for job in jobs if job.stage == "test"} == {"cnn1d", choose.PARTS["series"].chosen}


def test_the_product_takes_what_was_chosen() -> None:
    for name, shape in (("series", (3, 128)), ("images", (1, 28, 28)), ("rows", (9,))):
        part = choose.PARTS[name]
        chosen = part.candidates[part.chosen]
        assert (model_input.default_model(shape, "float32"), chosen.options) == (chosen.model, {})


def test_tables_have_the_mean_over_seeds_and_leave_out_what_did_not_run() -> None:
    def run(score: float, parameters: int = 10) -> dict[str, Any]:
        return {"score": score, "parameters": parameters, "payload_bytes": 1000.0, "seconds": 1.0}

    stage = {
        "a": {
            "nearest mean": 0.25,
            "runs": {"old": {"m": {"0": run(0.5), "1": run(0.7)}}, "new": {"m": {"0": run(1)}}},
        },
        "b": {"nearest mean": 0.75, "runs": {"old": {"m": {"0": run(0.4, 1200)}}}},
    }
    lines = table.validation(stage).splitlines()
    assert lines[2] == "| old | 0.600 | 0.400 | 0.500 | 10 to 1,200 | 2.00 kB |"
    assert lines[3] == "| new | 1.000 | — | — | 10 to 10 | 1.00 kB |"
    assert lines[4] == "| nearest mean | 0.250 | 0.750 | 0.500 | — | — |"
