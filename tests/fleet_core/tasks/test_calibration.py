"""How far probabilities agree with how often answers are right."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_core.tasks.calibration import best_temperature, expected_calibration_error, likelihoods, tempered


def test_answers_that_are_as_often_right_as_they_say_have_no_error() -> None:
    sure = np.repeat([0.25, 0.75], 40)
    right = np.concatenate([np.arange(40) < 10, np.arange(40) < 30])
    assert expected_calibration_error(sure, right) == pytest.approx(0.0)
    assert expected_calibration_error(np.zeros(0), np.zeros(0, bool)) is None


def test_the_error_is_the_mean_gap_of_the_bins() -> None:
    """In one bin 0.9 is said and half is right, in the other 0.5 is said and all is right."""
    sure = np.repeat([0.9, 0.5], [30, 10])
    right = np.concatenate([np.arange(30) < 15, np.ones(10, bool)])
    assert expected_calibration_error(sure, right) == pytest.approx((30 * 0.4 + 10 * 0.5) / 40)
    assert expected_calibration_error(np.ones(4), np.ones(4, bool)) == 0.0


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
