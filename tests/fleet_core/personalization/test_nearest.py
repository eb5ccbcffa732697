"""Neighbours on a device (kNN-Per): compared with brute force, with ties, with few samples, and with a fitted share."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_core.base.errors import StateError
from fleet_core.personalization import nearest
from fleet_core.personalization.linear_head import Head
from fleet_core.personalization.nearest import SHARES, Neighbours, Prototypes, softmax
from fleet_core.personalization.unknown_class import Thresholds

Array = np.ndarray[Any, Any]


def cloud(number: int, seed: int = 0, classes: int = 4) -> tuple[Array, Array]:
    """z float32 [number, 3] around a centre for each class, and labels of all classes but the last."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes - 1, number)
    return (np.eye(classes, 3)[y] + 0.6 * rng.normal(size=(number, 3))).astype(np.float32), y


def brute_force(z: Array, y: Array, classes: int, count: int, at: Array) -> Array:
    """Marfoq et al., eq. 5, one query and one neighbour after the other."""
    votes = np.zeros((len(at), classes))
    for row, query in enumerate(at):
        far = [float(np.linalg.norm(query.astype(float) - one.astype(float))) for one in z]
        for near in sorted(range(len(z)), key=lambda i: (far[i], i))[:count]:
            votes[row, y[near]] += np.exp(-far[near])
    return votes / votes.sum(1, keepdims=True)


def brute(z: Array, y: Array, start: int, stop: int) -> Array:
    """The votes of 5 others for the stored samples from ``start`` to ``stop``."""
    rows = [np.delete(np.arange(len(z)), i) for i in range(start, stop)]
    votes = [brute_force(z[rows[i - start]], y[rows[i - start]], 4, 5, z[i : i + 1]) for i in range(start, stop)]
    return np.concatenate(votes).astype(np.float32)


@settings(max_examples=30, deadline=None)
@given(stored=st.integers(1, 40), count=st.integers(1, 50), seed=st.integers(0, 99))
def test_votes_are_those_of_brute_force_also_with_fewer_samples_than_k(stored: int, count: int, seed: int) -> None:
    z, y = cloud(stored, seed)
    at, _ = cloud(7, seed + 1)
    found = Neighbours(z, y, 4, count, 0.5).votes(at)
    np.testing.assert_allclose(found, brute_force(z, y, 4, count, at), rtol=1e-5, atol=1e-7)
    assert (found[:, 3] == 0).all()


def test_of_equally_near_samples_the_earlier_votes() -> None:
    z = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)
    for y in ([0, 1, 2, 3], [3, 2, 1, 0]):
        found = Neighbours(z, np.array(y), 4, 2, 1.0).votes(np.zeros((1, 2), np.float32))
        np.testing.assert_allclose(found[0][y], [0.5, 0.5, 0, 0], atol=1e-7)
    rng = np.random.default_rng(0)
    many, labels = rng.integers(0, 4, (700, 1)).astype(np.float32), rng.integers(0, 4, 700)
    found = Neighbours(many, labels, 4, 7, 1.0).votes(many[:1])
    np.testing.assert_allclose(found, brute_force(many, labels, 4, 7, many[:1]), rtol=1e-6)


@pytest.mark.parametrize("far", [1e3, 1e18, 3e38])
def test_votes_are_finite_at_any_distance(far: float) -> None:
    z = np.array([[0, 0], [1, 1]], np.float32)
    found = Neighbours(z, np.array([0, 1]), 2, 2, 1.0).votes(np.array([[far, 0], [-far, far]], np.float32))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-6)


def test_a_stored_sample_that_is_not_finite_has_no_vote() -> None:
    z, at = np.array([[np.nan, 0], [0, 1], [np.inf, 0], [1, 0]], np.float32), np.zeros((2, 2), np.float32)
    for count in (2, 4):
        with np.errstate(invalid="ignore"):
            found = Neighbours(z, np.array([0, 1, 2, 3]), 4, count, 1.0).votes(at)
        np.testing.assert_allclose(found, [[0, 0.5, 0, 0.5]] * 2)


def test_more_queries_than_a_batch_are_answered_alike_and_none_at_all_too(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = cloud(30)
    at, _ = cloud(600, seed=1)
    neighbours = Neighbours(z, y, 4, 5, 1.0)
    found = neighbours.votes(at)
    monkeypatch.setattr(nearest, "MAX_DISTANCES", 100)
    np.testing.assert_array_equal(found, neighbours.votes(at))
    np.testing.assert_allclose(neighbours.votes(z, without_self=True)[2:9], brute(z, y, 2, 9), rtol=1e-5, atol=1e-7)
    assert neighbours.votes(at[:0]).shape == (0, 4)


def test_a_device_with_many_samples_answers_and_fits_with_little_more_memory_than_they_take() -> None:
    """Of float32 samples the fit of a head makes one float64 copy; what else is of their size is made in parts."""
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(20_000, 64)).astype(np.float32), rng.integers(0, 4, 20_000)
    neighbours, means = Neighbours(z, y, 4, 5, 1.0), Prototypes.empty(62, 2048).add(np.eye(62, 2048), np.arange(62))
    own_means = Prototypes.empty(4, 64).add(z, y)
    neighbours.votes(z[:1])
    assert peak_of(lambda: neighbours.votes(z[:1])) < z.nbytes
    assert peak_of(lambda: neighbours.votes(z[:256])) < 2 * z.nbytes
    assert peak_of(lambda: means.probabilities(np.ones((256, 2048), np.float32))) < 4 << 20
    assert peak_of(lambda: Thresholds.calibrate(z, y, own_means, 0.95)) < 2 * z.nbytes
    assert peak_of(lambda: Head.fit(z, y, 4, steps=2)) < 3 * z.nbytes


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that ``work`` held at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# The share of the neighbours ------------------------------------------------------------------------------------------


def test_the_answer_is_the_neighbours_share_of_the_votes_beside_the_heads() -> None:
    """Marfoq et al., eq. 6."""
    z, y = cloud(20)
    at, _ = cloud(6, seed=1)
    head = softmax(np.random.default_rng(2).normal(size=(6, 4))).astype(np.float32)
    for share in (0.0, 0.3, 1.0):
        neighbours = Neighbours.of(z, y, np.zeros((20, 4), np.float32), 5, share)
        assert neighbours.share == share
        wanted = share * brute_force(z, y, 4, 5, at) + (1 - share) * head
        np.testing.assert_allclose(neighbours.probabilities(at, head), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", range(6))
def test_the_share_is_the_smallest_with_the_best_leave_one_out_answers(seed: int) -> None:
    z, y = cloud(25, seed)
    head = softmax(2 * np.random.default_rng(seed).normal(size=(25, 4)) + 1.5 * np.eye(4)[y]).astype(np.float32)
    right = []
    for share in SHARES:
        answers = []
        for i in range(25):
            others = np.arange(25) != i
            votes = brute_force(z[others], y[others], 4, 5, z[i : i + 1])[0]
            answers.append(int(np.argmax(share * votes + (1 - share) * head[i])))
        right.append(int((np.array(answers) == y).sum()))
    found = Neighbours.of(z, y, head, 5, None)
    assert found.share == SHARES[int(np.argmax(right))]
    assert len(set(right)) > 1


def test_neighbours_have_no_share_beside_a_perfect_head_and_most_beside_a_wrong_one() -> None:
    z, y = np.repeat(np.eye(3, dtype=np.float32) * 20, 8, axis=0), np.repeat(np.arange(3), 8)
    sure, wrong = np.eye(3, dtype=np.float32)[y], np.eye(3, dtype=np.float32)[(y + 1) % 3]
    assert Neighbours.of(z, y, sure, 3, None).share == 0.0
    assert Neighbours.of(z, y, wrong, 3, None).share > 0.5


def test_a_single_sample_cannot_be_left_out_and_without_any_there_is_no_answer() -> None:
    z, head = np.zeros((1, 2), np.float32), np.array([[0.5, 0.5]], np.float32)
    assert Neighbours.of(z, np.array([1]), head, 3, None).share == 0.0
    with pytest.raises(StateError, match="no labelled sample"):
        Neighbours.of(z[:0], np.array([], np.int64), head[:0], 3, None)


# The fleet's class means ----------------------------------------------------------------------------------------------


def test_the_fleets_class_means_are_totals_over_counts_and_an_absent_class_is_never_answered() -> None:
    total, count = np.array([[2.0, 4], [0, 0], [9, 9]]), np.array([2.0, 0, 3])
    means = Prototypes.of_fleet({"prototypes": {"total": total, "count": count}})
    np.testing.assert_array_equal(means.prototypes, np.array([[1, 2], [0, 0], [3, 3]], np.float32))
    assert means.probabilities(np.array([[0, 0], [3, 3]], np.float32)).argmax(1).tolist() == [0, 2]


@pytest.mark.parametrize("distance", ["squared", "norm"])
def test_class_means_answer_by_either_distance_and_keep_it_through_a_file(distance: str, tmp_path: Path) -> None:
    z, y = cloud(30)
    at, _ = cloud(9, seed=1)
    means = Prototypes.from_support(lambda x: x, z, y, 4, "round 3", distance)
    far = np.stack([np.linalg.norm(at - z[y == k].mean(0), axis=1) for k in range(3)], 1)
    powers = np.exp(-(far**2 if distance == "squared" else far))
    wanted = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(means.probabilities(at)[:, :3], wanted, rtol=1e-4)
    means.save(tmp_path / "means")
    np.testing.assert_array_equal(Prototypes.load(tmp_path / "means").probabilities(at), means.probabilities(at))
