"""Choosing a way to personalize by cross-validation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleet_core.personalization import choose_way as module
from fleet_core.personalization.choose_way import LEAST, MAX_SAMPLES, SMALLEST, Way, choose_way, folds

Array = np.ndarray[Any, Any]

Y = np.repeat([0, 1, 2], 20)


def right_on(rows: Array, y: Array = Y, sure: float = 0.8) -> Way:
    """A way that answers ``rows`` rightly, with the probability ``sure``, and the other rows wrongly."""
    right = np.isin(np.arange(len(y)), rows)

    def way(train: Array, test: Array) -> Array:
        answered = np.where(right[test], y[test], (y[test] + 1) % 3)
        return np.where(np.eye(3)[answered] > 0, sure, (1 - sure) / 2).astype(np.float32)

    return way


def test_a_way_that_is_surely_better_replaces_the_first() -> None:
    found = choose_way({"none": right_on(np.arange(30)), "head": right_on(np.arange(55))}, Y)
    assert (found.way, found.samples) == ("head", 60)
    assert found.judged["none"].accuracy == 0.5
    assert found.judged["head"].accuracy == pytest.approx(55 / 60)
    assert found.judged["head"].log_likelihood == pytest.approx((55 * np.log(0.8) + 5 * np.log(0.1)) / 60)


@pytest.mark.parametrize("more", [0, 1])
def test_the_first_is_kept_if_another_is_better_by_at_most_one_standard_error(more: int) -> None:
    """One more right answer of 60 is 1/60; its standard error is as large."""
    assert choose_way({"none": right_on(np.arange(30)), "head": right_on(np.arange(30 + more))}, Y).way == "none"


def test_of_equally_accurate_ways_the_likelier_is_chosen() -> None:
    ways = {
        "none": right_on(np.arange(20)),
        "unsure": right_on(np.arange(50), sure=0.5),
        "sure": right_on(np.arange(50)),
    }
    assert choose_way(ways, Y).way == "sure"


@pytest.mark.parametrize("y", [np.zeros(0, int), np.array([1]), np.arange(30), np.repeat([0, 1, 2], LEAST // 3)])
def test_too_few_judged_samples_keep_the_first(y: Array) -> None:
    found = choose_way({"none": right_on(np.arange(0), y), "head": right_on(np.arange(len(y)), y)}, y)
    assert (found.way, found.judged) == ("none", {})
    assert found.samples < LEAST


def test_an_answer_that_is_impossible_counts_as_the_smallest_probability() -> None:
    found = choose_way({"none": right_on(np.arange(0), sure=1.0)}, Y)
    assert found.judged["none"].log_likelihood == pytest.approx(np.log(SMALLEST))


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
    assert leaked > choose_way({"knn": nearest}, y).judged["knn"].accuracy + 0.1


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

    assert choose_way({"none": way}, y).samples == MAX_SAMPLES
    assert np.bincount(y[np.concatenate(seen)])[2] == 4
    assert len(seen) == module.FOLDS
