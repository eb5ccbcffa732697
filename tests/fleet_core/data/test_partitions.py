"""Partitions of a data set over devices, new devices and novel classes: what each one guarantees."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_core.base import schema
from fleet_core.base.errors import DataError
from fleet_core.data.partitions import (
    PARTITIONS,
    Newcomers,
    Share,
    hold_out,
    newcomers,
    partition,
    pool,
    support_query,
)
from fleet_core.data.partitions.by_class import Acid, Dirichlet, HalfAndHalf, PowerLaw, SomeClasses, falling_sizes
from fleet_core.data.partitions.by_client import Iid, Natural
from fleet_core.data.partitions.shares import Stock, apportion, cut
from fleet_core.data.samples import Samples
from fleet_core.data.time_split import by_time


def labelled(counts: Sequence[int], *, clients: int = 0, seed: int = 0, first: int = 0) -> Samples:
    """``counts[k]`` samples of class k in random order; x holds ``first`` and the numbers after it."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    names = np.array([f"c{rng.integers(clients)}" for _ in y]) if clients else None
    return Samples(first + np.arange(y.size)[:, None], y, names)


def set_pair(train_per_class: int, test_per_class: int, classes: int = 10) -> tuple[Samples, Samples]:
    train = labelled([train_per_class] * classes, clients=12)
    return train, labelled([test_per_class] * classes, clients=12, seed=1, first=len(train))


def counts_of(share: Share, whole: Samples, part: str = "train") -> dict[int, int]:
    return dict(Counter(whole.y[getattr(share, part)].tolist()))


def rows_of(shares: Sequence[Share]) -> list[list[int]]:
    return [[*share.train.tolist(), -1, *share.test.tolist()] for share in shares]


# every partition ----------------------------------------------------------------------------------------------------

CASES: dict[str, Any] = {
    "acid": Acid(10, 3, 20, 6),
    "alid": Acid(10, 3, 20, 6),
    "half-and-half": HalfAndHalf(10, 6, 2),
    "power-law": PowerLaw(10, 2, 10, 60),
    "dirichlet": Dirichlet(8, 5.0, 4),
    "classes": SomeClasses(9, 3),
    "natural": Natural(5, 0),
    "iid": Iid(7),
}
AS_ONE = {"power-law", "natural"}  # a train and a test set count as one


def test_every_partition_has_a_case_here_and_options_that_a_table_can_give() -> None:
    assert set(CASES) == set(PARTITIONS)
    for name, entry in PARTITIONS.items():
        assert entry.name == name
        options, problems = schema.read(entry.options, {})
        assert problems == []
        assert options == entry.options()


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_no_row_is_on_two_devices_or_on_both_sides_of_one(name: str, sets: int) -> None:
    train, test = set_pair(60, 30)
    given_sets = (train, test) if sets == 2 else (pool(train, test), None)
    shares = partition(name, CASES[name], *given_sets, seed=5)
    rows = np.concatenate([share.rows for share in shares])
    assert np.unique(rows).size == rows.size
    assert 0 <= rows.min() <= rows.max() < 900
    assert len({share.name for share in shares}) == len(shares) >= 7
    for share in shares:
        assert share.train.dtype == share.test.dtype == np.int64
        assert share.train.size > 0
        assert share.test.size > 0
        assert (np.diff(share.train) > 0).all()
        assert (np.diff(share.test) > 0).all()
        if sets == 2 and name not in AS_ONE:
            assert share.train.max() < len(train) <= share.test.min()


@pytest.mark.parametrize("name", CASES)
def test_a_seed_gives_the_same_shares_again_and_another_seed_others(name: str) -> None:
    train, test = set_pair(60, 30)

    def made(seed: int) -> list[tuple[str, tuple[int, ...] | None, list[int]]]:
        shares = partition(name, CASES[name], train, test, seed=seed)
        return [(s.name, s.labels, rows) for s, rows in zip(shares, rows_of(shares), strict=True)]

    assert made(3) == made(3)
    assert made(3) != made(4)


@pytest.mark.parametrize("name", CASES)
def test_classes_kept_out_are_on_no_device(name: str) -> None:
    train, test = set_pair(60, 30, classes=13)
    shares = partition(name, CASES[name], train, test, seed=1, without=(0, 4, 12))
    seen = set(pool(train, test).y[np.concatenate([share.rows for share in shares])].tolist())
    assert seen == set(range(13)) - {0, 4, 12}


def test_the_pool_is_what_rows_index() -> None:
    train, test = set_pair(60, 30)
    whole = pool(train, test)
    shares = partition("acid", CASES["acid"], train, test, seed=0)
    for share in shares:
        np.testing.assert_array_equal(whole.take(share.test).x, test.x[share.test - len(train)])
        np.testing.assert_array_equal(share.take(whole, share.train).y, train.y[share.train])
    assert whole.clients == train.clients
    assert pool(train) is train


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((300, 2), np.int64)}, "its samples are"),
        ({"x": np.zeros((300, 1), np.float32)}, "its samples are"),
        ({"classes": ("a", "b")}, "its classes are"),
        ({"client": None}, "only one of the two sets has 'client'"),
        ({"time": np.zeros(300)}, "only one of the two sets has 'time'"),
    ],
)
def test_sets_that_differ_make_no_pool(change: dict[str, Any], message: str) -> None:
    train, test = set_pair(60, 30)
    with pytest.raises(DataError, match=message):
        pool(train, replace(test, **change))


# counts -------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    shares=st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3).filter(any), min_size=1, max_size=5),
    total=st.integers(0, 10**6),
)
def test_a_number_is_apportioned_whole_and_within_one_of_each_share(shares: list[list[float]], total: int) -> None:
    weights = np.array(shares)
    given_out = apportion(weights, np.full(len(shares), total))
    exact = weights / weights.sum(axis=1, keepdims=True) * total
    assert (given_out.sum(axis=1) == total).all()
    assert (np.abs(given_out - exact) < 1 + 1e-6).all()
    assert (given_out >= 0).all()


@settings(deadline=None)
@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any), fraction=st.floats(0.01, 0.99))
def test_a_cut_leaves_something_on_both_sides_and_every_larger_class_on_the_first(
    counts: list[int], fraction: float
) -> None:
    row, total = np.array(counts), sum(counts)
    first = cut(row[None], fraction)[0]
    assert ((first >= 0) & (first <= row)).all()
    assert 1 <= first.sum() <= max(1, total - 1)
    assert (first[row >= 2] >= 1).all()
    assert (np.abs(first - fraction * row) < 2).all()
    assert total * fraction - 1 <= first.sum() <= max(1, total * fraction + 0.5) + np.count_nonzero(row >= 2)


def test_a_cut_is_rounded_and_stratified() -> None:
    assert cut(np.array([[10], [6], [1], [0]]), 0.25).tolist() == [[3], [2], [1], [0]]
    assert cut(np.array([[40, 20, 4], [1, 1, 30]]), 0.75).tolist() == [[30, 15, 3], [1, 1, 22]]


# acid and alid ------------------------------------------------------------------------------------------------------

devices = st.integers(1, 12)


@settings(deadline=None, max_examples=50)
@given(
    devices=devices, classes=st.integers(1, 8), data=st.data(), one=st.booleans(),
    name=st.sampled_from(["acid", "alid"]),
)
def test_a_device_holds_consecutive_classes_in_equal_parts(
    devices: int, classes: int, data: st.DataObject, one: bool, name: str
) -> None:
    each = data.draw(st.integers(1, classes))
    sizes = {part: data.draw(st.integers(each, 3 * each + 2)) for part in ("train", "test")}
    samples = labelled([devices * 5] * classes)
    sets = (labelled([devices * 10] * classes), None) if one else (samples, labelled([devices * 5] * classes, seed=1))
    whole = pool(*sets)
    shares = partition(name, Acid(devices, each, sizes["train"], sizes["test"]), *sets, seed=0)
    assert len(shares) == devices
    for i, share in enumerate(shares):
        for part, size in sizes.items():
            counts = counts_of(share, whole, part)
            assert set(counts) == {(i + j) % classes for j in range(each)}
            assert sum(counts.values()) == size
            assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("each", [3, 5, 7])
def test_acid_of_a_tenth_of_cifar_uses_every_sample(each: int) -> None:
    train, test = set_pair(500, 100)
    shares = partition("acid", Acid(100, each, 50, 10), train, test, seed=2)
    assert [share.name for share in shares] == [f"device-{i:02}" for i in range(100)]
    assert sorted(np.concatenate([share.rows for share in shares]).tolist()) == list(range(6000))


def test_a_device_of_alid_numbers_its_classes_for_itself() -> None:
    train, test = set_pair(60, 30)
    named = (replace(train, classes=tuple("abcdefghij")), replace(test, classes=tuple("abcdefghij")))
    whole = pool(*named)
    shares = partition("alid", Acid(20, 5, 20, 10), *named, seed=0)
    orders = set()
    for i, share in enumerate(shares):
        assert share.labels is not None
        assert set(share.labels) == {(i + j) % 10 for j in range(5)}
        own = share.relabelled(whole.y[share.rows])
        assert set(own.tolist()) == set(range(5))
        np.testing.assert_array_equal(np.array(share.labels)[own], whole.y[share.rows])
        taken = share.take(whole, share.test)
        np.testing.assert_array_equal(taken.x, whole.x[share.test])
        assert taken.classes is not None
        assert [taken.classes[k] for k in taken.y] == ["abcdefghij"[k] for k in whole.y[share.test]]
        orders.add(tuple((label - i) % 10 for label in share.labels))
    assert len(orders) > 10


def test_a_device_of_alid_has_no_label_for_a_class_that_it_does_not_hold() -> None:
    nothing = np.empty(0, np.int64)
    share = Share("device-3", nothing, nothing, (7, 2, 5))
    assert share.relabelled(np.array([2, 5, 7, 7])).tolist() == [1, 2, 0, 0]
    for strange in (0, 3, 9):
        with pytest.raises(DataError, match=rf"device-3: has no class {strange}; expected one of 2, 5, 7"):
            share.relabelled(np.array([2, strange]))
    y = np.array([1, 99])
    assert Share("device-0", nothing, nothing).relabelled(y) is y


# half-and-half ------------------------------------------------------------------------------------------------------


def test_half_of_fallahs_users_hold_five_classes_and_each_other_a_pair_of_its_own() -> None:
    train, test = set_pair(1100, 275)
    whole = pool(train, test)
    shares = partition("half-and-half", HalfAndHalf(50, 40, 10), train, test, seed=0)
    pairs = set()
    for i, share in enumerate(shares):
        for part, a in (("train", 40), ("test", 10)):
            counts = counts_of(share, whole, part)
            if i < 25:
                assert counts == {k: a for k in range(5)}
            else:
                low, high = sorted(counts)
                assert counts == {low: a // 2, high: 2 * a}
                assert low < 5 <= high
                pairs.add((low, high))
    assert len(pairs) == 25
    pure = partition("half-and-half", HalfAndHalf(50, 40, 10, mixed=False), train, test, seed=0)
    assert [len(counts_of(share, whole)) for share in pure] == [5] * 25 + [1] * 25
    assert all(min(counts_of(share, whole)) >= 5 for share in pure[25:])


@pytest.mark.parametrize(
    ("a", "train", "test", "a_test"),
    [(196, 6000, 1000, 32), (68, 5000, 1000, 14), (2, 600, 60, 2)],
    ids=["MNIST", "CIFAR-10", "at least two"],
)
def test_the_test_images_keep_the_proportion_of_the_two_sets(a: int, train: int, test: int, a_test: int) -> None:
    sets = labelled([train] * 10), labelled([test] * 10)
    shares = partition("half-and-half", HalfAndHalf(4, a), *sets, seed=0)
    assert counts_of(shares[0], pool(*sets), "test") == {k: a_test for k in range(5)}


# power-law ----------------------------------------------------------------------------------------------------------


def test_sizes_fall_by_a_power_law_from_the_most_to_the_least() -> None:
    sizes = falling_sizes(20, 1165, 3834)
    assert (sizes[0], sizes[-1], sizes.sum()) == (3834, 1165, 34_935)
    ratios = sizes[[0, 1, 3, 7, 4]] / sizes[[1, 3, 7, 15, 9]]  # from rank r to rank 2 r
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-3)
    assert falling_sizes(1, 5, 9).tolist() == [9]


def test_devices_of_the_power_law_hold_two_classes_and_train_on_three_quarters() -> None:
    train, test = set_pair(300, 60)
    whole = pool(train, test)
    shares = partition("power-law", PowerLaw(20, 2, 40, 160), train, test, seed=0)
    assert sorted(share.rows.size for share in shares) == sorted(falling_sizes(20, 40, 160).tolist())
    assert [share.rows.size for share in shares] != falling_sizes(20, 40, 160).tolist()
    assert any(share.train.max() >= len(train) for share in shares)
    for i, share in enumerate(shares):
        counts = counts_of(share, whole, "rows")
        assert set(counts) == {i % 10, (i + 1) % 10}
        assert max(counts.values()) - min(counts.values()) <= 1
        assert abs(share.train.size - 0.75 * share.rows.size) <= 1


# dirichlet ----------------------------------------------------------------------------------------------------------


def test_class_proportions_have_the_mean_and_the_spread_of_a_dirichlet_distribution() -> None:
    samples, p, alpha = labelled([9000, 6000, 3000]), np.array([1 / 2, 1 / 3, 1 / 6]), 4.0
    shares = partition("dirichlet", Dirichlet(300, alpha), samples, labelled([900, 600, 300]), seed=1)
    assert len({share.train.size for share in shares}) == 1
    drawn = np.array([np.bincount(samples.y[share.train], minlength=3) for share in shares]) / shares[0].train.size
    np.testing.assert_allclose(drawn.mean(axis=0), p, atol=0.03)
    np.testing.assert_allclose(drawn.var(axis=0), p * (1 - p) / (alpha + 1), rtol=0.2)


def test_a_device_is_evaluated_on_the_proportions_that_it_learns_from() -> None:
    train, test = set_pair(2000, 1000, classes=4)
    whole = pool(train, test)
    shares = partition("dirichlet", Dirichlet(10, 2.0), train, test, seed=0)
    for share in shares:
        learned = np.bincount(whole.y[share.train], minlength=4) / share.train.size
        evaluated = np.bincount(whole.y[share.test], minlength=4) / share.test.size
        np.testing.assert_allclose(evaluated, learned, atol=1 / share.test.size + 1 / share.train.size)


def test_devices_of_a_dirichlet_draw_are_as_large_as_its_rarest_class_allows() -> None:
    train, test = set_pair(200, 100, classes=4)
    shares = partition("dirichlet", Dirichlet(6, 1.0), train, test, seed=0)
    used = np.bincount(train.y[np.concatenate([share.train for share in shares])], minlength=4)
    assert 200 - 6 <= used.max() <= 200
    for seed in range(20):  # what rounding adds never asks for more than there is
        almost_even = partition("dirichlet", Dirichlet(7, 1e6), train, test, seed=seed)
        assert {share.train.size for share in almost_even} <= {111, 112, 113, 114}


def test_proportions_that_leave_too_few_samples_are_drawn_again_and_not_for_ever() -> None:
    train, test = set_pair(300, 300, classes=5)
    first = partition("dirichlet", Dirichlet(6, 0.5), train, test, seed=0)[0].train.size
    again = partition("dirichlet", Dirichlet(6, 0.5, min_samples=first + 1), train, test, seed=0)[0].train.size
    assert again > first
    message = r"100 draws .* gave each device \d+ samples at most; expected min_samples, 251"
    with pytest.raises(DataError, match=message):
        partition("dirichlet", Dirichlet(6, 0.5, min_samples=251), train, test, seed=0)


# classes ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(devices=devices, classes=st.integers(2, 8), data=st.data(), seed=st.integers(0, 99))
def test_a_class_is_divided_whole_among_devices_that_no_other_class_outnumbers(
    devices: int, classes: int, data: st.DataObject, seed: int
) -> None:
    each = data.draw(st.integers(1, classes))
    train, test = set_pair(50, 40, classes)
    whole = pool(train, test)
    shares = partition("classes", SomeClasses(devices, each), train, test, seed=seed)
    held = [counts_of(share, whole) for share in shares]
    assert all(len(counts) == each for counts in held)
    assert [set(counts) for counts in held] == [set(counts_of(share, whole, "test")) for share in shares]
    holders = [[counts[k] for counts in held if k in counts] for k in range(classes)]
    assert max(map(len, holders)) - min(map(len, holders)) <= 1
    for parts in holders:
        assert sum(parts) in (0, 50)
        assert not parts or max(parts) - 1 <= 1.5 * (min(parts) + 1)


def test_devices_draw_their_classes() -> None:
    train, test = set_pair(60, 30)
    drawn = [
        [tuple(counts_of(share, train)) for share in partition("classes", SomeClasses(5, 2), train, test, seed=seed)]
        for seed in range(6)
    ]
    assert all(Counter(k for pair in pairs for k in pair) == Counter(range(10)) for pairs in drawn)
    assert len({frozenset(map(frozenset, pairs)) for pairs in drawn}) == 6


def test_parts_of_a_class_are_unequal_and_alike_in_both_sets() -> None:
    train, test = set_pair(6000, 3000, classes=2)
    shares = partition("classes", SomeClasses(6, 1), train, test, seed=0)
    sizes = np.array([share.train.size for share in shares])
    assert sizes.max() > 1.1 * sizes.min()
    np.testing.assert_allclose(sizes / 2, [share.test.size for share in shares], atol=1)


# natural and iid ----------------------------------------------------------------------------------------------------


def test_a_natural_device_holds_all_samples_of_one_client_of_both_sets() -> None:
    train, test = set_pair(30, 10)
    whole = pool(train, test)
    assert whole.client is not None
    shares = partition("natural", Natural(train_fraction=0.6), train, test, seed=0)
    assert tuple(share.name for share in shares) == whole.clients
    for share in shares:
        assert set(whole.client[share.rows].tolist()) == {share.name}
        assert share.rows.size == (whole.client == share.name).sum()
        assert abs(share.train.size - 0.6 * share.rows.size) <= 3
        asked = {k for k, n in counts_of(share, whole, "rows").items() if n >= 2} & set(counts_of(share, whole, "test"))
        assert asked <= set(counts_of(share, whole))


def test_small_clients_are_left_out_and_no_more_are_chosen_than_asked() -> None:
    y = np.zeros(18, np.int64)
    names = np.repeat(["a", "b", "c", "d", "e"], [5, 1, 4, 3, 5])
    samples = Samples(np.zeros((18, 1)), y, names)
    assert [s.name for s in partition("natural", Natural(4), samples, seed=0)] == ["a", "c", "e"]
    chosen = {tuple(s.name for s in partition("natural", Natural(2, 3), samples, seed=seed)) for seed in range(40)}
    assert chosen == {("a", "c", "d"), ("a", "c", "e"), ("a", "d", "e"), ("c", "d", "e")}
    with pytest.raises(DataError, match="no client has 6 samples; expected min_samples up to 5"):
        partition("natural", Natural(6), samples, seed=0)
    with pytest.raises(DataError, match="the samples name no client"):
        partition("natural", Natural(), Samples(np.zeros((18, 1)), y), seed=0)


def test_of_a_large_client_a_random_part_is_taken_and_small_ones_stay_whole() -> None:
    samples = Samples(np.zeros((18, 1)), np.zeros(18, np.int64), np.repeat(["a", "b"], [12, 6]))
    draws = [partition("natural", Natural(max_samples=8), samples, seed=seed) for seed in range(5)]
    assert all([share.rows.size for share in shares] == [8, 6] for shares in draws)
    assert all(set(share.rows) <= set(range(12)) for share, _ in draws)
    assert len({tuple(sorted(share.rows)) for share, _ in draws}) > 1


def test_a_split_by_time_is_that_of_by_time() -> None:
    rng = np.random.default_rng(0)
    samples = replace(labelled([40, 40], clients=3), time=rng.random(80))
    train, evaluation = by_time(samples, 0.7)
    shares = partition("natural", Natural(split="time", train_fraction=0.7), samples, seed=0)
    assert [sorted(train.of_client(s.name).x[:, 0].tolist()) for s in shares] == [s.train.tolist() for s in shares]
    assert [sorted(evaluation.of_client(s.name).x[:, 0].tolist()) for s in shares] == [s.test.tolist() for s in shares]


def test_iid_devices_are_equal_parts_of_all_samples() -> None:
    train, test = set_pair(33, 17)
    shares = partition("iid", Iid(7), train, test, seed=0)
    assert sorted(np.concatenate([share.rows for share in shares]).tolist()) == list(range(500))
    assert {share.train.size for share in shares} == {330 // 7, 330 // 7 + 1}
    assert {share.test.size for share in shares} == {170 // 7, 170 // 7 + 1}
    alone = partition("iid", Iid(7, train_fraction=0.5), pool(train, test), seed=0)
    assert sorted(np.concatenate([share.rows for share in alone]).tolist()) == list(range(500))
    assert all(abs(share.train.size - share.test.size) <= 10 for share in alone)


# novel classes ------------------------------------------------------------------------------------------------------


def test_newcomers_hold_nothing_but_the_classes_that_all_others_lack() -> None:
    train, test = set_pair(60, 30, classes=16)
    whole, novel = pool(train, test), (1, 5, 9, 12, 14, 15)
    others = partition("classes", SomeClasses(9, 3), train, test, seed=0, without=novel)
    fresh = newcomers(Newcomers(7, 5, 5, 6), train, test, novel, seed=0)
    rows = np.concatenate([share.rows for share in (*others, *fresh)])
    assert np.unique(rows).size == rows.size
    assert [share.name for share in fresh] == [f"new-{i}" for i in range(7)]
    for share in fresh:
        assert share.labels is not None
        assert set(share.labels) < set(novel)
        assert counts_of(share, whole) == {k: 5 for k in share.labels}
        assert counts_of(share, whole, "test") == {k: 6 for k in share.labels}
        assert sorted(set(share.relabelled(whole.y[share.train]).tolist())) == list(range(5))
    assert len({share.labels for share in fresh}) > 4
    assert rows_of(fresh) == rows_of(newcomers(Newcomers(7, 5, 5, 6), train, test, novel, seed=0))
    assert rows_of(fresh) != rows_of(newcomers(Newcomers(7, 5, 5, 6), train, test, novel, seed=1))


def test_newcomers_that_cannot_be_made_are_refused() -> None:
    train, test = set_pair(60, 30, classes=6)
    refused: dict[str, tuple[Newcomers, Sequence[int]]] = {
        "newcomers: 5 classes per device where 3 occur": (Newcomers(), (1, 2, 3)),
        "newcomers: no sample is of class 9": (Newcomers(), (1, 2, 3, 4, 5, 9)),
        "newcomers: has no samples to divide": (Newcomers(), ()),
        "class 1 has 90 samples in the two sets together, 100 are wanted": (Newcomers(5, 5), (1, 2, 3, 4, 5)),
        "newcomers: shots: 0 is below the least allowed, 1": (Newcomers(shots=0), (1, 2, 3, 4, 5)),
    }
    for message, (options, novel) in refused.items():
        with pytest.raises(DataError, match=message):
            newcomers(options, train, test, novel, seed=0)


# new devices --------------------------------------------------------------------------------------------------------


def some_shares(count: int) -> list[Share]:
    return [Share(f"d{i}", np.array([2 * i]), np.array([2 * i + 1])) for i in range(count)]


@settings(deadline=None)
@given(count=st.integers(3, 120), seed=st.integers(0, 9))
def test_held_out_devices_are_a_tenth_and_a_tenth_and_no_device_is_in_two_parts(count: int, seed: int) -> None:
    shares = some_shares(count)
    parts = hold_out(shares, seed=seed)
    assert sorted(s.name for part in parts for s in part) == sorted(s.name for s in shares)
    for part, fraction in zip(parts, (0.8, 0.1, 0.1), strict=True):
        assert len(part) >= 1
        assert abs(len(part) - fraction * count) < 2
        assert [shares.index(share) for share in part] == sorted(shares.index(share) for share in part)


def test_held_out_devices_are_a_choice_of_the_seed() -> None:
    shares = some_shares(30)
    chosen = [tuple(share.name for share in hold_out(shares, seed=seed)[2]) for seed in range(8)]
    assert len(set(chosen)) > 5
    assert chosen[3] == tuple(share.name for share in hold_out(shares, seed=3)[2])
    assert [len(part) for part in hold_out(shares, (0.5, 0, 0.5), seed=0)] == [15, 0, 15]


@pytest.mark.parametrize(
    ("count", "fractions", "message"),
    [
        (2, (0.8, 0.1, 0.1), "2 devices for 3 parts"),
        (0, (1.0, 0, 0), "0 devices for 1 parts"),
        (30, (0.8, 0.1, 0.2), r"fractions of \(0.8, 0.1, 0.2\)"),
        (30, (1.2, -0.1, -0.1), "fractions of"),
        (30, (float("nan"), 0.5, 0.5), "fractions of"),
    ],
)
def test_parts_that_are_no_whole_are_refused(count: int, fractions: tuple[float, float, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        hold_out(some_shares(count), fractions, seed=0)


@settings(deadline=None)
@given(
    y=st.lists(st.integers(0, 6), min_size=2, max_size=60).filter(lambda y: max(map(y.count, y)) >= 2),
    fraction=st.sampled_from([0.2, 0.5, 0.9]),
    seed=st.integers(0, 9),
    cut_at=st.integers(1, 60),
)
def test_every_class_that_is_requested_was_shown(y: list[int], fraction: float, seed: int, cut_at: int) -> None:
    offset = 4
    labels = np.array([99] * offset + y)
    rows = np.arange(offset, offset + len(y))
    share = Share("d", rows[:cut_at], rows[cut_at:])
    support, query = support_query(share, labels, fraction, seed=seed)
    assert sorted([*support.tolist(), *query.tolist()]) == rows.tolist()
    assert query.size > 0
    assert set(labels[support].tolist()) == set(y)
    assert all(y.count(label) >= 2 for label in labels[query].tolist())
    for label in set(y):
        assert abs((labels[support] == label).sum() - fraction * y.count(label)) < 2


def test_support_and_query_are_random_for_seed_and_device() -> None:
    y = np.repeat(np.arange(4), 25)
    rows = np.arange(100)
    drawn = {
        (name, seed): support_query(Share(name, rows[:70], rows[70:]), y, 0.2, seed=seed)[0].tolist()
        for name in ("a", "b")
        for seed in range(3)
    }
    assert all(np.bincount(y[support]).tolist() == [5] * 4 for support in drawn.values())
    assert len({tuple(support) for support in drawn.values()}) == 6
    assert drawn["a", 2] == support_query(Share("a", rows[:70], rows[70:]), y, 0.2, seed=2)[0].tolist()


def test_support_and_query_that_cannot_be_told_apart_are_refused() -> None:
    y, share = np.array([0, 1, 2, 2]), Share("d", np.array([0]), np.array([1, 2]))
    with pytest.raises(DataError, match="d: no class has two samples among 3"):
        support_query(share, y, 0.5, seed=0)
    for fraction in (0.0, 1.0, float("nan")):
        with pytest.raises(DataError, match="a support fraction of"):
            support_query(Share("d", np.array([2]), np.array([3])), y, fraction, seed=0)


# refusals -----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, Any, str]] = {
    "more classes than there are": ("acid", Acid(10, 11, 20, 11), "11 classes per device where 10 occur"),
    "more classes than there are, alid": ("alid", Acid(10, 11, 20, 11), "expected classes_per_device up to 10"),
    "more classes than there are, classes": ("classes", SomeClasses(9, 11), "11 classes per device where 10 occur"),
    "more classes than there are, power-law": ("power-law", PowerLaw(9, 11), "11 classes per device where 10 occur"),
    "classes without a sample": ("acid", Acid(10, 5, 20, 4), "5 classes in 4 samples of a device"),
    "training set too small": ("acid", Acid(10, 5, 61, 20), "class 4 has 60 samples in the train set, 61 are wanted"),
    "test set too small": ("alid", Acid(10, 5, 20, 31), "class 4 has 30 samples in the test set, 31 are wanted"),
    "half-and-half too large": ("half-and-half", HalfAndHalf(50), "class 0 has 60 samples in the train set, 5390"),
    "an odd number of images": ("half-and-half", HalfAndHalf(4, 7), "half of 7 images; expected an even a"),
    "an odd number of test images": ("half-and-half", HalfAndHalf(4, 6, 3), "half of 3 images; expected an even a"),
    "power law too large": ("power-law", PowerLaw(), "class 0 has 90 samples in the two sets together"),
    "power law upside down": ("power-law", PowerLaw(9, 2, 50, 40), "least is 50; expected no more than most, 40"),
    "more holders than samples": ("classes", SomeClasses(400), "class 0 has 60 samples in the train set, 80 are"),
    "more iid devices than samples": ("iid", Iid(301), "300 samples in the test set for 301 devices"),
    "no devices": ("iid", Iid(0), "devices: 0 is below the least allowed, 1"),
    "a fraction of one": ("iid", Iid(7, 1.0), "train_fraction: 1.0 is over the limit of 0.99"),
    "two mistakes": ("natural", Natural(1, 0, "tme"), r"min_samples: 1 is below .*\n.*did you mean 'time'"),
    "options of another": ("iid", Natural(), "partition 'iid': options of Natural; expected Iid"),
    "no such partition": ("acidd", Acid(), r"no partition 'acidd' \(did you mean 'acid'\?\); expected one of acid"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_cannot_work_is_refused_before_a_row_is_dealt(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, options, message = REFUSED[mistake]
    train, test = set_pair(60, 30)
    monkeypatch.setattr(Stock, "deal", lambda *_: pytest.fail("dealt"))
    with pytest.raises(DataError, match=message):
        partition(name, options, train, test, seed=0)


def test_every_short_class_is_named_up_to_ten() -> None:
    train, test = set_pair(60, 30, classes=12)
    with pytest.raises(DataError) as told:
        partition("acid", Acid(12, 2, 80, 40), train, test, seed=0)
    lines = str(told.value).splitlines()
    assert lines[0] == "partition 'acid': class 0 has 60 samples in the train set, 80 are wanted"
    assert len(lines) == 12
    assert lines[-2:] == ["and 14 more", "hint: use fewer devices, or fewer samples for each"]


REFUSED_SETS: dict[str, tuple[Callable[[], Any], str]] = {
    "one set without a_test": (
        lambda: partition("half-and-half", HalfAndHalf(4, 2), labelled([60] * 10), seed=0), "a_test is missing"
    ),
    "half-and-half of nine classes": (
        lambda: partition("half-and-half", HalfAndHalf(4, 2, 2), labelled([60] * 9), seed=0), "9 classes occur"
    ),
    "both parts of one set": (
        lambda: partition("acid", Acid(10, 5, 40, 21), labelled([60] * 10), seed=0),
        "class 4 has 60 samples in the set, 61 are wanted",
    ),
    "devices with nothing to be evaluated on": (
        lambda: partition("classes", SomeClasses(1, 1, 0.5), labelled([1]), seed=0),
        "class 0 has 1 samples in the set, 2 are wanted",
    ),
    "a class that only the test set has": (
        lambda: partition("dirichlet", Dirichlet(2), labelled([9, 0, 9]), labelled([9, 9, 9]), seed=0),
        "class 1 has no sample in the train set",
    ),
    "a class that the test set lacks": (
        lambda: partition("dirichlet", Dirichlet(2, 5.0, 2), labelled([9, 9]), labelled([9, 0]), seed=0),
        "2 of 2 devices would have no training or no test samples",
    ),
    "half-and-half without training samples": (
        lambda: partition("half-and-half", HalfAndHalf(4, 2), labelled([]), labelled([9] * 10), seed=0),
        "class 0 has 0 samples in the train set",
    ),
    "dirichlet without training samples": (
        lambda: partition("dirichlet", Dirichlet(2), labelled([]), labelled([9, 9]), seed=0),
        "class 0 has no sample in the train set",
    ),
    "no samples": (lambda: partition("iid", Iid(1), labelled([]), seed=0), "has no samples to divide"),
    "every class kept out": (
        lambda: partition("iid", Iid(1), labelled([5, 5]), seed=0, without=(0, 1)), "has no samples to divide"
    ),
    "an unknown class kept out": (
        lambda: partition("iid", Iid(1), labelled([5, 5]), seed=0, without=(1, 7)), "has no class 7 to exclude"
    ),
    "clients of one set only": (
        lambda: partition("natural", Natural(), labelled([9], clients=2), labelled([9]), seed=0),
        "only one of the two sets has 'client'",
    ),
    "a negative seed": (lambda: partition("iid", Iid(1), labelled([5]), seed=-1), "a seed of -1"),
}


@pytest.mark.parametrize("mistake", REFUSED_SETS)
def test_sets_that_cannot_be_divided_are_refused(mistake: str) -> None:
    make, message = REFUSED_SETS[mistake]
    with pytest.raises(DataError, match=message):
        make()


# the real sets ------------------------------------------------------------------------------------------------------


def idx_labels(path: Path) -> NDArray[np.int64]:
    return np.frombuffer(gzip.decompress(path.read_bytes())[8:], np.uint8).astype(np.int64)


def mnist(shared: Path) -> tuple[Samples, Samples]:
    writers = np.load(shared / "data/mnist-writers.npz")
    train = idx_labels(shared / "data/mnist-train-labels-idx1-ubyte.gz")
    test = idx_labels(shared / "data/mnist-t10k-labels-idx1-ubyte.gz")
    return (
        Samples(np.zeros((60_000, 1), np.uint8), train, writers["writer_train"].astype(np.str_)),
        Samples(np.zeros((10_000, 1), np.uint8), test, writers["writer_test"].astype(np.str_)),
    )


def test_mnist_divides_as_in_the_papers(shared: Path) -> None:
    train, test = mnist(shared)
    sizes = [share.rows.size for share in partition("power-law", PowerLaw(), train, test, seed=0)]
    assert (len(sizes), min(sizes), max(sizes), sum(sizes)) == (20, 1165, 3834, 34_935)
    halves = partition("half-and-half", HalfAndHalf(), train, test, seed=0)
    assert {(share.train.size, share.test.size) for share in halves} == {(980, 160), (490, 80)}
    assert len(partition("natural", Natural(), train, test, seed=0)) == 539 + 297
    with pytest.raises(DataError, match="class 5 has 892 samples in the test set, 1000 are wanted"):
        partition("acid", Acid(), train, test, seed=0)


def test_cifar_divides_as_in_the_papers(shared: Path) -> None:
    labels = np.load(shared / "data/cifar10-labels.npz")
    train, test = (Samples(np.zeros((y.size, 1)), y.astype(np.int64)) for y in (labels["y_train"], labels["y_test"]))
    shares = partition("alid", Acid(), train, test, seed=0)
    assert np.unique(np.concatenate([share.rows for share in shares])).size == 60_000
    assert {(share.train.size, share.test.size) for share in shares} == {(500, 100)}
    for count in (50, 100, 500):
        some = partition("classes", SomeClasses(count), train, test, seed=0)
        assert sum(share.rows.size for share in some) == 60_000
    halves = partition("half-and-half", HalfAndHalf(a=68), train, test, seed=0)
    assert {(share.train.size, share.test.size) for share in halves} == {(340, 70), (170, 35)}
