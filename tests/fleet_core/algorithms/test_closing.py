"""Closing a round gives the same bits for any order of arrival and any number of workers, and a run resumed from disk
equals one that never stopped, for every method and every form of its server rule (identity 7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_server.records import checkpoint
from cloud_server.records.checkpoint import Checkpoint, Checkpoints
from fleet_core.algorithms import aggregation
from fleet_core.algorithms.interface import ClientState, Payload, ServerState, Update
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage, trees
from fleet_core.base.trees import Params
from fleet_core.model.layout import MODEL_GROUPS as GROUPS
from tests.support.quadratics import DEVICES, LAYOUT, SIZE, QuadraticFleet, bits, fleet_of, random_cohorts, tree

FORMS: dict[str, dict[str, Any]] = {
    **{name: {} for name in METHODS},
    "fedavg, Adam": {"server_optimizer": "adam"},
    "fedavg, Yogi": {"server_optimizer": "yogi", "server_start": 1e-6},
    "fedavg, weighted": {"weighted": True},
    "fedmeta-maml, appendix": {"form": "appendix"},
    "metavers, window-mean": {"window_mean": True, "window": 3},
    "metavers, short": {"window": 2},
}
every_form = pytest.mark.parametrize("form", FORMS)


def play(form: str) -> QuadraticFleet:
    """A fleet of quadratics that runs this form of a method."""
    name = form.partition(",")[0]
    options = {"local_steps": 3, "client_lr": 0.02, "head_steps": 1, **FORMS[form]}
    known = METHODS[name].hyper.__dataclass_fields__
    return fleet_of(name, METHODS[name].hyper(**{k: v for k, v in options.items() if k in known}), DEVICES)


@dataclass(frozen=True)
class Closed:
    updates: list[Update]
    total: Params
    count: int


@pytest.fixture(scope="module")
def closed() -> Closed:
    """Updates of such different sizes that another order of the sum gives other bits."""
    rng = np.random.default_rng(0)
    updates = [
        Update(f"pi-{i}", Payload(tree(rng.normal(size=SIZE) * 10.0 ** rng.integers(-9, 9, SIZE)))) for i in range(90)
    ]
    ordered = arrange(updates)
    return Closed(ordered, *aggregation.total(ordered, groups))


def groups(update: Update) -> Params:
    return update.payload.groups


def arrange(updates: list[Update]) -> list[Update]:
    """The updates in closing order, whatever the order of arrival, as the spool reads them."""
    names = {update.device: update for update in updates}
    return [names[name] for name in aggregation.order(names)]


@settings(max_examples=40, deadline=None)
@given(shuffle=st.randoms(use_true_random=False), workers=st.integers(1, 7))
def test_any_arrival_and_any_number_of_workers_give_the_same_bits(closed: Closed, shuffle: Any, workers: int) -> None:
    arrived = list(closed.updates)
    shuffle.shuffle(arrived)
    owner = [shuffle.randrange(workers) for _ in range(aggregation.BUCKETS)]
    partial: list[tuple[int, Params, int]] = []
    for worker in range(workers):
        mine = [update for update in arrived if owner[aggregation.bucket(update.device)] == worker]
        partial += aggregation.bucket_sums(arrange(mine), groups)
    result, count = aggregation.merge(sorted(partial, key=lambda entry: entry[0]))
    assert (bits(result), count) == (bits(closed.total), closed.count)


def test_the_order_of_the_sum_matters_so_that_it_must_be_fixed(closed: Closed) -> None:
    other = groups(closed.updates[-1])
    for update in closed.updates[-2::-1]:
        other = trees.add(other, groups(update))
    assert bits(other) != bits(closed.total)
    np.testing.assert_allclose(np.frombuffer(bits(other)), np.frombuffer(bits(closed.total)), rtol=1e-9)


def test_a_sum_of_no_updates_is_an_error() -> None:
    with pytest.raises(ValueError, match="no updates"):
        aggregation.total([], groups)


# Every method ---------------------------------------------------------------------------------------------------------


def everything(state: ServerState) -> tuple[Any, ...]:
    """Everything that a server remembers, as bytes."""
    memory = {role: storage.pack(storage.flatten(kept)) for role, kept in state.memory.items()}
    trees_ = [storage.pack(storage.flatten(params)) for params in (state.model, state.served)]
    return (*trees_, memory, state.dual_epoch, dict(state.scalars))


def made_up(fleet: QuadraticFleet, name: str) -> list[Update]:
    """Updates of what the method sends, of such different sizes that the order of a sum shows."""
    rng, method = np.random.default_rng(0), METHODS[name]
    shapes = LAYOUT.extended(method.down, method.shared).zeros(method.shared)
    return [
        Update(f"pi-{i}", Payload(
            trees.apply(lambda a: abs(rng.normal(size=a.shape)) * 10.0 ** rng.integers(-9, 9, a.shape), shapes),
            {scalar: float(rng.random()) for scalar in method.up_scalars},
        ), samples=int(rng.integers(1, 99)))
        for i in range(90)
    ]  # fmt: skip


@pytest.mark.slow
@every_form
def test_every_method_closes_to_the_same_bits_for_any_arrival(form: str) -> None:
    fleet, name = play(form), form.partition(",")[0]
    updates = made_up(fleet, name)
    one = two = replace(fleet.server.as_received(fleet.state, fleet.server.broadcast(fleet.state).groups), round=1)
    for number in (1, 2):
        one = fleet.server.apply(replace(one, round=number), arrange(updates), 100, fleet.hyper)
        two = fleet.server.apply(replace(two, round=number), arrange(updates[::-1]), 100, fleet.hyper)
    assert everything(one) == everything(two)
    assert name == "local" or everything(one) != everything(fleet.state)


def from_disk(folder: Path) -> Callable[[QuadraticFleet], None]:
    """Write and read all that server and devices remember, as a restart does."""
    checkpoints = Checkpoints(folder)

    def restart(fleet: QuadraticFleet) -> None:
        order = LAYOUT.extended(fleet.down, GROUPS).seeded(0)
        checkpoints.save(Checkpoint(fleet.number, fleet.state))
        fleet.state = checkpoints.load(fleet.number, order).state
        for device in fleet.devices.values():
            arrays, _ = storage.unpack(storage.pack(storage.flatten_roles(device.state)))
            device.state = {role: ordered(kept, order) for role, kept in storage.unflatten_roles(arrays).items()}

    return restart


def ordered(params: Params, order: Params) -> ClientState:
    return {g: {n: params[g][n] for n in named} for g, named in order.items() if g in params}


def rounds(fleet: QuadraticFleet, between: Callable[[QuadraticFleet], None]) -> list[Any]:
    """What the server and all devices hold after every round."""
    held = []
    for active in random_cohorts(DEVICES, 3, 5, seed=1):
        fleet.round(active)
        between(fleet)
        devices = {n: storage.pack(storage.flatten_roles(d.state)) for n, d in fleet.devices.items()}
        held.append((everything(fleet.state), devices))
    return held


@pytest.mark.slow
@every_form
def test_a_run_that_continues_from_the_disk_is_the_run_that_never_stopped(form: str, tmp_path: Path) -> None:
    never, always = rounds(play(form), lambda fleet: None), rounds(play(form), from_disk(tmp_path))
    assert always == never
    assert len({repr(held) for held in never}) == 5


@pytest.mark.slow
@every_form
def test_a_method_remembers_nothing_but_what_a_checkpoint_keeps(form: str) -> None:
    """Its rules hold no state of their own: two fleets that share them do not disturb each other."""
    alone = rounds(play(form), lambda fleet: None)
    one, other = play(form), play(form)
    other.round(["device-5"])
    assert rounds(one, lambda fleet: other.round(["device-2", "device-6"])) == alone


def test_a_served_model_under_its_former_name_is_read(tmp_path: Path) -> None:
    model, served = tree(np.zeros(SIZE)), tree(np.ones(SIZE))
    Checkpoints(tmp_path).save(Checkpoint(1, ServerState(model=model, served=served), facts={"method": "fedavg"}))
    path = Checkpoints(tmp_path).path(1)
    arrays, metadata = storage.unpack(path.read_bytes(), where="")
    del metadata["sha256"]
    checkpoint._write(path, {n.replace("served/", "judged/"): a for n, a in arrays.items()}, metadata)
    assert bits(Checkpoints(tmp_path).load(1, model).state.served) == bits(served)
