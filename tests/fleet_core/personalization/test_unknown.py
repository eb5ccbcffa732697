"""Samples of none of a device's classes: thresholds by hand, by leaving one out, and over many draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_core.base.errors import DataError
from fleet_core.personalization import unknown_class
from fleet_core.personalization.nearest import Prototypes
from fleet_core.personalization.unknown_class import Thresholds, nearest

Array = np.ndarray[Any, Any]


def means(z: Array, y: Array, classes: int) -> Prototypes:
    return Prototypes.empty(classes, z.shape[1]).add(z, y)


def calibrated(z: Array, y: Array, classes: int, quantile: float = 0.95) -> tuple[Thresholds, Prototypes]:
    prototypes = means(z, y, classes)
    return Thresholds.calibrate(z, y, prototypes, quantile), prototypes


def clouds(each: int, rng: np.random.Generator, classes: int = 5, width: int = 16) -> tuple[Array, Array]:
    """``each`` samples of every class, with spread 1 around centres at least 40 apart."""
    y = np.repeat(np.arange(classes), each)
    return (40.0 * np.eye(classes, width)[y] + rng.normal(size=(len(y), width))).astype(np.float32), y


# The threshold --------------------------------------------------------------------------------------------------------


def test_the_threshold_of_two_samples_is_three_times_their_distance_from_their_mean() -> None:
    z, y = np.array([[0, 0], [2, 0], [9, 9]], np.float32), np.array([0, 0, 1])
    thresholds, prototypes = calibrated(z, y, 2)
    assert thresholds.distances.dtype == np.float32
    np.testing.assert_allclose(thresholds.distances, [3, 3])  # 1 · (2 + 1) / (2 − 1), also for the class with one
    at = np.array([[1, 3**0.5 - 1e-3], [1, 3**0.5 + 1e-3], [9, 9 + 3**0.5 - 1e-3], [9, 9 + 3**0.5 + 1e-3]], np.float32)
    assert thresholds.unknown(at, prototypes).tolist() == [False, True, False, True]


@settings(max_examples=40, deadline=None)
@given(each=st.integers(2, 9), seed=st.integers(0, 999))
def test_a_samples_distance_to_the_mean_of_the_others_is_scaled_to_that_of_a_new_sample(
    each: int, seed: int
) -> None:
    z, y = clouds(each, np.random.default_rng(seed), classes=3)
    left_out = [
        float(np.square(one - z[(y == label) & (np.arange(len(y)) != i)].mean(0)).sum())
        for i, (one, label) in enumerate(zip(z.astype(np.float64), y, strict=True))
    ]
    wanted = max(left_out) * (each**2 - 1) / each**2
    np.testing.assert_allclose(calibrated(z, y, 3, 1.0)[0].distances, wanted, rtol=1e-4)


def test_of_many_distances_the_quantile_is_that_of_split_conformal_prediction() -> None:
    """Pairs around 0 at ± k: scaled distances 3 · k², each twice; of 40 with 0.9 the ⌈0.9 · 41⌉ = 37th."""
    radius = np.repeat(np.arange(1, 21), 2)
    z = np.zeros((40, 20), np.float32)
    z[np.arange(40), radius - 1] = radius * np.tile([1, -1], 20)
    z = np.c_[z, 1000.0 * np.eye(20, dtype=np.float32)[radius - 1]].astype(np.float32)
    np.testing.assert_allclose(calibrated(z, radius - 1, 20, 0.9)[0].distances, 3 * 19**2)


@pytest.mark.parametrize("each", [2, 5, 40])
@pytest.mark.parametrize("quantile", [0.8, 0.9])
def test_of_new_samples_of_known_classes_the_share_that_was_requested_stays_known(each: int, quantile: float) -> None:
    """Over 200 devices; five classes with two samples each have ten distances, whose ⌈q · 11⌉-th is taken."""
    rng = np.random.default_rng(each)
    shares = []
    for _ in range(200):
        thresholds, prototypes = calibrated(*clouds(each, rng), 5, quantile)
        shares.append(1 - thresholds.unknown(clouds(20, rng)[0], prototypes).mean())
    place = np.ceil(quantile * (5 * each + 1)) / (5 * each + 1)
    assert abs(np.mean(shares) - place) < 0.02 if each > 2 else 0.72 < np.mean(shares) < 0.96


def test_samples_of_absent_classes_are_unknown_and_of_present_ones_known() -> None:
    rng = np.random.default_rng(0)
    z, y = clouds(20, rng, classes=6)
    thresholds, prototypes = calibrated(z[y < 5], y[y < 5], 6)
    at, label = clouds(50, rng, classes=6)
    found = thresholds.unknown(at, prototypes)
    assert found[label == 5].all()
    assert found[label < 5].mean() < 0.12


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), low=st.floats(0.05, 1.0), high=st.floats(0.05, 1.0))
def test_a_higher_quantile_calls_fewer_unknown_and_at_one_every_own_sample_is_known(
    seed: int, low: float, high: float
) -> None:
    z, y = clouds(4, np.random.default_rng(seed))
    low, high = sorted((low, high))
    (fewer, prototypes), (more, _) = calibrated(z, y, 5, high), calibrated(z, y, 5, low)
    assert not (fewer.unknown(z, prototypes) & ~more.unknown(z, prototypes)).any()
    assert not calibrated(z, y, 5, 1.0)[0].unknown(z, prototypes).any()


def test_embeddings_three_times_as_large_have_thresholds_nine_times_as_large() -> None:
    z, y = clouds(6, np.random.default_rng(1))
    np.testing.assert_allclose(calibrated(3 * z, y, 5)[0].distances, 9 * calibrated(z, y, 5)[0].distances, rtol=1e-4)


# Few samples ----------------------------------------------------------------------------------------------------------


def test_with_one_sample_per_class_the_threshold_is_half_the_distance_of_the_nearest_means() -> None:
    z = np.array([[0, 0], [3, 0], [3, 4]], np.float32)  # the nearest others: 9, 9, 16
    thresholds, prototypes = calibrated(z, np.arange(3), 3)
    np.testing.assert_allclose(thresholds.distances, (9 + 9 + 16) / 3 / 2)
    at = np.array([[0, 1], [-2, -2], [30, 4]], np.float32)
    assert thresholds.unknown(at, prototypes).tolist() == [False, True, True]


def test_equal_samples_of_each_class_are_as_one_of_each() -> None:
    z, y = np.array([[0, 0], [3, 0], [3, 4]], np.float32), np.arange(3)
    twice, _ = calibrated(np.repeat(z, 2, 0), np.repeat(y, 2), 3)
    np.testing.assert_allclose(twice.distances, calibrated(z, y, 3)[0].distances)


def test_one_sample_of_one_class_calls_nothing_unknown_that_is_a_number() -> None:
    thresholds, prototypes = calibrated(np.ones((1, 2), np.float32), np.array([1]), 3)
    at = np.array([[1e18, 0], [np.nan, 0], [np.inf, 0]], np.float32)
    assert thresholds.unknown(at, prototypes).tolist() == [False, True, True]


def test_two_samples_of_one_class_are_enough() -> None:
    thresholds, prototypes = calibrated(np.array([[0, 0], [2, 0]], np.float32), np.array([1, 1]), 3)
    at = np.array([[1, 1], [5, 0]], np.float32)
    assert thresholds.unknown(at, prototypes).tolist() == [False, True]


def test_distances_that_no_float32_holds_are_infinite_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    z = np.array([[-3e38, 0], [3e38, 0]], np.float32)
    thresholds, prototypes = calibrated(z, np.zeros(2, np.int64), 2)
    assert np.isinf(thresholds.distances).all()
    assert not thresholds.unknown(z, prototypes).any()
    assert not recwarn.list


# The nearest class ----------------------------------------------------------------------------------------------------


def test_a_class_without_samples_is_never_the_nearest() -> None:
    prototypes = means(np.array([[5, 0]], np.float32), np.array([2]), 3)  # the empty classes' means are 0
    distance, label = nearest(np.array([[0, 0], [5, 1]], np.float32), prototypes)
    assert (distance.tolist(), label.tolist()) == ([25.0, 1.0], [2, 2])


def test_without_any_sample_everything_is_unknown() -> None:
    empty = Prototypes.empty(3, 2)
    thresholds = Thresholds.calibrate(np.zeros((0, 2), np.float32), np.zeros(0, np.int64), empty, 0.9)
    assert thresholds.unknown(np.zeros((4, 2), np.float32), empty).all()
    assert thresholds.unknown(np.zeros((0, 2), np.float32), empty).shape == (0,)


def test_more_samples_than_are_taken_at_once_are_answered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = clouds(30, np.random.default_rng(2))
    prototypes = means(z, y, 5)
    distance, label = nearest(z, prototypes)
    brute = np.square(z[:, None].astype(np.float64) - prototypes.prototypes).sum(2)
    np.testing.assert_allclose(distance, brute.min(1))
    np.testing.assert_array_equal(label, brute.argmin(1))
    monkeypatch.setattr(unknown_class, "MAX_DIFFERENCES", 100)
    np.testing.assert_array_equal(nearest(z, prototypes)[0], distance)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("z", "y", "quantile", "said"),
    [
        (np.ones((2, 2)), np.array([0, 1]), 0.0, "a quantile of 0.0"),
        (np.ones((2, 2)), np.array([0, 1]), 1.01, "a quantile of 1.01"),
        (np.ones((2, 2)), np.array([0, 1]), float("nan"), "a quantile of nan"),
        (np.ones((2, 2)), np.array([0]), 0.9, "1 labels"),
        (np.ones((2, 3)), np.array([0, 1]), 0.9, "samples [2, 3]"),
        (np.ones((2, 2)), np.array([0, 3]), 0.9, "not in 0…2"),
        (np.ones((2, 2)), np.array([0, -1]), 0.9, "not in 0…2"),
    ],
)
def test_what_cannot_be_calibrated_on_is_refused(z: Array, y: Array, quantile: float, said: str) -> None:
    prototypes = means(np.ones((2, 2), np.float32), np.array([0, 1]), 3)
    with pytest.raises(DataError) as caught:
        Thresholds.calibrate(z.astype(np.float32), y, prototypes, quantile)
    assert said in str(caught.value)
