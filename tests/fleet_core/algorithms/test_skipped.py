"""Updates that are too small to be sent, on quadratics: PFLDyn and PFLScaf still reach the minimiser, and the server's
dual stays what the devices' duals and residuals make it."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_core.model import skipped_updates
from tests.fleet_core.algorithms.test_lossy import Build, both, gap_of_duals
from tests.support.quadratics import DEVICES, QuadraticFleet, average, int8, random_cohorts

pytestmark = pytest.mark.slow

TWO_OF_EIGHT = random_cohorts(DEVICES, 2, 500, seed=0)
ALL: list[list[str]] = [[]] * 150


def ended(fleet: QuadraticFleet, active: list[list[str]]) -> tuple[float, float]:
    """(share of the updates that was skipped, largest gap of the duals after any round)."""
    gaps = []
    for names in active:
        fleet.round(names)
        gaps.append(gap_of_duals(fleet))
    return fleet.skipped / fleet.trained, max(gaps)


@both
@pytest.mark.parametrize(("share", "skipped"), [(0.2, 0.05), (0.5, 0.3), (1.0, 0.5)])
@pytest.mark.parametrize("active", [ALL, TWO_OF_EIGHT], ids=["all", "2 of 8"])
def test_the_minimiser_is_reached_without_the_updates_that_were_skipped(
    build: Build, share: float, skipped: float, active: list[list[str]]
) -> None:
    fleet = build(skip_below=share)
    found, gap = ended(fleet, active)
    assert fleet.error < 1e-7
    assert gap < 1e-10, "the server's dual is the mean of the devices', and of what their residuals owe"
    assert found > (skipped if active is ALL else skipped / 2)


@both
def test_skipping_costs_hardly_a_round(build: Build) -> None:
    every, some = build(), build(skip_below=0.5)
    for fleet in (every, some):
        while fleet.error > 1e-6 and fleet.number < 200:
            fleet.round()
    assert some.skipped > 0.3 * some.trained
    assert every.number <= some.number + 5 <= every.number + 15


@both
@pytest.mark.parametrize("codec", ["int8", "int4", "ternary", "int8-plain", "topk-10"])
def test_the_minimiser_is_reached_with_a_lossy_codec_beside(build: Build, codec: str) -> None:
    """Of six values topk-10 sends one. int8-plain has no feedback, but what is skipped is made up for."""
    fleet = build(skip_below=0.3, send=int8(codec))
    skipped, gap = ended(fleet, [[]] * 300)
    assert fleet.error < 1e-5
    assert gap < 1e-5  # updates are rounded to float32
    assert skipped > (0 if codec == "topk-10" else 0.05)


@both
def test_the_duals_keep_their_sum_while_updates_are_lost_and_unheard_of(build: Build) -> None:
    fleet, names = build(skip_below=0.5), sorted(DEVICES)
    for number in range(200):
        lost = names[number % 8 :: 5] if number < 120 else []
        fleet.round(lost=lost, unheard=names[number % 3 :: 7] if number < 120 else [])
        assert gap_of_duals(fleet) < 1e-10
    assert fleet.error < 1e-7
    assert fleet.skipped > 0.1 * fleet.trained


@both
def test_a_device_that_does_not_keep_what_it_skipped_would_be_noticed(build: Build) -> None:
    """The checks above can fail: a device that forgets, and lets its dual follow what it did not send."""
    fleet = build(skip_below=0.5)
    gaps = []
    for _ in range(60):
        fleet.round()
        for device in fleet.devices.values():
            device.residual = None
        gaps.append(gap_of_duals(fleet))
    assert max(gaps) > 1e-3
    assert fleet.error > 1e-4


def test_averaging_stays_within_what_its_devices_have_not_sent() -> None:
    """Updates of averaging do not vanish where devices differ, so that residuals do not either."""
    every, some = average(5), average(5, skip_below=1.0)
    apart = []
    for _ in range(300):
        every.round()
        some.round()
        apart.append(float(np.linalg.norm(every.model - some.model)))
    assert some.skipped > 0.1 * some.trained
    assert 1e-3 < max(apart[100:]) < 0.5 * skipped_updates.least_norm(1.0, some.facts)
