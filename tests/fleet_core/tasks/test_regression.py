"""fleet_core.tasks.regression: scaling of targets, and measures that are added over devices."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fleet_core.base import schema
from fleet_core.base.errors import DataError
from fleet_core.tasks.regression import Errors, Regression

RNG = np.random.default_rng(3)
Y = RNG.normal((20, 1e6), (5, 300), (40, 2))
TASK = Regression.of(("temperature", "pressure"), Y)


def known(figures: tuple[float | None, ...] | None) -> np.ndarray:
    """The figures as an array; fails if one is missing."""
    assert figures is not None
    assert None not in figures
    return np.array(figures, np.float64)


def test_targets_are_standardized_and_answers_come_back_in_units() -> None:
    scaled = TASK.standardized(Y)
    assert scaled.dtype == np.float32
    assert scaled.shape == (40, 2)
    np.testing.assert_allclose(scaled.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(scaled.std(0), 1, atol=1e-5)
    np.testing.assert_allclose(TASK.in_units(scaled), Y, rtol=1e-6)


def test_one_output_takes_a_column_or_a_vector() -> None:
    task = Regression.of(("t",), Y[:, 0])
    np.testing.assert_array_equal(task.standardized(Y[:, 0]), task.standardized(Y[:, :1]))


def test_an_output_that_never_changes_is_not_divided_by_zero() -> None:
    task = Regression.of(("t",), np.full(5, 7.0))
    assert task.deviation == (1.0,)
    np.testing.assert_array_equal(task.standardized(np.full(2, 7.0)), np.zeros((2, 1)))


def test_measures_are_those_of_their_definitions() -> None:
    answers = Y + RNG.normal(size=Y.shape)
    errors = Errors.of(TASK, Y, answers)
    np.testing.assert_allclose(known(errors.mae), np.abs(answers - Y).mean(0))
    spread = np.square(Y - Y.mean(0)).sum(0)
    np.testing.assert_allclose(known(errors.r2), 1 - np.square(answers - Y).sum(0) / spread)


def test_the_mean_explains_nothing_and_the_truth_everything() -> None:
    np.testing.assert_allclose(known(Errors.of(TASK, Y, np.tile(Y.mean(0), (40, 1))).r2), 0, atol=1e-9)
    right = Errors.of(TASK, Y, Y)
    assert right.r2 == (1.0, 1.0)
    assert right.mae == (0.0, 0.0)


def test_errors_of_devices_add_to_those_of_all_samples() -> None:
    answers = Y + RNG.normal(size=Y.shape)
    whole = Errors.of(TASK, Y, answers)
    parts = Errors.of(TASK, Y[:9], answers[:9]) + Errors.of(TASK, Y[9:], answers[9:])
    assert parts.count == 40
    np.testing.assert_allclose(known(parts.mae), known(whole.mae))
    np.testing.assert_allclose(known(parts.r2), known(whole.r2))


def test_measures_that_are_not_defined_are_none() -> None:
    nothing = Errors.of(TASK, Y[:0], Y[:0])
    assert nothing.mae is None
    assert nothing.r2 == (None, None)
    alike = Errors.of(TASK, np.tile(Y[:1], (6, 1)), Y[:6])
    assert alike.r2 == (None, None)


def test_errors_of_different_tasks_are_not_added() -> None:
    other = Regression.of(TASK.outputs, Y + 1)
    with pytest.raises(DataError, match="different centres"):
        Errors.of(TASK, Y, Y) + Errors.of(other, Y, Y)


@pytest.mark.parametrize(
    ("y", "what"),
    [
        (np.zeros((3, 3)), r"shape \[3, 3\]"),
        (np.zeros(3), r"shape \[3\]"),
        (np.array([[0.0, 1.0], [np.nan, 0.0]]), "row 2"),
        (np.array([["a", "b"]]), "targets are"),
    ],
)
def test_targets_that_do_not_fit_are_refused(y: np.ndarray, what: str) -> None:
    with pytest.raises(DataError, match=what):
        TASK.standardized(y)


@pytest.mark.parametrize("outputs", [(), ("",), ("a", "a")])
def test_outputs_need_names_of_their_own(outputs: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="the outputs are"):
        Regression(outputs, (0.0,) * len(outputs), (1.0,) * len(outputs))


def test_no_targets_and_a_wrong_number_of_answers_are_refused() -> None:
    with pytest.raises(DataError, match="no targets"):
        Regression.of(("t",), np.zeros(0))
    with pytest.raises(DataError, match="39 answers to 40 targets"):
        Errors.of(TASK, Y, Y[1:])


def test_a_task_is_read_back_from_json() -> None:
    found, problems = schema.read(Regression, json.loads(json.dumps(schema.plain(TASK))))
    assert found == TASK
    assert not problems


def test_a_deviation_of_zero_and_an_unknown_kind_or_loss_are_problems() -> None:
    given = {**schema.plain(TASK), "deviation": [0.0, 1.0], "kind": "ranking", "loss": "cubic"}
    _, problems = schema.read(Regression, given)
    assert {problem.key for problem in problems} == {"deviation[0]", "kind", "loss"}
