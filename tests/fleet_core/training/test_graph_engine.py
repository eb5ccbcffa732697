"""Rounds without torch: the update of every method that can, compared with torch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.errors import BundleError, RoundError
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.base.trees import Params
from fleet_core.learning import local_training, models
from fleet_core.model.layout import InputSpec, Layout
from fleet_core.model.train_graph import pack, unpack
from fleet_core.tasks.anomaly import Anomaly
from fleet_core.tasks.labels import MultiLabel
from fleet_core.tasks.regression import Regression
from fleet_core.tasks.task import Task
from fleet_core.training import local_round, round_plans
from fleet_core.training.graph_engine import GraphEngine, Opened, check_golden
from fleet_core.training.local_round import TrainResult
from tests.support.simulation import Fleet, Samples, hyper_of, max_difference, toy_layout, toy_samples
from tests.support.train_graphs import ABLE, opened, train_graph

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

STEPS: dict[str, Any] = {
    "local_steps": 20, "batch": 20, "support_batch": 10, "query_batch": 10, "inner_steps": 2, "shots": 3,
    "query_shots": 4, "client_lr": 0.05,
}  # fmt: skip


ESTIMATORS = ("fedavg", "per-fedavg-fo", "per-fedavg-hf", "per-fedavg-exact", "fedmeta-metasgd")
"""A method for each estimator that needs no classes."""


def both(
    name: str, moving: Moving = EVERYTHING, rounds: int = 1, pass_of: int = 0, layout: Layout | None = None,
    narrow: bool = False, **changes: Any,
) -> tuple[TrainResult, TrainResult]:
    """The result of the last of ``rounds`` on one device by torch and by the graph, which start alike. layout: of
    a task; None for classes. narrow: as in ``train_graph``."""
    data = [task_samples(layout, 60 - 10 * i, i) if layout else toy_samples(60 - 10 * i, seed=i) for i in range(2)]
    fleet = Fleet(name, hyper_of(name, **{**STEPS, **changes}), data, layout or toy_layout())
    for _ in range(rounds - 1):
        fleet.round()
    sent = fleet.broadcast()
    (one, _), (again, _) = fleet.participants(), fleet.participants()
    by_torch = local_training.train_round(
        fleet.method, fleet.model, fleet.layout, sent.beside(one.per_device), one.state, one.x, one.y, fleet.hyper,
        one.rng, moving=moving,
    )
    graph = train_graph(name, layout, narrow=narrow)
    engine = GraphEngine(opened(replace(graph, info=replace(graph.info, pass_of=pass_of))))
    return by_torch, local_round.train_one(engine, fleet.method, fleet.layout, sent, again, fleet.hyper, moving=moving)


def task_samples(layout: Layout, count: int, seed: int) -> Samples:
    """Samples of the layout, and the truths of its task: two targets in units of their own, some of them far off, or
    two labels, or what a repetition of quiet samples should differ by."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, *layout.input.shape)).astype(np.float32)
    level = x.reshape(count, -1)[:, :3].sum(1)
    y = np.stack([200 + 40 * level, -0.5 * level + 0.3 * rng.standard_t(2, count)], 1)
    if isinstance(layout.task, Anomaly):
        return x, layout.task.targets(count)
    return x, (y > [200, 0]).astype(np.float32) if isinstance(layout.task, MultiLabel) else y


def of_task(model: str, task: str) -> Layout:
    """task: the loss of numbers, or ``labels`` or ``anomaly``."""
    known: dict[str, tuple[InputSpec, dict[str, Any]]] = {
        "mlp": (InputSpec((6,)), {"hidden": [8], "activation": "elu"}),
        "cnn1d": (InputSpec((2, 16)), {"channels": [4], "width": 8}),
    }
    spec, options = known[model]
    tasks: dict[str, Task] = {"labels": MultiLabel(("a", "b")), "anomaly": Anomaly(int(np.prod(spec.shape)))}
    numbers = Regression(("a", "b"), (200.0, 0.0), (60.0, 0.8), task if task not in tasks else "huber")
    return models.describe(model, spec, (), options, tasks.get(task, numbers))


def _flat(params: Params) -> dict[str, Any]:
    return {f"{group}/{name}": array for group, named in params.items() for name, array in named.items()}


def distance(one: Params, other: Params) -> float:
    """Relative to the norm of ``one``."""
    return float(trees.norm(trees.subtract(one, other)) / (trees.norm(one) or 1.0))


@pytest.mark.parametrize("name", ABLE)
def test_the_update_of_twenty_steps_is_torchs(name: str) -> None:
    """And the state that follows, in a device's second round: of the dual, the control, the personal groups."""
    by_torch, found = both(name, rounds=2)
    assert {g: list(named) for g, named in found.update.groups.items()} == {
        g: list(named) for g, named in by_torch.update.groups.items()
    }
    assert distance(by_torch.update.groups, found.update.groups) < 1e-5
    assert found.pending.keys() == by_torch.pending.keys()
    for role, tree in by_torch.pending.items():
        assert distance(tree, found.pending[role]) < 1e-5
    assert found.update.scalars == pytest.approx(by_torch.update.scalars, rel=1e-5)
    assert (found.samples, found.steps, found.left_out, found.flops) == (
        by_torch.samples, by_torch.steps, by_torch.left_out, by_torch.flops)
    assert found.loss == pytest.approx(by_torch.loss, rel=1e-5)
    assert all(a.dtype == np.float32 for named in found.update.groups.values() for a in named.values())


@pytest.mark.parametrize(("name", "model", "task"), [
    *((name, "mlp", "huber") for name in ABLE if not METHODS[name].needs_classes),
    *((name, "mlp", "squared") for name in ESTIMATORS), *((name, "cnn1d", "huber") for name in ESTIMATORS),
    *((name, "mlp", task) for task in ("labels", "anomaly") for name in ESTIMATORS),
    *(("fedavg", "cnn1d", task) for task in ("labels", "anomaly")),
])  # fmt: skip
def test_the_update_of_a_task_is_torchs(name: str, model: str, task: str) -> None:
    once = (model, task) in (("cnn1d", "labels"), ("cnn1d", "anomaly"))  # with one method
    by_torch, found = both(name, layout=of_task(model, task), rounds=2, narrow=once)
    assert distance(by_torch.update.groups, found.update.groups) < 1e-5
    for role, tree in by_torch.pending.items():
        assert distance(tree, found.pending[role]) < 1e-5
    assert found.loss == pytest.approx(by_torch.loss, rel=1e-5)


@pytest.mark.parametrize("name", ["pfldyn-proto", "per-fedavg-exact", "scaffold"])
def test_frozen_arrays_stay_and_are_not_sent(name: str) -> None:
    moving = Moving(frozenset({"body/layers.0.weight"}))
    by_torch, found = both(name, moving)
    assert distance(by_torch.update.groups, found.update.groups) < 1e-5
    assert "layers.0.weight" not in found.update.groups["body"]


@pytest.mark.parametrize("name", ["fedavg", "per-fedavg-exact", "per-fedavg-hf"])
def test_a_batch_in_passes_of_unequal_size_gives_the_same_update(name: str) -> None:
    by_torch, found = both(name, pass_of=3)
    assert distance(by_torch.update.groups, found.update.groups) < 1e-5
    assert found.loss == pytest.approx(by_torch.loss, rel=1e-5)


def test_no_pass_is_larger_than_the_graph_says() -> None:
    whole, sizes = opened(train_graph("fedavg")), list[int]()
    graph = replace(whole.graph, info=replace(whole.graph.info, pass_of=8))

    def counting(feed: dict[str, Any]) -> Any:
        sizes.append(len(feed["y"]))
        return whole.functions["train"](feed)

    x, y = toy_samples(20)
    flat = whole.graph.layout.seeded(0)
    value, _ = GraphEngine(Opened(graph, {"train": counting})).entropy(x, y)(flat)
    assert sizes == [7, 7, 6]
    assert value == pytest.approx(whole.functions["train"]({**_flat(flat), "x": x, "y": y})["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("per-fedavg-exact", {"independent_hessian_batch": True}), ("fedmeta-maml", {"form": "appendix"}),
     ("fedavg", {"local_optimizer": "adam", "weight_decay": 0.01})],
)  # fmt: skip
def test_other_forms_of_a_method_are_torchs_too(name: str, changes: dict[str, Any]) -> None:
    by_torch, found = both(name, **changes)
    assert distance(by_torch.update.groups, found.update.groups) < 1e-5


def test_classes_of_a_devices_own_take_the_same_graph() -> None:
    """More than the fleet has, one of them with two samples."""
    x, y = toy_samples(60, 5)
    y[y == 4] = np.where(np.arange((y == 4).sum()) < 2, 4, 3)
    fleet = Fleet("pfldyn-proto", hyper_of("pfldyn-proto", **STEPS), [(x, y * 7)])
    sent, (one,), (again,) = fleet.broadcast(), fleet.participants(), fleet.participants()
    by_torch = local_training.train_round(
        fleet.method, fleet.model, fleet.layout, sent, one.state, one.x, one.y, fleet.hyper, one.rng)
    engine = GraphEngine(opened(train_graph("pfldyn-proto")))
    found = local_round.train_one(engine, fleet.method, fleet.layout, sent, again, fleet.hyper)
    assert distance(by_torch.update.groups, found.update.groups) < 1e-5


@pytest.mark.parametrize("name", ["fedmeta-maml", "fedmeta-fomaml", "fedmeta-metasgd", "per-fedavg-hf"])
def test_a_query_of_classes_that_the_support_lacks_has_a_gradient_and_it_is_torchs(name: str) -> None:
    """A device with one sample of class 2: both engines take the same draws, and all of its samples."""
    x, y = toy_samples(12, labels=[0, 1])
    y[5] = 2
    fleet = Fleet(name, hyper_of(name, **{**STEPS, "support_batch": 20, "query_batch": 80}), [(x, y)])
    sent, (one,), (again,) = fleet.broadcast(), fleet.participants(), fleet.participants()
    by_torch = local_training.train_round(
        fleet.method, fleet.model, fleet.layout, sent, one.state, one.x, one.y, fleet.hyper, one.rng)
    found = local_round.train_one(
        GraphEngine(opened(train_graph(name))), fleet.method, fleet.layout, sent, again, fleet.hyper)
    assert distance(by_torch.update.groups, found.update.groups) < 1e-5
    assert found.left_out == by_torch.left_out == {}
    (again,) = fleet.participants()
    for support, query in round_plans.plan_of(fleet.method, again, fleet.hyper).draws:
        assert sorted([*support, *query]) == list(range(12))
        assert len(support) == 2
        assert not set(y[query]) <= set(y[support])


def test_the_graph_gives_its_golden_outputs_and_one_that_does_not_is_refused() -> None:
    graph = train_graph("per-fedavg-exact")
    check_golden(opened(graph))
    for kind, place in (("train", (0, 0)), ("train", (1, 1)), ("product", (2, 0))):
        wrong = graph.golden[kind].copy()
        wrong[place] = wrong[place] * 1.02 + 0.1
        with pytest.raises(BundleError, match=f"the graph '{kind}' does not give its golden outputs"):
            check_golden(opened(replace(graph, golden={**graph.golden, kind: wrong})))


def test_a_graph_of_another_estimator_or_with_other_constants_is_refused() -> None:
    fleet = Fleet("pfldyn-proto", hyper_of("pfldyn-proto", distance="norm"), [toy_samples()])
    (one,), sent = fleet.participants(), fleet.broadcast()
    for name, why in (("pfldyn-proto", "was made with distance = 'squared', and the round has 'norm'"),
                      ("fedavg", "is not of the estimator proto")):
        engine = GraphEngine(opened(train_graph(name)))
        with pytest.raises(BundleError, match=why):
            local_round.train_one(engine, fleet.method, fleet.layout, sent, one, fleet.hyper)


def test_a_graph_of_another_task_is_refused() -> None:
    graph = train_graph("fedavg", of_task("mlp", "huber"))
    assert unpack(pack(graph), graph.layout).golden["y"].dtype == np.float32
    with pytest.raises(BundleError, match="is for the layout"):
        unpack(pack(graph), of_task("mlp", "squared"))
    wrong = replace(graph, golden={**graph.golden, "y": np.zeros(len(graph.golden["x"]), np.int64)})
    with pytest.raises(BundleError, match="golden y is int64"):
        unpack(pack(wrong), graph.layout)


def test_a_loss_that_is_not_finite_ends_the_round() -> None:
    fleet = Fleet("fedavg", hyper_of("fedavg", client_lr=1e6, local_steps=20, clip_norm=0.0), [toy_samples()])
    (one,), sent = fleet.participants(), fleet.broadcast()
    huge = replace(sent, groups=trees.scale(sent.groups, np.float32(1e18)))
    with pytest.raises(RoundError, match=r"the loss is (nan|inf) at step"):
        local_round.train_one(GraphEngine(opened(train_graph("fedavg"))), fleet.method, fleet.layout, huge, one,
                              fleet.hyper)


def test_a_graph_that_fails_in_a_step_changes_nothing() -> None:
    """For example when memory runs out."""
    fleet = Fleet("fedavg", hyper_of("fedavg", local_steps=4), [toy_samples()])
    (one,), sent = fleet.participants(), fleet.broadcast()
    whole, calls = opened(train_graph("fedavg")), [0]

    def failing(feed: dict[str, Any]) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise MemoryError("no memory")
        return whole.functions["train"](feed)

    before = trees.apply(np.copy, sent.groups)
    with pytest.raises(MemoryError):
        local_round.train_one(GraphEngine(Opened(whole.graph, {"train": failing})), fleet.method, fleet.layout, sent,
                              one, fleet.hyper)
    assert max_difference(before, sent.groups) == 0.0
    assert METHODS["fedavg"].client.keeps == ()
