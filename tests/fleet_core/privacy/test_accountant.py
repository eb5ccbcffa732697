"""Epsilon: what the library says for known cases, and what devices have spent."""

from __future__ import annotations

import math
import sys

import dp_accounting
import pytest
from dp_accounting import pld

from fleet_core.base.errors import ConfigError
from fleet_core.privacy.accountant import Accountant, Spent

DELTA = 1e-5


@pytest.fixture(scope="module")
def accountant() -> Accountant:
    return Accountant(DELTA)


def exact(noise: float) -> float:
    """Epsilon of one Gaussian mechanism, from Balle and Wang 2018, Theorem 8, by bisection: delta falls in epsilon."""
    def law(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    def delta(epsilon: float) -> float:
        return law(0.5 / noise - epsilon * noise) - math.exp(epsilon) * law(-0.5 / noise - epsilon * noise)

    low, high = 0.0, 100.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > DELTA else (low, middle)
    return high


@pytest.mark.parametrize(("noise", "rounds"), [(2.0, 1), (4.0, 10), (8.0, 100)])
def test_epsilon_is_a_tight_bound_of_the_exact_one_with_half_of_the_noise(
    accountant: Accountant, noise: float, rounds: int
) -> None:
    """T rounds of noise z hide what one of z / sqrt(T) hides, and neighbours differ by 2 C."""
    found, known = accountant.epsilon({noise: rounds}), exact(noise / 2 / math.sqrt(rounds))
    assert known <= found < 1.1 * known


def test_the_librarys_two_accountants_agree(accountant: Accountant) -> None:
    other = pld.PLDAccountant()
    other.compose(dp_accounting.GaussianDpEvent(1.5), 1)
    assert other.get_epsilon(DELTA) == pytest.approx(exact(1.5), rel=1e-3)
    assert other.get_epsilon(DELTA) <= accountant.epsilon({3.0: 1})


def test_more_rounds_less_noise_and_known_cohorts_cost_more(accountant: Accountant) -> None:
    assert accountant.epsilon({}) == 0
    assert accountant.epsilon({4.0: 5}) < accountant.epsilon({4.0: 6}) < accountant.epsilon({3.0: 6})
    assert accountant.epsilon({4.0: 5, 3.0: 1}) > accountant.epsilon({4.0: 6})
    assert Accountant(DELTA, (10, 100)).epsilon({4.0: 5}) < 0.5 * accountant.epsilon({4.0: 5})


def test_the_device_that_was_asked_most_decides(accountant: Accountant) -> None:
    spent = Spent(accountant)
    assert (spent.epsilon, spent.most) == (0.0, 0)
    assert spent.after_another(2.0) == accountant.epsilon({2.0: 1})
    spent.add(["a", "b"], 2.0)
    spent.add(["b"], 3.0)
    assert spent.epsilon == accountant.epsilon({2.0: 1, 3.0: 1})
    assert spent.most == 2
    assert spent.after_another(2.0) == accountant.epsilon({2.0: 2, 3.0: 1})


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"privacy\.mode: epsilon needs dp-accounting.* not installed") as found:
        Accountant(DELTA)
    assert found.value.hint == 'pip install "metafleet[privacy]"'
