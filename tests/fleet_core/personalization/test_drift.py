"""Whether samples have moved: measures, ranks, cumulative sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleet_core.personalization import drift
from fleet_core.personalization.drift import Reference, Sums
from fleet_core.personalization.nearest import Prototypes

Array = np.ndarray[Any, Any]
CENTRES = np.array([[0, 0, 0, 0], [6, 0, 0, 0], [0, 6, 0, 0]], np.float32)


def drawn(number: int, seed: int, shift: float = 0.0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, number)
    return (CENTRES[y] + rng.normal(size=(number, 4)) + shift).astype(np.float32), y


def reference(seed: int = 0, number: int = 300) -> Reference:
    z, y = drawn(number, seed)
    found = Reference.of(z, y, Prototypes.empty(3, 4).add(z, y))
    assert found is not None
    return found


def test_a_samples_measures_are_those_of_means_without_it() -> None:
    z, y = drawn(12, 3)
    means = Prototypes.empty(3, 4).add(z, y)
    rows = np.flatnonzero(means.counts[y] > 1)
    found = drift.measures(z[rows], means, y[rows])
    for row, distance, margin in zip(rows, *found, strict=True):
        others = np.arange(len(y)) != row
        alone = drift.measures(z[row : row + 1], Prototypes.empty(3, 4).add(z[others], y[others]))
        np.testing.assert_allclose((distance, margin), np.ravel(alone), rtol=1e-4)


def test_new_samples_of_the_same_kind_surprise_by_one_on_average() -> None:
    means = [reference(seed).surprise(drawn(2000, 100 + seed)[0]).mean(0) for seed in range(5)]
    np.testing.assert_allclose(np.mean(means, axis=0), 1, atol=0.1)


@pytest.mark.parametrize("shift", [2.0, -2.0, 10.0])
def test_a_shift_is_noticed_soon_and_the_same_kind_is_not(shift: float) -> None:
    known = reference()
    quiet = Sums().after(known.surprise(drawn(1000, 1)[0]))
    assert (quiet.moved, quiet.answered) == (False, 1000)
    moved = quiet.after(known.surprise(drawn(100, 2, shift)[0]))
    assert 1000 < moved.moved_at <= 1060
    assert moved.after(known.surprise(drawn(50, 3)[0])).moved_at == moved.moved_at


def test_sums_do_not_depend_on_how_answers_are_batched() -> None:
    surprise = reference().surprise(drawn(90, 4, 1.0)[0])
    apart = Sums()
    for row in surprise:
        apart = apart.after(row[None])
    assert apart == Sums().after(surprise)


def test_too_few_samples_or_one_class_make_no_reference() -> None:
    z, y = drawn(drift.LEAST - 1, 0)
    assert Reference.of(z, y, Prototypes.empty(3, 4).add(z, y)) is None
    z, y = drawn(100, 0)
    assert Reference.of(z, 0 * y, Prototypes.empty(3, 4).add(z, 0 * y)) is None


def test_a_reference_is_bounded_and_survives_storage() -> None:
    known = reference(number=3 * drift.MOST)
    assert len(known.distance) == len(known.margin) == drift.MOST
    again = Reference.stored(known.arrays(), known.means)
    assert again is not None
    np.testing.assert_array_equal(again.surprise(drawn(20, 1)[0]), known.surprise(drawn(20, 1)[0]))
    for damaged in ({}, {**known.arrays(), "drift_margin": np.zeros((30, 2), np.float32)},
                    {"drift_distance": known.distance}):
        assert Reference.stored(damaged, known.means) is None
