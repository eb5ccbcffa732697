"""Rounds that train some arrays alone: what is frozen keeps its bits, and every identity holds array by array.

On quadratics a fleet that trains a subset ends at the minimiser over that subset, and one whose arrays were frozen for
a while, in any order and with updates lost, at the minimiser of all once they move again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleet_core.algorithms import freezing
from fleet_core.algorithms.interface import Payload, ServerState, Update
from fleet_core.algorithms.methods.average import STEPS, AverageServer, Averaging
from fleet_core.algorithms.methods.dyn import Dyn, DynServer
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.base.trees import Params
from fleet_core.model.select_arrays import refusal
from tests.support.quadratics import (
    DEVICES,
    SIZE,
    QuadraticFleet,
    Vector,
    average,
    bits,
    dyn,
    fleet_of,
    int8,
    random_cohorts,
    scaf,
    tree,
    vector,
)

Build = Callable[..., QuadraticFleet]
A, B, C = "body/a", "body/b", "head/c"
PLACES = {A: range(2), B: range(2, 5), C: range(5, 6)}
SUBSETS = [(A,), (B,), (C,), (A, B), (A, C), (B, C)]
BOTH = pytest.mark.parametrize("build", [dyn, scaf])


def places(arrays: Collection[str]) -> list[int]:
    return [k for name in arrays for k in PLACES[name]]


def subset_minimiser(frozen: Collection[str], at: Vector) -> Vector:
    """The minimiser of the mean loss over the other arrays, with the frozen ones as in ``at``."""
    hessian = np.sum([loss.hessian for loss in DEVICES.values()], axis=0)
    pull = np.sum([loss.hessian @ loss.minimum for loss in DEVICES.values()], axis=0)
    fixed = places(frozen)
    free = [k for k in range(SIZE) if k not in fixed]
    found = at.copy()
    right = pull[free] - hessian[np.ix_(free, fixed)] @ at[fixed]
    found[free] = np.linalg.solve(hessian[np.ix_(free, free)], right)
    return found


# Quadratics -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("frozen", SUBSETS)
def test_a_subset_is_trained_to_its_own_minimiser(build: Build, frozen: tuple[str, ...]) -> None:
    fleet, wanted = build(), subset_minimiser(frozen, np.zeros(SIZE))
    for _ in range(800):
        fleet.round(frozen=frozen)
        if np.abs(fleet.model - wanted).max() < 1e-9:
            break
    np.testing.assert_allclose(fleet.model, wanted, atol=1e-8)
    assert (fleet.model[places(frozen)] == 0).all()


@BOTH
@pytest.mark.parametrize("how", [{}, {"send": "int8"}, {"send": "int8-plain"}], ids=["exact", "int8", "int8-plain"])
@pytest.mark.slow
def test_arrays_that_were_frozen_for_a_while_and_thawed_reach_the_minimiser(build: Build, how: dict[str, str]) -> None:
    """Two of eight devices in a round, one update in ten lost; in the first half each round freezes some arrays."""
    fleet = build(**{key: int8(value) for key, value in how.items()})
    rng = np.random.default_rng(0)
    for number, active in enumerate(random_cohorts(fleet.devices, 2, 3000, seed=1)):
        frozen = SUBSETS[rng.integers(len(SUBSETS))] if number < 1500 and rng.random() < 0.8 else ()
        fleet.round(active, lost=[name for name in active if rng.random() < 0.1], frozen=frozen)
        if number > 1500 and fleet.error < 1e-9:
            break
    assert fleet.error < 1e-8


@BOTH
def test_the_servers_state_stays_the_mean_of_the_devices_whatever_is_frozen(build: Build) -> None:
    """With lost updates, with devices that do not hear a record, that enrol and that leave."""
    fleet, rng = build(local_steps=3), np.random.default_rng(3)
    for number in range(60):
        names = sorted(fleet.devices)
        active = [str(name) for name in rng.choice(names, 3, replace=False)]
        frozen = SUBSETS[rng.integers(len(SUBSETS))] if number % 3 else ()
        fleet.round(active, lost=active[:1] if number % 4 == 0 else (), unheard=active[1:2], frozen=frozen)
        np.testing.assert_allclose(fleet.server_dual, fleet.mean_dual(), atol=1e-12)
        if number == 20:
            fleet.enrol("late", DEVICES["device-0"])
        if number == 40:
            fleet.leave("device-1")


@BOTH
def test_a_device_keeps_the_bits_of_a_frozen_dual_and_residual(build: Build) -> None:
    fleet = build(send=int8())
    for _ in range(3):
        fleet.round()
    before = {name: (device.state[fleet.role], device.residual) for name, device in fleet.devices.items()}
    server = fleet.state
    for frozen in ((A, C), (A,), (A, B)):
        fleet.round(frozen=frozen)
    assert fleet.devices.keys() == before.keys()
    for name, device in fleet.devices.items():
        for now, then in zip((device.state[fleet.role], device.residual), before[name], strict=True):
            assert now is not None
            assert then is not None
            assert now["body"]["a"].tobytes() == then["body"]["a"].tobytes()
            assert now["head"]["c"].tobytes() != then["head"]["c"].tobytes()
    for now, then in ((fleet.state.model, server.model), (fleet.state.served, server.served),
                      (fleet.state.memory[fleet.role], server.memory[fleet.role])):
        assert now["body"]["a"].tobytes() == then["body"]["a"].tobytes()
        assert now["head"]["c"].tobytes() != then["head"]["c"].tobytes()


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not refusal(method)])
def test_what_is_frozen_keeps_its_bits_with_every_method(name: str) -> None:
    """In the models, in the server's memory and on the devices."""
    method = METHODS[name]
    known = {"local_steps": 2, "head_steps": 1, "client_lr": 0.01, "server_optimizer": "adam", "server_lr": 0.05}
    hyper = method.hyper(**{key: value for key, value in known.items() if key in method.hyper.__dataclass_fields__})
    fleet = fleet_of(name, hyper, DEVICES)
    fleet.round()
    for frozen in ((A,), (B,)):
        before = roles(fleet)
        fleet.round(frozen=frozen)
        after = roles(fleet)
        assert after.keys() == before.keys()
        kept = {key for key in before if key.endswith(frozen)}
        assert kept
        assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
        moved = {key for key in before if key not in kept and after[key] != before[key]}
        assert {key for key in moved if key.startswith("model/")}


def roles(fleet: QuadraticFleet) -> dict[str, bytes]:
    state = fleet.state
    trees_of = {"model": state.model, "served": state.served, **{f"memory.{k}": v for k, v in state.memory.items()}}
    for name, device in fleet.devices.items():
        trees_of |= {f"{name}.{role}": params for role, params in device.state.items()}
    return {
        f"{role}/{group}/{name}": np.asarray(array).tobytes()
        for role, params in trees_of.items() for group, named in params.items() for name, array in named.items()
    }


# The server's rule ----------------------------------------------------------------------------------------------------


def test_without_frozen_arrays_the_rule_itself_is_applied() -> None:
    rule, hyper = DynServer(), Dyn()
    state = rule.init(tree(np.arange(6.0)), hyper)
    updates = [Update("a", Payload(tree(np.ones(6)))), Update("b", Payload(tree(np.arange(6.0))))]
    found, wanted = freezing.apply(rule, state, updates, 2, hyper, EVERYTHING), rule.apply(state, updates, 2, hyper)
    assert [bits(found.model), bits(found.served)] == [bits(wanted.model), bits(wanted.served)]


def test_a_served_model_that_is_the_training_model_stays_so() -> None:
    """Also where devices have decoded another one than the server sent: then both are what devices hold."""
    rule, hyper, moving = AverageServer(), Averaging(), Moving(frozenset({B}))
    state = rule.init(tree(np.arange(6.0)), hyper)
    received = rule.as_received(state, tree(np.arange(6.0) + 0.25))
    after = freezing.apply(rule, received, [Update("a", Payload(moving.of(tree(np.ones(6)))))], 1, hyper, moving)
    assert after.served is after.model
    np.testing.assert_array_equal(after.model["body"]["b"], received.model["body"]["b"])


def adam(frozen: Callable[[int], Collection[str]], rounds: int) -> list[ServerState]:
    """A server with Adam, whose round ``n`` moves by the gradient of a quadratic without mixed terms."""
    rule = AverageServer()
    hyper = Averaging(server_optimizer="adam", server_lr=0.1, server_beta2=0.999)
    state, states = rule.init(tree(np.full(6, 5.0)), hyper), []
    for number in range(rounds):
        moving = Moving(frozenset(frozen(number)))
        change = moving.of(trees.scale(state.model, -1.0))
        state = freezing.apply(rule, state, [Update("a", Payload(change))], 1, hyper, moving)
        states.append(state)
    return states


def path(states: list[ServerState], name: str) -> list[Any]:
    return [np.ravel(state.model["body"][name]).tolist() for state in states]


def test_an_adam_of_the_server_goes_on_as_if_the_rounds_of_a_frozen_array_had_not_been() -> None:
    """Its moments, and the number of steps that corrects their start."""
    whole = adam(lambda number: (), 8)
    part = adam(lambda number: (B,) if number in (1, 2, 3, 6) else (), 12)
    moved = [n for n in range(12) if n not in (1, 2, 3, 6)]
    np.testing.assert_array_equal([path(part, "b")[n] for n in moved], path(whole, "b"))
    np.testing.assert_array_equal(path(part, "a")[:8], path(whole, "a"))
    assert part[-1].scalars[f"{STEPS}.{B}"] == 8
    assert part[-1].scalars[f"{STEPS}.{A}"] == 12


def test_an_array_may_move_for_the_first_time_after_others_have() -> None:
    """Patterns were changed: its moments are at their beginning."""
    part = adam(lambda number: (B,) if number < 4 else (), 12)
    whole = adam(lambda number: (), 8)
    np.testing.assert_array_equal(part[-1].model["body"]["b"], whole[-1].model["body"]["b"])


def test_moments_of_an_earlier_version_go_on_with_its_one_count() -> None:
    rule, hyper = AverageServer(), Averaging(server_optimizer="adam", server_lr=0.1)
    state = adam(lambda number: (), 3)[-1]
    former = replace(state, scalars={"server_steps": 3.0})
    change = [Update("a", Payload(trees.scale(state.model, -1.0)))]
    assert bits(rule.apply(former, change, 1, hyper).model) == bits(rule.apply(state, change, 1, hyper).model)


def test_averaging_moves_what_is_not_frozen_as_it_would_without_the_rest() -> None:
    """Losses without mixed terms."""
    def diagonal(loss: Any) -> Any:
        return replace(loss, hessian=np.diag(np.diag(loss.hessian)))

    losses = {name: diagonal(loss) for name, loss in DEVICES.items()}
    part, whole = average(3, losses=losses), average(3, losses=losses)
    for _ in range(5):
        part.round(frozen=(B,))
        whole.round()
    assert vector(part.state.model)[[0, 1, 5]].tolist() == vector(whole.state.model)[[0, 1, 5]].tolist()


def test_part_and_completion_are_inverse() -> None:
    state: dict[str, Params] = {"dual": {"body": {"a": 1, "b": 2}, "head": {"c": 3}}, "personal": {"head": {"c": 4}}}
    for frozen in itertools.chain.from_iterable(itertools.combinations((A, B, C), k) for k in range(4)):
        moving = Moving(frozenset(frozen))
        found = freezing.completed(freezing.part_of(state, moving), state, moving)
        assert found == state
