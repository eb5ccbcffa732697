"""How far probabilities agree with how often answers are right."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_core.tasks.calibration import (
    BINS,
    best_temperature,
    expected_calibration_error,
    gaps,
    likelihoods,
    possible,
    tempered,
)


def error_of(sure: np.ndarray, right: np.ndarray) -> float | None:
    return expected_calibration_error(gaps(sure, right), len(sure))


def test_answers_that_are_as_often_right_as_they_say_have_no_error() -> None:
    sure = np.repeat([0.25, 0.75], 40)
    right = np.concatenate([np.arange(40) < 10, np.arange(40) < 30])
    assert error_of(sure, right) == pytest.approx(0.0)
    assert error_of(np.zeros(0), np.zeros(0, bool)) is None


def test_the_error_is_the_mean_gap_of_the_bins() -> None:
    """In one bin 0.9 is said and half is right, in the other 0.5 is said and all is right."""
    sure = np.repeat([0.9, 0.5], [30, 10])
    right = np.concatenate([np.arange(30) < 15, np.ones(10, bool)])
    assert error_of(sure, right) == pytest.approx((30 * 0.4 + 10 * 0.5) / 40)
    assert error_of(np.ones(4), np.ones(4, bool)) == 0.0


def test_the_gaps_of_devices_give_the_error_of_all_their_answers() -> None:
    rng = np.random.default_rng(0)
    sure, right = rng.uniform(0.2, 1, 200), rng.random(200) < 0.6
    parts = [gaps(sure[part], right[part]) for part in (slice(0, 50), slice(50, 60), slice(60, 200))]
    assert expected_calibration_error(np.sum(parts, axis=0), 200) == pytest.approx(error_of(sure, right))


def test_an_answer_without_a_probability_has_no_confidence() -> None:
    found = gaps(np.array([np.nan, np.inf, -np.inf, 0.9]), np.array([True, False, True, True]))
    assert found[0] == 2
    assert found.sum() == pytest.approx(2.1)


def test_gaps_cannot_exceed_the_number_of_answers() -> None:
    most = list(gaps(np.zeros(40), np.ones(40, bool)).round(4))
    assert possible(most, 40)
    assert not possible(most, 39)
    assert not possible(most[: BINS - 1], 40)


def test_a_temperature_changes_how_sure_answers_are_and_not_the_answers() -> None:
    found = np.array([[0.6, 0.4, 0.0], [0.1, 0.1, 0.8]], np.float32)
    for temperature in (0.5, 1.0, 3.0):
        changed = tempered(found, temperature)
        np.testing.assert_array_equal(changed.argmax(1), found.argmax(1))
        np.testing.assert_allclose(changed.sum(1), 1.0, rtol=1e-6)
        assert changed[0, 2] == 0.0
    np.testing.assert_allclose(tempered(found, 1.0), found, rtol=1e-6)
    assert tempered(found, 3.0)[0, 0] < 0.6 < tempered(found, 0.5)[0, 0]


def test_the_temperature_makes_many_answers_as_sure_as_they_are_right_and_few_less_so() -> None:
    """0.99 is said and three of four are right."""
    y = np.tile([0, 0, 0, 1], 50)
    found = np.tile(np.array([[0.99, 0.01]], np.float32), (200, 1))
    many, few = best_temperature(found, y), best_temperature(found[:4], y[:4])
    assert tempered(found, many)[0, 0] == pytest.approx(0.75, abs=0.03)
    assert 1.0 < few < many
    assert best_temperature(found[:0], y[:0]) == 1.0


def test_an_impossible_answer_costs_a_bounded_likelihood() -> None:
    assert likelihoods(np.array([[1.0, 0.0]]), np.array([1])) == pytest.approx(np.log(1e-6))
