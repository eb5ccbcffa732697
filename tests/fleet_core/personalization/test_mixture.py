"""Weighing ways to personalize by cross-validation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleet_core.personalization import mixture as module
from fleet_core.personalization.mixture import MAX_SAMPLES, Way, folds, mixture_of, stacked

Array = np.ndarray[Any, Any]

Y = np.repeat([0, 1, 2], 20)


def right_on(rows: Array, y: Array = Y, sure: float = 0.8) -> Way:
    """A way that answers ``rows`` rightly, with the probability ``sure``, and the other rows wrongly."""
    right = np.isin(np.arange(len(y)), rows)

    def way(train: Array, test: Array) -> Array:
        answered = np.where(right[test], y[test], (y[test] + 1) % 3)
        return np.where(np.eye(3)[answered] > 0, sure, (1 - sure) / 2).astype(np.float32)

    return way


def weights(ways: dict[str, Way], y: Array = Y) -> dict[str, float]:
    return {name: way.weight for name, way in mixture_of(ways, y).ways.items()}


def test_a_way_that_answers_better_weighs_more_and_all_weigh_one_together() -> None:
    ways = {"none": right_on(np.arange(20)), "head": right_on(np.arange(55)), "knn": right_on(np.arange(20))}
    found = mixture_of(ways, Y)
    assert found.samples == 60
    assert found.ways["head"].accuracy == pytest.approx(55 / 60)
    assert found.ways["head"].log_likelihood == pytest.approx((55 * np.log(0.8) + 5 * np.log(0.1)) / 60)
    by = weights(ways)
    assert by["head"] > 0.7 > 0.15 > by["none"] == pytest.approx(by["knn"])
    assert sum(by.values()) == pytest.approx(1.0)


def test_ways_that_fail_on_different_samples_answer_better_together() -> None:
    every = np.arange(60)
    ways = {str(k): right_on(every[every % 3 != k]) for k in range(3)}
    found = mixture_of(ways, Y).answer({name: way(every, every) for name, way in ways.items()})
    assert (found.argmax(1) == Y).mean() == 1.0
    np.testing.assert_allclose(found.sum(1), 1.0, rtol=1e-6)


def test_with_few_labels_ways_weigh_nearly_alike() -> None:
    """Of two ways one is always right; the other never is."""
    def of(count: int) -> float:
        y = np.repeat([0, 1, 2], count)
        return weights({"none": right_on(np.arange(0), y), "head": right_on(np.arange(len(y)), y)}, y)["head"]

    assert 0.5 < of(2) < 0.8 < of(100) < 1.0


@pytest.mark.parametrize("y", [np.zeros(0, int), np.array([1]), np.arange(30)])
def test_without_a_class_of_two_samples_all_ways_weigh_alike(y: Array) -> None:
    found = mixture_of({"none": right_on(np.arange(0), y), "head": right_on(np.arange(len(y)), y)}, y)
    assert (found.samples, found.temperature) == (0, 1.0)
    assert [way.weight for way in found.ways.values()] == [0.5, 0.5]


def test_equal_ways_weigh_alike() -> None:
    np.testing.assert_allclose(stacked(np.log(np.full((4, 10), 0.3))), 0.25)


def test_a_mixture_of_one_way_answers_as_it_does_but_as_sure_as_it_is_right() -> None:
    """It says 0.99, and is right on two of three."""
    way = right_on(np.arange(60)[np.arange(60) % 3 > 0], sure=0.99)
    every = np.arange(60)
    found = mixture_of({"knn": way}, Y)
    answer = found.answer({"knn": way(every, every)})
    np.testing.assert_array_equal(answer.argmax(1), way(every, every).argmax(1))
    assert found.temperature > 1
    assert 2 / 3 < answer.max(1).mean() < 0.75


def test_a_way_that_only_remembers_overlapping_windows_is_not_judged_on_them() -> None:
    """Labels are by chance and embeddings drift with time. If single samples were left out, the nearest in time would
    give the label away."""
    rng = np.random.default_rng(0)
    y = np.repeat(rng.integers(0, 2, 40), 4)
    z = np.arange(len(y)) + rng.normal(scale=0.3, size=len(y))

    def nearest(train: Array, test: Array) -> Array:
        return np.eye(2, dtype=np.float32)[y[train][np.abs(z[test][:, None] - z[train]).argmin(1)]]

    rows = np.arange(len(y))
    leaked = np.mean([nearest(np.delete(rows, k), rows[k : k + 1]).argmax() == y[k] for k in rows])
    assert leaked > mixture_of({"knn": nearest}, y).ways["knn"].accuracy + 0.1


@pytest.mark.parametrize("y", [Y, np.tile([0, 1, 2], 9), np.r_[np.zeros(40, int), 1, 2, 2], np.array([0, 0])])
def test_folds_judge_each_sample_once_and_never_learn_from_its_neighbours(y: Array) -> None:
    parts = list(folds(y))
    tested = np.concatenate([test for _, test in parts])
    alone = [label for label in np.unique(y) if (y == label).sum() == 1]
    assert sorted(tested) == list(np.flatnonzero(~np.isin(y, alone)))
    for train, test in parts:
        assert not set(train) & set(test)
        assert set(y[train]) == set(y), "every class is learned from"
        beside = [row for row in train if any(abs(row - other) == 1 and y[row] == y[other] for other in test)]
        assert all((y[train] == y[row]).sum() == 1 for row in beside), "only where its class has no other"


def test_many_samples_are_judged_on_a_share_of_each_class() -> None:
    y = np.repeat([0, 1, 2], [3000, 200, 4])
    seen: list[Array] = []

    def way(train: Array, test: Array) -> Array:
        seen.append(test)
        return np.eye(3, dtype=np.float32)[y[test]]

    assert mixture_of({"none": way}, y).samples == MAX_SAMPLES
    assert np.bincount(y[np.concatenate(seen)])[2] == 4
    assert len(seen) == module.FOLDS
