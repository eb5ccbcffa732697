"""fleet_core.personalization.ridge_head: a linear head for numbers."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_core.base.errors import DataError, StateError
from fleet_core.personalization import ridge_head
from fleet_core.personalization.ridge_head import DECAYS, RidgeHead


def made(samples: int, width: int = 8, noise: float = 0.1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    weight = np.random.default_rng(9).normal(size=(2, width))
    z = rng.normal(3, 2, (samples, width)).astype(np.float32)
    return z, z @ weight.T + 5 + noise * rng.normal(size=(samples, 2))


def test_a_linear_relation_is_found() -> None:
    z, y = made(60)
    later, wanted = made(200, seed=1)
    found = RidgeHead.fit(z, y).answers(later)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).mean() < 0.15


@pytest.mark.parametrize("samples", [5, 30])
def test_the_left_out_errors_are_those_of_fits_without_the_sample(samples: int) -> None:
    z, y = made(samples, noise=1.0)
    z = z.astype(np.float64)
    decay = 40.0
    left, singular, _ = np.linalg.svd(z - z.mean(0), full_matrices=False)
    target = y - y.mean(0)
    quick = ridge_head._left_out(left, singular, left.T @ target, target, decay)
    slow = []
    for i in range(samples):
        rest, own = np.delete(z, i, 0), np.delete(y, i, 0)
        centred = rest - rest.mean(0)
        weight = np.linalg.solve(centred.T @ centred + decay * np.eye(8), centred.T @ (own - own.mean(0)))
        slow.append(np.square((z[i] - rest.mean(0)) @ weight + own.mean(0) - y[i]).mean())
    assert quick == pytest.approx(np.mean(slow))


def test_noise_alone_is_answered_by_nearly_the_mean() -> None:
    rng = np.random.default_rng(2)
    z, y = rng.normal(size=(40, 30)).astype(np.float32), rng.normal(10, 1, (40, 1))
    head = RidgeHead.fit(z, y)
    assert head.decay >= DECAYS[-3]
    assert np.abs(head.answers(rng.normal(size=(100, 30))) - y.mean()).max() < 1


def test_one_sample_gives_its_own_target() -> None:
    z, y = made(1)
    np.testing.assert_allclose(RidgeHead.fit(z, y).answers(z), y, rtol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    z, y = made(4)
    with pytest.raises(StateError, match="no labelled sample"):
        RidgeHead.fit(z[:0], y[:0])
    with pytest.raises(DataError, match=r"embeddings \[4, 8\] with targets \[4\]"):
        RidgeHead.fit(z, y[:, 0])
    with pytest.raises(DataError, match="not finite"):
        RidgeHead.fit(z, np.full((4, 1), np.nan))
