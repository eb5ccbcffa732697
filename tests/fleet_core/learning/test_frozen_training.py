"""Local training of a part of the model: the direction is that part of the whole gradient, and what torch can leave out
is neither computed nor counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.learning import local_training, models
from fleet_core.learning.layer_flops import flops_per_sample, layers_of
from fleet_core.model.layout import InputSpec, Layout
from fleet_core.model.select_arrays import refusal
from fleet_core.training.local_round import TrainResult
from tests.support.simulation import TOY, Fleet, hyper_of, max_difference, toy_layout, toy_samples

pytestmark = pytest.mark.usefixtures("one_torch_thread")

WEIGHT, BIAS = "body/layers.0.weight", "body/layers.0.bias"
HEAD = ("head/head.weight", "head/head.bias")
SMALL: dict[str, Any] = {
    "local_steps": 3, "client_lr": 0.1, "batch": 20, "support_batch": 10, "query_batch": 10, "head_steps": 1,
    "shots": 3, "query_shots": 4, "inner_steps": 2, "personal_steps": 2,
}  # fmt: skip
ABLE = [name for name, method in METHODS.items() if not refusal(method)]


def frozen_of(name: str) -> Moving:
    """Half of what the method sends."""
    return Moving(frozenset({WEIGHT} if "body" in METHODS[name].shared else {HEAD[0]}))


def trained(
    name: str, moving: Moving, layout: Layout | None = None, together: bool = False, rounds: int = 1, **changes: Any
) -> list[TrainResult]:
    """The results of two devices in their first round, or in a later one."""
    fleet = Fleet(name, hyper_of(name, **{**SMALL, **changes}), [toy_samples(60), toy_samples(60, seed=1)],
                  layout or toy_layout())
    for _ in range(rounds - 1):
        fleet.round()
    sent, several = fleet.broadcast(), fleet.participants()
    if together:
        return local_training.train_side_by_side(
            fleet.method, fleet.model, fleet.layout, sent, several, fleet.hyper, moving=moving)
    return [
        local_training.train_round(fleet.method, fleet.model, fleet.layout, sent, one.state, one.x, one.y, fleet.hyper,
                                   one.rng, moving=moving)
        for one in several
    ]


@pytest.mark.parametrize("name", ABLE)
def test_a_single_step_is_that_part_of_the_whole_step(name: str) -> None:
    """Without clipping, which depends on the whole direction."""
    moving = frozen_of(name)
    one_step: dict[str, Any] = {"local_steps": 1, "head_steps": 0, "clip_norm": 0.0, "personal_steps": 1}
    part, whole = (trained(name, which, **one_step)[0] for which in (moving, EVERYTHING))
    assert {g: set(named) for g, named in part.update.groups.items()} == {
        g: set(named) for g, named in moving.of(whole.update.groups).items()
    }
    assert max_difference(part.update.groups, moving.of(whole.update.groups)) < 1e-6
    assert part.loss == pytest.approx(whole.loss, rel=1e-6)


@pytest.mark.parametrize("name", ABLE)
def test_what_a_device_keeps_of_frozen_arrays_has_the_bits_of_before(name: str) -> None:
    """In its second round: the dual, the control, the personal arrays."""
    moving = frozen_of(name)
    fleet = Fleet(name, hyper_of(name, **SMALL), [toy_samples()])
    fleet.round()
    (one,), sent = fleet.participants(), fleet.broadcast()
    result = local_training.train_round(fleet.method, fleet.model, fleet.layout, sent, one.state, one.x, one.y,
                                        fleet.hyper, one.rng, moving=moving)
    assert result.pending.keys() == one.state.keys()
    for role, tree in result.pending.items():
        assert bits(moving.rest(tree)) == bits(moving.rest(one.state[role]))
        assert {g: set(n) for g, n in tree.items()} == {g: set(n) for g, n in one.state[role].items()}


def bits(tree: trees.Params) -> dict[str, bytes]:
    return {f"{g}/{n}": np.asarray(a).tobytes() for g, named in tree.items() for n, a in named.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ABLE if name != "pfedgp"])
def test_clients_side_by_side_train_what_each_would_alone(name: str) -> None:
    moving = frozen_of(name)
    alone, together = (trained(name, moving, together=side, rounds=2) for side in (False, True))
    for one, other in zip(alone, together, strict=True):
        assert max_difference(one.update.groups, other.update.groups) < 1e-4
        for role, tree in one.pending.items():
            assert max_difference(tree, other.pending[role]) < 1e-4
        assert one.flops == other.flops


def test_a_round_of_everything_after_one_of_a_part_is_not_disturbed_by_it() -> None:
    """The network held arrays of the round in between."""
    fleet = Fleet("fedavg", hyper_of("fedavg", **SMALL), [toy_samples()])

    def update(moving: Moving) -> dict[str, bytes]:
        (one,), sent = fleet.participants(), fleet.broadcast()
        result = local_training.train_round(fleet.method, fleet.model, fleet.layout, sent, one.state, one.x, one.y,
                                            fleet.hyper, one.rng, moving=moving)
        return bits(result.update.groups)

    before = update(EVERYTHING)
    update(Moving(frozenset({WEIGHT, BIAS})))
    assert update(EVERYTHING) == before


# Operations -----------------------------------------------------------------------------------------------------------

DEEP = {"hidden": [32, 32, 32]}
LAYERS = ["layers.0", "layers.1", "layers.2", "head"]
FORWARD = [2 * 6 * 32, 2 * 32 * 32, 2 * 32 * 32, 2 * 32 * 3]


def only(*layers: str) -> Moving:
    return Moving(frozenset(
        f"{'head' if layer == 'head' else 'body'}/{layer}.{kind}"
        for layer in LAYERS if layer not in layers for kind in ("weight", "bias")
    ))


@pytest.mark.parametrize(("moves", "backward"), [
    (LAYERS, [2, 2, 2, 2]), (["head"], [0, 0, 0, 1]), (["layers.0"], [1, 1, 1, 1]), (["layers.2"], [0, 0, 1, 1]),
    (["layers.1", "head"], [0, 1, 1, 2]),
])
def test_the_backward_pass_ends_at_the_first_layer_that_moves(moves: Sequence[str], backward: Sequence[int]) -> None:
    """For the whole model it counts as two forward passes, the gradient in the samples included."""
    layout = models.describe("mlp", TOY, ("a", "b", "c"), DEEP)
    result = trained("fedavg", only(*moves), layout, batch=20)[0]
    samples = 3 * 20
    assert result.flops == samples * sum(f * (1 + b) for f, b in zip(FORWARD, backward, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "feddyn", "pfedme", "pfldyn-proto", "metavers", "per-fedavg-exact",
                                  "per-fedavg-fo", "fedper", "knn-per"])
@pytest.mark.parametrize("moves", [["layers.2", "head"], ["layers.0", "head"], ["layers.1"]])
def test_counted_operations_are_those_of_torchs_counter(name: str, moves: Sequence[str]) -> None:
    layout = models.describe("mlp", TOY, ("a", "b", "c"), DEEP)
    with FlopCounterMode(display=False) as counter:
        results = trained(name, only(*moves), layout)
    assert sum(result.flops or 0 for result in results) == pytest.approx(counter.get_total_flops(), rel=0.2)


def test_a_frozen_array_requires_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mapping[str, bool]] = []
    fleet = Fleet("fedavg", hyper_of("fedavg", **SMALL), [toy_samples()])
    outputs = models.outputs

    def watched(network: Any, params: Any, x: torch.Tensor, output: str) -> torch.Tensor:
        own = {name: p.requires_grad for name, p in network.named_parameters()}
        given = {f"core.{n}": a.requires_grad for named in params.values() for n, a in named.items()}
        seen.append({**own, **given})
        return outputs(network, params, x, output)

    monkeypatch.setattr("fleet_core.learning.gradient_estimators.outputs", watched)
    (one,), sent = fleet.participants(), fleet.broadcast()
    local_training.train_round(fleet.method, fleet.model, fleet.layout, sent, one.state, one.x, one.y, fleet.hyper,
                               one.rng, moving=Moving(frozenset({WEIGHT, BIAS})))
    wanted = {"core.layers.0.weight": False, "core.layers.0.bias": False, "core.head.weight": True,
              "core.head.bias": True}
    assert seen == [wanted] * 3


def test_a_layer_without_counted_operations_is_a_layer_all_the_same() -> None:
    """The gradient of a norm that moves alone passes all layers after it."""
    layout = models.describe("cnn1d", InputSpec((2, 16)), ("a", "b"), {"channels": [4, 8], "width": 5})
    layers = layers_of(models.build(layout), layout)
    assert layers is not None
    assert [sorted(layer.arrays)[-1] for layer in layers] == [
        "convs.0.weight", "norms.0.weight", "convs.1.weight", "norms.1.weight", "hidden.weight", "head.weight"]
    assert [layer.forward for layer in layers if "norms" in next(iter(layer.arrays))] == [0, 0]
    assert sum(layer.forward for layer in layers) == flops_per_sample(models.build(layout), layout)
