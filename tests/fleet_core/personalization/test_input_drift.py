"""Whether a model's inputs have moved: statistics, measures, ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleet_core.personalization import input_drift
from fleet_core.personalization.drift import LEAST, MOST, Sums
from fleet_core.personalization.input_drift import InputReference, statistics

Array = np.ndarray[Any, Any]


def drawn(number: int, seed: int) -> Array:
    """Two channels of 32 readings; the second is louder where the first is."""
    rng = np.random.default_rng(seed)
    loud = rng.uniform(0.5, 2, (number, 1, 1))
    return (loud * np.array([[1.0], [3.0]]) * rng.normal(size=(number, 2, 32))).astype(np.float32)


def reference(x: Array | None = None) -> InputReference:
    found = InputReference.of(drawn(300, 0) if x is None else x)
    assert found is not None
    return found


def test_statistics_are_mean_deviation_and_step_of_each_channel() -> None:
    x = np.array([[[0, 2, 4], [1, 1, 1]]], np.float32)
    np.testing.assert_allclose(statistics(x), [[2, 1, np.sqrt(8 / 3), 0, 2, 0]])
    images = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)
    np.testing.assert_allclose(statistics(images)[:, 6:], 1)
    numbers = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(statistics(numbers), numbers)
    assert statistics(np.zeros((2, 3, 1), np.float32)).shape == (2, 9)


def test_new_samples_of_the_same_kind_surprise_by_one_on_average_and_are_not_noticed() -> None:
    means = [reference(drawn(400, seed)).surprise(drawn(1000, 100 + seed)).mean(0) for seed in range(5)]
    np.testing.assert_allclose(np.mean(means, axis=0), 1, atol=0.15)
    assert not Sums().after(reference().surprise(drawn(1000, 1))).moved


@pytest.mark.parametrize("change", [
    lambda x: 3 * x, lambda x: x / 3, lambda x: x + 2, lambda x: np.roll(x, 1, axis=1),
])
def test_a_change_is_noticed_within_a_hundred_samples(change: Any) -> None:
    assert 0 < Sums().after(reference().surprise(change(drawn(100, 2)))).moved_at <= 100


def test_channels_that_no_longer_move_together_are_seen_by_mahalanobis_alone() -> None:
    x = drawn(200, 3)
    apart = np.stack([x[:, 0], drawn(200, 4)[:, 1]], 1)
    distance, mahalanobis = reference().surprise(apart).mean(0)
    assert mahalanobis > 1.5 > distance


def test_a_wide_sample_is_compared_by_its_distance_alone() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, input_drift.WIDEST + 1)).astype(np.float32)
    known = reference(x)
    assert known.inverse.size == 0
    assert not Sums().after(known.surprise(x)).moved
    assert Sums().after(known.surprise(x + 2)).moved


def test_too_few_samples_and_tokens_give_no_reference_and_many_are_thinned() -> None:
    assert InputReference.of(drawn(2 * LEAST - 1, 0)) is None
    assert InputReference.of(np.zeros((100, 8), np.int64)) is None
    assert len(reference(np.random.default_rng(0).normal(size=(3 * MOST, 4))).distance) == MOST


def test_numbers_that_never_change_do_not_raise_an_alarm_by_rounding() -> None:
    x = np.column_stack([np.full(100, 0.1), np.random.default_rng(0).normal(size=100)]).astype(np.float32)
    assert np.isfinite(reference(x).surprise(x)).all()
    assert not Sums().after(reference(x).surprise(x)).moved


def test_a_reference_is_read_as_it_was_stored_and_a_damaged_one_is_none() -> None:
    known = reference()
    again = InputReference.stored(known.arrays())
    assert again is not None
    np.testing.assert_array_equal(again.surprise(drawn(20, 5)), known.surprise(drawn(20, 5)))
    for damaged in ({}, {**known.arrays(), "drift_inverse": np.zeros((5, 5), np.float32)},
                    {**known.arrays(), "drift_mean": known.mean[:-1]},
                    {**known.arrays(), "drift_distance": known.distance[:3]},
                    {**known.arrays(), "drift_distance": known.distance.astype(np.float64)}):
        assert InputReference.stored(damaged) is None
