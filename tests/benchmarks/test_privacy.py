"""The benchmark of private updates: its page is what its result gives, and its noise costs what it says."""

from __future__ import annotations

import pytest

from benchmarks import markdown
from benchmarks.privacy.__main__ import DATA, DELTA, EPSILONS, PAGE, cells, noise_for, rows, table
from fleet_core.privacy.accountant import Accountant


def test_the_page_is_what_the_result_gives() -> None:
    text, found = PAGE.read_text(encoding="utf-8"), rows()
    assert markdown.filled(text, {data: table(found, data) for data in DATA}) == text


def test_a_result_is_of_cells_that_there_are_and_stays_below_its_epsilon() -> None:
    known = {(cell.data, cell.setting, cell.epsilon, cell.seed) for cell in cells()}
    for row in rows():
        assert (row["data"], row["setting"], row["epsilon"], row["seed"]) in known
        assert row.get("spent", 0.0) <= row["epsilon"]


@pytest.mark.parametrize("epsilon", [value for values in EPSILONS.values() for value in values if value])
def test_the_noise_is_the_least_for_its_epsilon(epsilon: float) -> None:
    noise, accountant = noise_for(epsilon, 10), Accountant(DELTA)
    assert accountant.epsilon({noise: 10}) <= epsilon < accountant.epsilon({noise / 1.01: 10})
