"""The algebra of the methods on quadratics in float64: what holds up to rounding, and what wrong rules would do.

The errors of the wrong rules were measured here with the same seeds; the right rule stays orders of magnitude below
them. What is said of a dual (PFLDyn) holds for a control (PFLScaf) as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleet_core.algorithms.interface import GradFn, LocalSgd, Payload, Update, descend, rate
from fleet_core.algorithms.methods.average import AverageClient, AverageServer, Averaging
from fleet_core.algorithms.methods.dyn import Dyn, DynClient, DynServer
from fleet_core.algorithms.methods.scaf import Scaf, ScafServer
from fleet_core.base import trees
from tests.support.quadratics import (
    DEVICES,
    MU,
    SIZE,
    SMOOTHNESS,
    QuadraticFleet,
    Vector,
    average,
    bits,
    dyn,
    minimiser,
    quadratics,
    random_cohorts,
    scaf,
    tree,
    vector,
)

Build = Callable[..., QuadraticFleet]
both = pytest.mark.parametrize("build", [dyn, scaf])


# PFLDyn and PFLScaf reach the minimiser of the mean, averaging does not (identity 3) ----------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("penalty", "rounds"), [(MU, 220), (1.0, 120), (SMOOTHNESS, 90)])
def test_pfldyn_with_all_devices_finds_the_minimiser_of_the_mean(penalty: float, rounds: int) -> None:
    fleet = dyn(penalty)
    for _ in range(rounds):
        fleet.round()
    assert fleet.error < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize(("penalty", "rounds"), [(1.0, 520), (SMOOTHNESS, 140)])
def test_pfldyn_with_two_of_eight_devices_finds_it_too(penalty: float, rounds: int) -> None:
    fleet = dyn(penalty)
    for active in random_cohorts(DEVICES, 2, rounds, seed=1):
        fleet.round(active)
    assert fleet.error < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize(("local_steps", "rounds"), [(1, 70), (5, 70), (10, 130), (15, 200)])
def test_pflscaf_with_all_devices_finds_it(local_steps: int, rounds: int) -> None:
    """Up to Kβ = 15/L."""
    fleet = scaf(local_steps)
    for _ in range(rounds):
        fleet.round()
    assert fleet.error < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize(("decay", "control_rate"), [(1.0, "stepped"), (0.999, "stepped"), (0.999, "initial")])
def test_pflscaf_with_two_of_eight_devices_finds_it_too(decay: float, control_rate: str) -> None:
    fleet = scaf(lr_decay=decay, control_rate=control_rate)
    for active in random_cohorts(DEVICES, 2, 350, seed=1):
        fleet.round(active)
        np.testing.assert_allclose(fleet.server_dual, fleet.mean_dual(), atol=1e-13)
    assert fleet.error < 1e-8


def test_averaging_with_one_local_step_is_gradient_descent_and_finds_it() -> None:
    fleet = average(1)
    for _ in range(200):
        fleet.round()
    assert fleet.error < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("local_steps", "bias"), [(5, 0.35), (20, 0.45)])
def test_averaging_with_more_steps_stops_elsewhere(local_steps: int, bias: float) -> None:
    """K steps take w − c_i to A_i (w − c_i), A_i = (I − β H_i)^K; averaging rests where Σ (I − A_i)(w − c_i) = 0."""
    fleet = average(local_steps)
    for _ in range(120):
        fleet.round()
    moved = {
        name: np.eye(SIZE) - np.linalg.matrix_power(np.eye(SIZE) - loss.hessian / SMOOTHNESS, local_steps)
        for name, loss in DEVICES.items()
    }
    rest = np.linalg.solve(sum(moved.values()), sum(moved[name] @ loss.minimum for name, loss in DEVICES.items()))
    np.testing.assert_allclose(fleet.model, rest, atol=1e-8)
    assert fleet.error > bias


def test_averaging_finds_the_minimiser_where_all_devices_have_one_curvature() -> None:
    rng = np.random.default_rng(0)
    alike = {name: replace(loss, hessian=np.eye(SIZE), minimum=rng.normal(size=SIZE)) for name, loss in DEVICES.items()}
    fleet = average(10, losses=alike)
    for _ in range(30):
        fleet.round()
    assert fleet.error < 1e-12


# The dual is the device's gradient, and the server's is their mean (identity 4) ---------------------------------------


def test_after_an_exact_local_minimisation_the_dual_is_the_gradient_there() -> None:
    fleet = dyn(local_steps=150)
    for active in random_cohorts(DEVICES, 2, 20, seed=1):
        fleet.round(active)
        for device in fleet.devices.values():
            if device.latest is not None:
                slope = device.loss.slope(vector(device.latest))
                np.testing.assert_allclose(vector(device.state["dual"]), slope, atol=1e-10)


def test_a_control_is_the_mean_gradient_along_the_devices_way() -> None:
    """With one local step, the gradient at the start."""
    fleet = scaf(1)
    for active in random_cohorts(DEVICES, 2, 20, seed=1):
        here = fleet.model
        fleet.round(active)
        for name in active:
            device = fleet.devices[name]
            np.testing.assert_allclose(vector(device.state["control"]), device.loss.slope(here), atol=1e-13)


def rounds_with_losses(fleet: QuadraticFleet, rounds: int, *, until: int) -> Iterator[None]:
    """Until then a tenth of the updates are lost (dropped, late or refused), and a fifth of the devices hear late."""
    rng = np.random.default_rng(3)
    for number in range(rounds):
        lost, unheard = ([n for n in DEVICES if number < until and rng.random() < share] for share in (0.1, 0.2))
        fleet.round(lost=lost, unheard=unheard)
        yield


@pytest.mark.slow
@both
def test_the_servers_dual_is_the_mean_of_all_devices_duals_after_every_round_whatever_is_lost(build: Build) -> None:
    fleet = build(lr_decay=0.998)
    for _ in rounds_with_losses(fleet, 130, until=60):
        np.testing.assert_allclose(fleet.server_dual, fleet.mean_dual(), atol=1e-13)
    assert any(len(names) < 7 for names in fleet.counted.values())
    assert fleet.error < 1e-8


@pytest.mark.slow
@both
def test_a_device_that_commits_what_was_not_counted_leaves_a_permanent_error(build: Build) -> None:
    fleet = build(commits_anyway=True)
    for _ in rounds_with_losses(fleet, 130, until=60):
        pass
    assert fleet.error > 0.1


@pytest.mark.slow
@both
@pytest.mark.parametrize(("told", "right"), [(True, True), (False, False)])
def test_a_device_that_enrols_brings_a_dual_of_zero_and_the_server_must_know(
    build: Build, told: bool, right: bool
) -> None:
    later = quadratics(10, seed=0, mu=MU, smoothness=SMOOTHNESS)
    fleet = build()
    for number in range(100):
        name = {3: "device-8", 9: "device-9"}.get(number)
        if name is not None:
            fleet.enrol(name, later[name], told=told)
        fleet.round([n for n in fleet.devices if n != "device-9" or number > 20])
        gap = np.abs(fleet.server_dual - fleet.mean_dual()).max()
        assert number < 3 or bool(gap < 1e-13) is right
    assert (fleet.error < 1e-8) is right
    assert right or fleet.error > 0.01


@pytest.mark.slow
@both
@pytest.mark.parametrize(("told", "right"), [(True, True), (False, False)])
def test_a_device_that_leaves_starts_every_dual_again(build: Build, told: bool, right: bool) -> None:
    fleet = build()
    for number in range(140):
        if number == 40:
            fleet.round(unheard=["device-5"])  # its counted state is of the old epoch and must not come back
            fleet.leave("device-3", told=told)
        fleet.round(random_cohorts(fleet.devices, 5, 1, seed=number)[0] if number < 60 else ())
        gap = np.abs(fleet.server_dual - fleet.mean_dual()).max()
        assert number < 40 or bool(gap < 1e-13) is right
    assert fleet.state.dual_epoch == int(told)
    assert (fleet.error < 1e-8) is right
    assert right or fleet.error > 0.1


def test_averaging_remembers_nothing_so_that_a_changing_fleet_changes_nothing() -> None:
    rule, state = AverageServer(), AverageServer().init(tree(np.ones(SIZE)), LocalSgd())
    assert rule.joined(state, 9, 2) is state
    assert rule.left(state, 7) is state


# The two models of a server -------------------------------------------------------------------------------------------


@both
def test_the_served_model_is_the_mean_of_all_latest_models_when_all_take_part(build: Build) -> None:
    fleet = build()
    for _ in range(20):
        fleet.round()
        np.testing.assert_allclose(vector(fleet.state.served), fleet.mean_latest(), atol=1e-14)


def test_pfldyns_trained_model_has_one_term_more() -> None:
    fleet = dyn()
    for _ in range(20):
        fleet.round()
    assert np.abs(fleet.model - fleet.mean_latest()).max() > 1e-4  # the −g/α term


@both
def test_the_running_mean_is_about_as_near_to_the_optimum_as_the_mean_of_all_latest_models(build: Build) -> None:
    """Two of eight active: from the 20th round on at most 4.1 (PFLDyn) and 7.5 times as far; at most 0.52 apart."""
    fleet, gaps = build(), []
    for number, active in enumerate(random_cohorts(DEVICES, 2, 200, seed=1)):
        fleet.round(active)
        served, mean, optimum = vector(fleet.state.served), fleet.mean_latest(), fleet.optimum
        gaps.append(np.linalg.norm(served - mean))
        assert number < 20 or np.linalg.norm(served - optimum) < 9 * np.linalg.norm(mean - optimum)
    assert max(gaps) < 0.6
    assert gaps[-1] < 1e-5


# One round of a server by hand: two of four devices, with changes of 1 and 2 ------------------------------------------

TWO = [Update("a", Payload(tree(np.ones(SIZE)))), Update("b", Payload(tree(np.full(SIZE, 2.0))))]


def of(params: Any) -> float:
    """The one value in all of the tree's places."""
    values = np.unique(vector(params))
    assert len(values) == 1
    return float(values[0])


def test_an_average_evaluates_what_it_trains() -> None:
    state = AverageServer().init(tree(np.zeros(SIZE)), Averaging())
    after = AverageServer().apply(state, TWO, 5, Averaging())
    assert of(after.model) == 1.5
    assert after.served is after.model


def test_a_weighted_average_counts_samples_and_a_mix_goes_a_part_of_the_way() -> None:
    state = AverageServer().init(tree(np.zeros(SIZE)), Averaging())
    few, many = (replace(update, samples=samples) for update, samples in zip(TWO, (10, 30), strict=True))
    assert of(AverageServer().apply(state, [few, many], 5, Averaging(weighted=True)).model) == 1.75
    assert of(AverageServer().apply(state, [few, many], 5, Averaging()).model) == 1.5
    assert of(AverageServer().apply(state, TWO, 5, Averaging(server_lr=0.5)).model) == 0.75
    nobody = [replace(update, samples=0) for update in TWO]
    assert of(AverageServer().apply(state, nobody, 5, Averaging(weighted=True)).model) == 0


def test_the_pfldyn_server_divides_by_the_fleet_and_not_by_the_cohort() -> None:
    """Acar Alg. 2, Update₁: m = 4, Σ delta = 3, α = 2: g = −2/4·3 = −1.5; w = 1.5 + 1.5/2."""
    hyper = Dyn(penalty=2.0)
    after = DynServer().apply(DynServer().init(tree(np.zeros(SIZE)), hyper), TWO, 4, hyper)
    assert of(after.memory["dual"]) == -1.5
    assert of(after.model) == 2.25
    assert of(after.served) == 0.75  # half the fleet: half the way


def test_the_pflscaf_server_moves_its_control_by_what_the_devices_moved_theirs() -> None:
    """Acar Alg. 2, Update₂: g = 1, Kβ = 2: Σ (g_i^new − g_i^old) = −2·1 − 3/2; g + 1/4 of it = 1 − 0.875."""
    hyper, rule = Scaf(local_steps=4, client_lr=1.0, lr_decay=0.5), ScafServer()
    first = trees.mirrored(tree(np.zeros(SIZE)), tree(np.zeros(SIZE)), "control")
    state = replace(rule.init(first, hyper), memory={"control": tree(np.ones(SIZE))}, round=2)
    after = rule.apply(state, TWO, 4, hyper)
    assert of(after.memory["control"]) == 0.125
    assert of(after.model) == 1.5
    assert of(after.served) == 0.75
    by_first_rate = rule.apply(state, TWO, 4, replace(hyper, control_rate="initial"))
    assert of(by_first_rate.memory["control"]) == 1 - (2 + 3 / 4) / 4


# The steps on a device ------------------------------------------------------------------------------------------------


def constant(value: Vector) -> GradFn:
    return lambda at: tree(value)


def test_a_step_clips_the_corrected_direction_and_adds_weight_decay_after() -> None:
    """By hand: gradient 3 + correction 1 in one coordinate, clipped to 2; decay 0.5 · 1; rate 0.1."""
    one = np.eye(SIZE)[0]
    hyper = LocalSgd(clip_norm=2.0, weight_decay=0.5)
    after = descend(tree(one), [constant(3 * one)], hyper, 0.1, lambda at: tree(one))
    np.testing.assert_allclose(vector(after), one - 0.1 * (2 + 0.5) * one, atol=1e-15)


def test_a_clip_norm_of_zero_means_none_and_a_small_direction_is_left_alone() -> None:
    one, hyper = np.eye(SIZE)[0], LocalSgd(clip_norm=0.0)
    np.testing.assert_allclose(vector(descend(tree(one), [constant(1e3 * one)], hyper, 1.0)), -999 * one)
    small = tree(0.1 * one)
    assert trees.clip(small, 1.0) is small


def test_the_rate_decays_from_the_second_round_on() -> None:
    hyper = LocalSgd(client_lr=0.1, lr_decay=0.5)
    assert [rate(hyper, number) for number in (1, 2, 3)] == [0.1, 0.05, 0.025]


def test_pfldyn_with_no_dual_is_fedprox_and_leaves_its_arguments_alone() -> None:
    """One quadratic, exact minimisation: argmin f + α/2‖w − w^t‖² = (H + αI)⁻¹ (H c + α w^t)."""
    loss, hyper = DEVICES["device-0"], Dyn(local_steps=200, client_lr=0.1, clip_norm=0.0, penalty=2.0)
    anchor = tree(np.ones(SIZE))
    before = bits(anchor)
    state = DynClient().init(anchor, {}, hyper)
    payload, pending = DynClient().run(Payload(anchor, {"round": 1.0}), state, [loss.gradient] * 200, hyper)
    nearest = np.linalg.solve(loss.hessian + 2 * np.eye(SIZE), loss.hessian @ loss.minimum + 2 * np.ones(SIZE))
    np.testing.assert_allclose(vector(payload.groups) + 1, nearest, atol=1e-12)
    np.testing.assert_allclose(vector(pending["dual"]), -2 * vector(payload.groups), atol=1e-15)
    assert bits(anchor) == before
    assert vector(state["dual"]).tolist() == [0.0] * SIZE


def test_adam_on_a_device_starts_anew_in_every_round() -> None:
    """Adam's first step is as long as the rate, whatever the gradient."""
    hyper = Averaging(local_steps=1, client_lr=0.1, local_optimizer="adam", clip_norm=0.0)
    for slope in (1e-3, 50.0):
        update, state = AverageClient().run(
            Payload(tree(np.zeros(SIZE)), {"round": 1.0}), {}, [constant(np.full(SIZE, slope))], hyper
        )
        np.testing.assert_allclose(vector(update.groups), -0.1, rtol=1e-4)
        assert state == {}


def test_the_minimiser_is_where_the_mean_gradient_vanishes() -> None:
    """Checks the helper that the tests above rely on."""
    at = minimiser(DEVICES.values())
    np.testing.assert_allclose(sum(loss.slope(at) for loss in DEVICES.values()), np.zeros(SIZE), atol=1e-12)
    assert replace(DEVICES["device-0"], minimum=at).slope(at).tolist() == [0.0] * SIZE
