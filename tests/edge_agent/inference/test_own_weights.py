"""A device's own weights: what each method's personalizer makes of the served model and the device's samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fleet_core.algorithms.interface import OWN_LABELS, own_steps
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.errors import DataError
from fleet_core.base.trees import Params
from fleet_core.learning import gradient_estimators, gradients, local_training, models
from fleet_core.training import round_plans
from tests.support.simulation import (
    SEED,
    Fleet,
    equal_bits,
    flat,
    hyper_of,
    max_difference,
    toy_layout,
    toy_samples,
)

SMALL: dict[str, Any] = {
    "local_steps": 4, "client_lr": 0.05, "batch": 20, "support_batch": 12, "query_batch": 8, "head_steps": 2,
    "shots": 3, "query_shots": 4, "finetune_steps": 3, "finetune_lr": 0.1, "inner_lr": 0.2, "inner_steps": 3,
}  # fmt: skip
MINE = toy_samples(2 * round_plans.CHUNK + 7, seed=5)
every_method = pytest.mark.parametrize("name", METHODS)


def played(name: str, **hyper: Any) -> Fleet:
    fleet = Fleet(name, hyper_of(name, **{**SMALL, **hyper}), [toy_samples(60, seed=s) for s in (0, 1)], toy_layout())
    fleet.round()
    fleet.round([0])
    return fleet


def first(fleet: Fleet) -> Params:
    return models.initial(fleet.layout, SEED)


def stepped(fleet: Fleet, start: Params, lr: float, steps: int, moving: tuple[str, ...]) -> Params:
    """Full-batch SGD on all of the device's samples, in one torch loop; the other groups stay."""
    w = models.to_torch(start)
    loss = gradient_estimators.entropy(fleet.model, torch.tensor(MINE[0]), torch.tensor(MINE[1]))
    for _ in range(steps):
        _, slope = gradients.value_and_gradient(loss, gradients.leaves(w))
        w = {g: {n: a - lr * slope[g][n] * (g in moving) for n, a in named.items()} for g, named in w.items()}
    return models.to_numpy(w)


@every_method
def test_personal_weights_are_the_same_every_time_and_leave_the_served_model_unchanged(name: str) -> None:
    fleet = played(name)
    before, state = trees.apply(lambda a: a.copy(), fleet.evaluated), fleet.states[0]
    one, again = fleet.own(MINE, state), fleet.own(MINE, state)
    assert equal_bits(one, again)
    assert equal_bits(before, fleet.evaluated)
    wanted = ("body",) if METHODS[name].adaptation in OWN_LABELS else ("body", "head")
    fleet.layout.check(one, wanted)
    assert {a.dtype for a in flat(one)} == {np.dtype(np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.personalizer == "sgd"])
def test_sgd_takes_full_batch_steps_on_all_groups_however_many_samples_there_are(name: str) -> None:
    """MAML's inner steps, or else fine-tuning; FedBABU's head moves here, from its first value."""
    fleet = played(name)
    maml = hasattr(fleet.hyper, "inner_steps")
    lr, steps = (0.2, 3) if maml else (0.1, 3)
    start = {**first(fleet), **trees.only(fleet.evaluated, ("body", "head"))}
    wanted = stepped(fleet, start, lr, steps, ("body", "head"))
    assert max_difference(fleet.own(MINE), wanted) < 1e-6
    assert min(float(np.abs(a - b).max()) for a, b in zip(flat(wanted), flat(start), strict=True)) > 1e-4


def test_without_fine_tuning_the_served_model_is_unchanged() -> None:
    fleet = played("fedavg", finetune_steps=0)
    assert equal_bits(fleet.own(MINE), fleet.evaluated)


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.personalizer in ("proto", "gp", "knn")])
def test_answers_from_samples_need_no_other_weights(name: str) -> None:
    fleet = played(name)
    assert equal_bits(fleet.own(MINE), fleet.evaluated)


def test_meta_sgd_takes_one_step_with_the_learned_rates() -> None:
    fleet = played("fedmeta-metasgd", first_rate=0.3, server_lr=0.05)
    start, rates = trees.parted(fleet.evaluated, "rates")
    assert len({float(a) for array in flat(rates) for a in array.ravel()}) > 20
    slope = trees.subtract(start, stepped(fleet, start, 1.0, 1, ("body", "head")))
    assert max_difference(fleet.own(MINE), trees.apply(lambda w, a, g: w - a * g, start, rates, slope)) < 1e-6


# Groups of one's own --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.personalizer == "own"])
def test_trained_groups_answer_as_they_are_beside_the_evaluated_ones(name: str) -> None:
    fleet = played(name)
    state = fleet.states[0]
    assert equal_bits(fleet.own(MINE, state), fleet.layout.ordered({**fleet.evaluated, **state["personal"]}))


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.personalizer == "own"])
def test_a_device_that_never_took_part_tunes_its_own_groups_and_no_others(name: str) -> None:
    fleet = played(name)
    start = fleet.layout.ordered({**fleet.evaluated, **trees.only(first(fleet), fleet.method.personal)})
    found = fleet.own(MINE)
    moving = fleet.method.moving
    assert moving == (fleet.method.personal or fleet.method.per_device)
    assert max_difference(found, stepped(fleet, start, 0.1, 3, moving)) < 1e-6
    others = [group for group in fleet.method.shared if group not in moving]
    assert equal_bits(trees.only(found, others), trees.only(fleet.evaluated, others))
    assert max_difference(found, start) > 1e-3
    assert equal_bits(fleet.own(MINE, {}), found)


def test_first_values_of_personal_groups_come_from_the_fleets_seed() -> None:
    method, layout = METHODS["fedper"], toy_layout()
    one, again, other = (local_training.first_personal(method, layout, {"seed": seed}) for seed in (3.0, 3.0, 4.0))
    assert list(one) == ["head"]
    assert equal_bits(one, again)
    assert not equal_bits(one, other)
    assert local_training.first_personal(METHODS["fedavg"], layout, {"seed": 3.0}) == {}


# pFedMe and FedProto train --------------------------------------------------------------------------------------------


def test_pfedmes_own_weights_are_those_of_a_round_from_the_served_model() -> None:
    fleet = played("pfedme", envelope=5.0)
    evaluated, found = fleet.evaluated, fleet.own(MINE)
    assert max_difference(found, evaluated) > 1e-3
    assert equal_bits(fleet.own(MINE, fleet.states[0]), found)  # what an earlier round found is not used
    tight = played("pfedme", envelope=500.0, personal_lr=1e-3)
    assert max_difference(tight.own(MINE), tight.evaluated) < max_difference(found, evaluated) / 2


def test_a_fedproto_device_answers_with_its_own_encoder() -> None:
    fleet = played("fedproto")
    assert equal_bits(fleet.own(MINE, fleet.states[1]), fleet.layout.ordered(fleet.states[1]["personal"]))


def test_a_fedproto_device_that_never_took_part_trains_towards_the_fleets_class_means() -> None:
    """With cross-entropy alone its representations would be independent of the fleet's."""
    distances = {}
    for pull in (0.0, 1.0):
        fleet = played("fedproto", pull=pull, finetune_steps=40)
        means = fleet.evaluated["prototypes"]["total"] / fleet.evaluated["prototypes"]["count"][:, None]
        x, y = toy_samples(90, seed=8)
        z = local_training.embed(fleet.model, fleet.own(MINE), x)
        distances[pull] = np.mean([np.linalg.norm(z[y == k].mean(0) - means[k]) for k in range(3)])
    assert distances[1.0] < 0.7 * distances[0.0]
    untouched = played("fedproto", finetune_steps=0)
    assert equal_bits(untouched.own(MINE), first(untouched))


@pytest.mark.slow
@every_method
def test_samples_that_do_not_fit_are_refused(name: str) -> None:
    fleet = played(name)
    if METHODS[name].personalizer in ("proto", "gp", "knn", "own", "fleet-proto"):
        fleet.states[0] = {}
    x, y = MINE
    if METHODS[name].personalizer not in ("proto", "gp", "knn"):  # which take no steps
        with pytest.raises(DataError):
            fleet.own((x[:, :5], y))
        with pytest.raises(DataError):
            fleet.own((x, y + 3))
    assert own_steps(METHODS[name], fleet.hyper, trained=True)[1] >= 0
