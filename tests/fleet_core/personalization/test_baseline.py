"""The plain baseline: what it answers correctly, its limits, and that equal samples give an equal baseline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_core.base.errors import DataError, StateError
from fleet_core.personalization import plain_baseline
from fleet_core.personalization.plain_baseline import LOGISTIC, MAX_FEATURES, NEAREST, Baseline, features
from tests.support.waves import waves


def right(made: Baseline, x: NDArray[Any], y: NDArray[Any]) -> float:
    return float((made.labels(x) == y).mean())


def test_series_whose_phase_is_random_are_told_apart_by_their_spectrum() -> None:
    x, y = waves(240, seed=0)
    made = Baseline.fit(x[:120], y[:120], 3)
    assert right(made, x[120:], y[120:]) > 0.9
    assert plain_baseline.described(made.name, x.shape[1:]).endswith("on spectrum and statistics")


def test_labels_without_any_meaning_are_answered_at_chance() -> None:
    x, y = waves(600, seed=0, mixed_up=True)
    assert right(Baseline.fit(x[:300], y[:300], 3), x[300:], y[300:]) < 0.45


def test_round_classes_use_the_nearest_mean_and_elongated_ones_the_regression() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(400) % 2
    round_ones = np.eye(2)[y] * 8 + rng.normal(size=(400, 2))
    assert Baseline.fit(round_ones, y, 2).name == NEAREST
    long_ones = rng.normal(size=(400, 3)) * [5, 5, 1] + (y[:, None] * 2 - 1) * [3, 0, 3]
    long_ones[:, 1] += long_ones[:, 2]
    assert Baseline.fit(long_ones, y, 2).name == LOGISTIC


@pytest.mark.parametrize("shape", [(1, 4), (3, 128), (16, 4000), (200, 30), (1, 28, 28), (3, 7, 200), (12,), (5000,)])
def test_features_are_few_and_finite_for_samples_of_any_shape(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=(5, *shape)).astype(np.float32)
    found = features(x)
    assert len(found) == 5
    assert found.shape[1] <= max(MAX_FEATURES, 5 * shape[0] if len(shape) == 2 else 0)
    assert np.isfinite(found).all()


def test_equal_samples_give_equal_answers_and_a_batch_those_of_its_parts() -> None:
    x, y = waves(300, seed=1)
    first, second = Baseline.fit(x, y, 3), Baseline.fit(x.copy(), y.copy(), 3)
    assert np.array_equal(first.labels(x), second.labels(x))
    assert np.array_equal(first.labels(x), np.concatenate([first.labels(x[:7]), first.labels(x[7:])]))


def test_a_class_without_samples_is_never_the_answer_and_a_constant_feature_does_no_harm() -> None:
    x = np.random.default_rng(0).normal(size=(40, 4))
    x[:, 2] = 7.0
    y = np.where(x[:, 0] > 0, 1, 3)
    assert set(Baseline.fit(x, y, 5).labels(x)) == {1, 3}
    assert Baseline.fit(x[:1], y[:1], 5).labels(x[:3]).tolist() == [y[0]] * 3


def test_only_so_many_samples_are_learned_from_and_rare_classes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_baseline, "MAX_SAMPLES", 20)
    x, y = waves(200, seed=0)
    y[:] = 0
    y[150] = 2
    x[150] += 100
    assert Baseline.fit(x, y, 3).labels(x[150:151]).tolist() == [2]


def test_tokens_no_samples_and_values_that_are_not_finite_are_refused() -> None:
    x, y = waves(20, seed=0)
    with pytest.raises(DataError, match="tokens"):
        Baseline.fit(np.zeros((4, 5), np.int64), np.arange(4) % 2, 2)
    with pytest.raises(StateError, match="no labelled sample"):
        Baseline.fit(x[:0], y[:0], 3)
    x[3, 0, 0] = np.nan
    with pytest.raises(DataError, match="not finite"):
        Baseline.fit(x, y, 3)
