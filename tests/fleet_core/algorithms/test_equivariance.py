"""Methods that compare representations do not depend on label numbers: what a device draws, learns and answers is
permuted with them (identity 6, the ALID setting of Acar et al.)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.data.episodes import Episodes, Shots, draws
from fleet_core.personalization.nearest import Prototypes
from tests.support.simulation import Fleet, flat, hyper_of, max_difference, toy_layout, toy_samples

Array = np.ndarray[Any, Any]
ROTATED = np.array([2, 4, 0, 1, 3])
PROTO = [name for name, method in METHODS.items() if method.adaptation in ("proto", "metavers")]


def permuted(samples: tuple[Array, Array]) -> tuple[Array, Array]:
    x, y = samples
    return x, ROTATED[y]


def test_balanced_draws_are_even_and_named_by_the_setting() -> None:
    """As many samples of each class in support and query, all that there are of a rare one."""
    y = np.repeat([0, 1, 2, 3], [80, 10, 4, 1])
    hyper = METHODS["p-avg-proto"].hyper(support_batch=16, query_batch=10, draws="balanced")
    stream, left_out = draws(y, hyper, np.random.default_rng(0), by_class=True)
    for _ in range(3):
        support, query = next(stream)
        assert not set(support) & set(query)
        assert np.bincount(y[support]).tolist() == [5, 5, 2]
        assert np.bincount(y[query]).tolist() == [3, 3, 2]
    assert left_out() == {3: 1}


labels = st.lists(st.integers(0, 4), min_size=6, max_size=60).filter(lambda y: np.bincount(y).max() >= 2)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(y=labels, support=st.integers(1, 30), query=st.integers(1, 30), seed=st.integers(0, 9))
def test_no_draw_depends_on_the_number_of_a_label(y: list[int], support: int, query: int, seed: int) -> None:
    for kind in (Episodes, Shots):
        plain, other = (kind(labels, support, query, np.random.default_rng(seed)) for labels in (y, ROTATED[y]))
        for _ in range(5):
            for one, two in zip(next(plain), next(other), strict=True):
                np.testing.assert_array_equal(one, two)
        assert {int(ROTATED[k]): n for k, n in plain.left_out.items()} == other.left_out


@settings(max_examples=60, deadline=None)
@given(y=labels, shots=st.integers(1, 20), queries=st.integers(1, 20), seed=st.integers(0, 9))
def test_shots_are_so_many_of_every_class_on_each_side_and_disjoint(
    y: list[int], shots: int, queries: int, seed: int
) -> None:
    drawn, count = Shots(y, shots, queries, np.random.default_rng(seed)), np.bincount(y, minlength=5)
    assert drawn.left_out == {k: 1 for k in np.flatnonzero(count == 1)}
    for _ in range(3):
        support, query = next(drawn)
        assert not set(support) & set(query)
        assert len(set(support)) == len(support)
        for k in range(5):
            mine, asked = ((np.asarray(y)[part] == k).sum() for part in (support, query))
            if count[k] >= shots + queries:
                assert (mine, asked) == (shots, queries)
            elif count[k] >= 2:
                assert mine >= 1
                assert asked >= 1
                assert mine + asked == count[k]
            else:
                assert mine == asked == 0


def test_every_sample_of_a_class_can_be_drawn_to_either_side() -> None:
    drawn = Shots([0] * 6 + [1] * 9, 2, 3, np.random.default_rng(0))
    seen: list[set[int]] = [set(), set()]
    for _ in range(60):
        for side, part in zip(seen, next(drawn), strict=True):
            side.update(part.tolist())
    assert seen == [set(range(15))] * 2


def test_an_independent_hessian_batch_is_drawn_beside_the_episode() -> None:
    hyper = hyper_of("per-fedavg-exact", support_batch=5, query_batch=4, independent_hessian_batch=True)
    stream, _ = draws(np.arange(40) % 4, hyper, np.random.default_rng(0), by_class=False)
    for _ in range(4):
        support, query, third = next(stream)
        assert list(map(len, (support, query, third))) == [5, 4, 5]
        assert not set(support) & set(query)


# A device's training and answers --------------------------------------------------------------------------------------


def fleets(name: str, **hyper: Any) -> tuple[Fleet, Fleet]:
    """Two devices with the fleet's labels, and the same devices with labels of their own."""
    data = [toy_samples(60, 5, seed) for seed in (1, 2)]
    chosen = hyper_of(name, **{"support_batch": 20, "query_batch": 20, "shots": 4, "query_shots": 6, **hyper})
    layout = toy_layout(5)
    return Fleet(name, chosen, data, layout), Fleet(name, chosen, [permuted(own) for own in data], layout)


@pytest.mark.parametrize("name", PROTO)
def test_a_step_of_training_is_the_same_for_permuted_labels(name: str) -> None:
    """Up to the rounding of one step: sums over classes are taken in another order."""
    plain, other = fleets(name, local_steps=1, client_lr=0.05)
    for one, two in zip(plain.trained().values(), other.trained().values(), strict=True):
        size = max(np.abs(a).max() for a in flat(one.update.groups))
        assert size > 1e-3
        assert max_difference(one.update.groups, two.update.groups) < 1e-5 * size
        assert two.update.scalars == pytest.approx(dict(one.update.scalars), rel=1e-5)


@pytest.mark.parametrize("name", PROTO)
def test_a_fleet_whose_devices_number_their_classes_differently_learns_the_same(name: str) -> None:
    plain, other = fleets(name, local_steps=3, client_lr=0.01, clip_norm=1.0)
    for _ in range(3):
        plain.round()
        other.round()
    assert max_difference(plain.state.model, other.state.model) < 1e-4
    x, _ = toy_samples(40, 5, seed=9)
    for i in range(2):
        one, two = plain.answers(plain.data[i], x), other.answers(other.data[i], x)
        assert (ROTATED[one] == two).mean() > 0.95


@pytest.mark.parametrize("name", PROTO)
def test_for_fixed_weights_answers_are_permuted_to_the_bit(name: str) -> None:
    plain, other = fleets(name)
    x, _ = toy_samples(200, 5, seed=9)
    for i in range(2):
        one, two = plain.answers(plain.data[i], x), other.answers(other.data[i], x)
        np.testing.assert_array_equal(ROTATED[one], two)
        assert len(set(one)) == 5


def test_on_a_device_class_means_are_permuted_with_the_labels_to_the_bit() -> None:
    x, y = toy_samples(60, 5)
    plain, other = (Prototypes.from_support(lambda a: a, x, labels, 5) for labels in (y, ROTATED[y]))
    np.testing.assert_array_equal(other.prototypes[ROTATED], plain.prototypes)


def test_a_method_with_a_shared_head_does_know_the_numbers() -> None:
    plain, other = fleets("fedavg", local_steps=1)
    one, two = plain.trained()[0], other.trained()[0]
    assert max_difference(one.update.groups, two.update.groups) > 1e-3
