"""A device that was away, or joins late, is not shut out of a fleet with duals whose updates have become small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.robust.norm_bound import TIMES
from fleet_core.robust.returning_devices import AWAY, FACT, FORGOTTEN, ROUNDS, Returning
from fleet_core.robust.screening import Screening
from tests.support.quadratics import QuadraticFleet, average, dyn, random_cohorts, scaf

KINDS: dict[str, tuple[Callable[..., QuadraticFleet], str]] = {"dyn": (dyn, "feddyn"), "scaf": (scaf, "scaffold")}
LATE = "device-3"


def converged(kind: str, first: int, **how: Any) -> QuadraticFleet:
    """A fleet after 40 rounds; one device took part in the ``first`` of them alone."""
    make, name = KINDS[kind]
    fleet = make(screening=Screening(METHODS[name]), **how)
    for number in range(40):
        fleet.round([name for name in fleet.devices if name != LATE or number < first])
    return fleet


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, 3, 10])
def test_a_device_that_was_away_or_joins_late_is_counted_and_the_fleet_finds_the_minimum_of_all(
    kind: str, first: int
) -> None:
    fleet = converged(kind, first)
    assert fleet.error > 1e-3, "without that device's samples"
    for _ in range(20):
        fleet.round()
        assert LATE in fleet.counted[fleet.number]
    assert fleet.error < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_device_that_was_there_all_the_time_gets_no_wider_bound(kind: str) -> None:
    fleet = converged(kind, 40)
    fleet.lie = lambda device, update: trees.scale(update, 1e3) if device == LATE else update
    fleet.round()
    assert LATE not in fleet.counted[fleet.number]


@pytest.mark.parametrize(("share", "counted"), [(0.9, ROUNDS), (1.1, 0)])
def test_a_hostile_device_that_comes_back_is_held_to_the_largest_usual_norm_and_that_for_a_few_rounds(
    share: float, counted: int
) -> None:
    fleet = converged("dyn", 3)
    largest = Returning.of(fleet.facts).largest

    def lie(device: str, update: Params) -> Params:
        if device != LATE:
            return update
        return {group: trees.scale({group: update[group]}, share * TIMES * largest[group] / trees.norm(
            {group: update[group]}))[group] for group in update}

    fleet.lie = lie
    came = 0
    for _ in range(ROUNDS):
        fleet.round()
        came += LATE in fleet.counted[fleet.number]
    assert came == counted
    assert LATE in Returning.of(fleet.facts).back
    fleet.round()
    assert LATE not in Returning.of(fleet.facts).back


def test_with_small_cohorts_hardly_anybody_is_away() -> None:
    names = [f"d{n}" for n in range(20)]
    known, back = Returning(), 0
    for cohort in random_cohorts(names, 4, 400, seed=1):
        known = known.after(cohort)
        back += sum(came == known.round for came in known.back.values())
    assert back < 0.03 * 4 * 400
    for _ in range(60):
        known = known.after(names[1:])
    assert "d0" in known.after(names).back


def test_a_pause_is_compared_with_the_others_and_none_is_one_after_the_whole_fleet_was_off() -> None:
    known = Returning().after(["a", "b", "c"])
    for _ in range(int(AWAY)):
        known = known.after(["a", "b"])
    assert known.after(["a", "b", "c"]).back == {"c": known.round + 1}
    assert known.after(["c"]).back == {}


def test_a_device_that_is_gone_for_good_is_forgotten() -> None:
    known = Returning().after(["a", "b", "gone"])
    while known.round < FORGOTTEN:
        known = known.after(["a", "b"])
    assert "gone" in known.last
    known = known.after(["a", "b"])
    assert set(known.last) == {"a", "b"}
    assert set(known.after(["a", "b", "gone"]).back) == {"gone"}


def test_methods_without_duals_remember_nothing_of_it() -> None:
    """Their updates do not end near zero, and a device that was away sends one like the others."""
    fleet = average(5, screening=Screening(METHODS["fedavg"]))
    for number in range(40):
        fleet.round([name for name in fleet.devices if name != LATE or number < 3])
    assert FACT not in fleet.facts
    for _ in range(10):
        fleet.round()
        assert LATE in fleet.counted[fleet.number]
