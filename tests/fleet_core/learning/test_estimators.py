"""Gradient estimators in float64: compared with finite differences of their loss, closed forms on quadratics and each
other, and clients side by side with one client alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.learning import gradients, losses, models
from fleet_core.learning.gradient_estimators import PADDED, Episode, Estimators
from fleet_core.learning.gradients import Gradient
from fleet_core.model.layout import InputSpec
from tests.support.quadratics import DEVICES, SIZE, Quadratic, QuadraticFleet, average, dyn, scaf, tree, vector

CLASSES, WIDTH = 3, 5
HYPER: dict[str, Any] = {
    "inner_lr": 0.1, "inner_steps": 2, "difference": 1e-5, "distance": "squared", "pull": 0.7, "pull_form": "norm",
    "triplet_sum": True, "margin_divisor": "printed", "margin_distance": "norm", "negative": "positive",
    "fixed_margin": 0.0, "kernel": "rbf", "output_scale": 8.0, "length_scale": 1.0, "augmentation_steps": 5,
    "means_share": 0.3,
}  # fmt: skip
ADAPTATIONS = (
    "none", "proto", "maml-exact", "maml-first-order", "maml-hessian-free", "meta-sgd", "metavers", "fedproto",
    "gp", "joint",
)  # fmt: skip


class Core(nn.Module):
    """One hidden layer of tanh, three times differentiable."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, CLASSES)

    def embed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def weights(adaptation: str = "none", seed: int = 0) -> Params:
    """float64 weights, and the other groups that the adaptation receives."""
    rng = np.random.default_rng(seed)
    shapes = {
        "body": {"layer.weight": (WIDTH, 6), "layer.bias": (WIDTH,)},
        "head": {"head.weight": (CLASSES, WIDTH), "head.bias": (CLASSES,)},
    }
    w = {g: {n: torch.tensor(0.5 * rng.normal(size=s)) for n, s in named.items()} for g, named in shapes.items()}
    if adaptation == "meta-sgd":
        return trees.mirrored(w, trees.apply(lambda a: torch.tensor(0.3 * rng.random(a.shape)), w), "rates")
    if adaptation == "metavers":
        return {**w, "margin": {"value": 50.0, "loss_share": 0.6}}  # above any that is measured: a constant
    if adaptation == "fedproto":
        fleet = {"count": torch.tensor([3.0, 0, 5]).double(), "total": torch.tensor(rng.normal(size=(CLASSES, WIDTH)))}
        return {**w, "prototypes": fleet}
    return w


def episode(seed: int = 0, *, third: bool = False, sizes: tuple[int, int, int] = (12, 8, 10)) -> Episode:
    rng = np.random.default_rng([seed, 1])
    parts = [[torch.tensor(rng.normal(size=(n, 6))), torch.tensor(np.arange(n) % CLASSES)] for n in sizes]
    return Episode(*parts[0], *parts[1], *(parts[2] if third else ()))


def estimator(adaptation: str, *, clients: bool = False, **hyper: Any) -> Callable[[Episode], Gradient]:
    network = models.Network(Core(), InputSpec((6,)))
    return Estimators(network, CLASSES, SimpleNamespace(**{**HYPER, **hyper}), clients=clients).of(adaptation)


def parameters(at: Params) -> Params:
    return trees.only(at, ("body", "head", "rates"))


def flat(params: Params) -> Tensor:
    return torch.cat([array.reshape(-1) for named in params.values() for array in named.values()])


def away(left: Params, right: Params) -> float:
    """Relative distance."""
    return float(torch.linalg.vector_norm(flat(left) - flat(right)) / torch.linalg.vector_norm(flat(right)))


# Finite differences ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adaptation", "hyper"),
    [
        ("none", {}),
        ("proto", {}),
        ("proto", {"distance": "norm"}),
        ("maml-exact", {"inner_steps": 1}),
        ("maml-exact", {"inner_steps": 3}),
        ("meta-sgd", {}),
        ("metavers", {}),
        ("metavers", {"distance": "norm", "negative": "centroid", "triplet_sum": False, "margin_divisor": "pairs"}),
        ("metavers", {"fixed_margin": 0.3}),
        ("joint", {}),
        ("fedproto", {}),
        ("fedproto", {"pull_form": "square"}),
    ],
)
def test_a_gradient_is_the_finite_difference_of_its_loss(adaptation: str, hyper: dict[str, Any]) -> None:
    gradient, at = estimator(adaptation, **hyper)(episode()), weights(adaptation)
    _, found = gradient(at)
    generator = torch.Generator().manual_seed(1)
    along = trees.apply(lambda a: torch.randn(a.shape, dtype=a.dtype, generator=generator), parameters(at))
    h = 1e-5

    def loss(sign: int) -> float:
        return float(gradient({**at, **trees.axpy(sign * h, along, parameters(at))})[0].detach())

    slope = float(flat(parameters(found)) @ flat(along))
    assert abs(slope) > 1e-3
    assert slope == pytest.approx((loss(1) - loss(-1)) / (2 * h), rel=1e-6, abs=1e-9)


def test_the_joint_loss_is_that_of_class_means_and_that_of_the_head_by_their_shares() -> None:
    at, e = weights(), episode()
    means = estimator("proto")(e)(at)
    head = estimator("none")(Episode(e.support_x[:0], e.support_y[:0], both_batches(), labels_of_both()))(at)
    for share in (0.0, 0.3, 1.0):
        value, found = estimator("joint", means_share=share)(e)(at)
        assert float(value) == pytest.approx(share * float(means[0]) + (1 - share) * float(head[0]), rel=1e-12)
        wanted = trees.axpy(share, means[1], trees.scale(head[1], 1 - share))
        assert away(found, wanted) < 1e-12


def test_metavers_own_margin_is_measured_and_is_a_constant_for_the_gradient() -> None:
    gradient, at = estimator("metavers", distance="norm")(episode()), weights("metavers")
    value, found = gradient({**at, "margin": {"value": 0.0, "loss_share": 0.6}})
    own = float(found["margin"]["value"])
    z = models.outputs(models.Network(Core(), InputSpec((6,))), parameters(at), both_batches(), "embed")
    assert own == pytest.approx(float(losses.spread(z, labels_of_both(), CLASSES, "norm", True)), rel=1e-12)
    frozen_value, frozen = gradient({**at, "margin": {"value": own, "loss_share": 0.6}})
    torch.testing.assert_close(value, frozen_value, rtol=1e-12, atol=0)
    torch.testing.assert_close(flat(parameters(found)), flat(parameters(frozen)), rtol=1e-12, atol=0)
    larger, _ = gradient({**at, "margin": {"value": own + 1, "loss_share": 0.6}})
    assert bool(larger > value + 1)


def both_batches() -> Tensor:
    return torch.cat([episode().support_x, episode().query_x])


def labels_of_both() -> Tensor:
    return torch.cat([episode().support_y, episode().query_y])


def test_metavers_with_a_loss_share_of_one_is_proto() -> None:
    for distance in ("squared", "norm"):
        at = {**weights("metavers"), "margin": {"value": 50.0, "loss_share": 1.0}}
        value, found = estimator("metavers", distance=distance)(episode())(at)
        wanted_value, wanted = estimator("proto", distance=distance)(episode())(weights())
        assert torch.equal(value, wanted_value)
        torch.testing.assert_close(flat(parameters(found)), flat(wanted), rtol=1e-13, atol=1e-15)


def test_fedproto_without_a_pull_or_without_class_means_is_cross_entropy() -> None:
    at = weights("fedproto")
    empty = {**at, "prototypes": trees.zeros_like({"p": at["prototypes"]})["p"]}
    wanted = estimator("none")(episode())(weights())[1]
    for found in (estimator("fedproto", pull=0.0)(episode())(at)[1], estimator("fedproto")(episode())(empty)[1]):
        torch.testing.assert_close(flat(parameters(found)), flat(wanted), rtol=1e-13, atol=1e-15)
    pulled = estimator("fedproto")(episode())(at)[1]
    assert away(parameters(pulled), wanted) > 0.01
    assert pulled["prototypes"] is at["prototypes"]


def test_what_a_round_of_fedproto_measures_is_the_total_by_class() -> None:
    network, at = models.Network(Core(), InputSpec((6,))), weights("fedproto")
    x, y = both_batches(), labels_of_both()
    measured = Estimators(network, CLASSES, SimpleNamespace()).measure(x, y)(at)[1]["prototypes"]
    z = torch.tanh(x @ at["body"]["layer.weight"].T + at["body"]["layer.bias"])
    for k in range(CLASSES):
        torch.testing.assert_close(measured["total"][k], z[y == k].sum(0))
        assert float(measured["count"][k]) == int((y == k).sum())


# MAML -----------------------------------------------------------------------------------------------------------------


def by_hand(at: Params, e: Episode, lr: float, steps: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(w, T(w), loss at T(w)) of SGD steps on the support, written out in torch."""
    w = [array.clone().requires_grad_() for named in at.values() for array in named.values()]

    def loss(w: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(torch.tanh(x @ w[0].T + w[1]) @ w[2].T + w[3], y)

    there = w
    for _ in range(steps):
        slopes = torch.autograd.grad(loss(there, e.support_x, e.support_y), there, create_graph=True)
        there = [a - lr * g for a, g in zip(there, slopes, strict=True)]
    return w, there, loss(there, e.query_x, e.query_y)


@pytest.mark.parametrize("steps", [1, 3])
def test_exact_and_first_order_maml_are_autograd_through_steps_written_by_hand(steps: int) -> None:
    w, there, value = by_hand(weights(), episode(), 0.1, steps)
    exact, first_order = (torch.autograd.grad(value, of, retain_graph=True) for of in (w, there))
    for adaptation, wanted in (("maml-exact", exact), ("maml-first-order", first_order)):
        loss, found = estimator(adaptation, inner_steps=steps)(episode())(weights())
        torch.testing.assert_close(loss.detach(), value.detach(), rtol=1e-13, atol=0)
        torch.testing.assert_close(flat(found), torch.cat([g.reshape(-1) for g in wanted]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_error_of_hessian_free_falls_with_the_square_of_the_difference(steps: int) -> None:
    _, exact = estimator("maml-exact", inner_steps=steps)(episode())(weights())
    errors = [
        away(estimator("maml-hessian-free", inner_steps=steps, difference=d)(episode())(weights())[1], exact)
        for d in (0.1, 0.01, 1e-3, 1e-4)
    ]
    ratios = [a / b for a, b in pairwise(errors)]
    assert all(80 < ratio < 125 for ratio in ratios), ratios
    assert errors[-1] < 1e-8
    _, first_order = estimator("maml-first-order", inner_steps=steps)(episode())(weights())
    assert away(first_order, exact) > 100 * errors[1]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("adaptation", ["maml-exact", "maml-hessian-free"])
def test_a_third_batch_that_is_the_support_changes_nothing(adaptation: str, steps: int) -> None:
    e = episode()
    same = replace(e, hessian_x=e.support_x, hessian_y=e.support_y)
    plain, third = (estimator(adaptation, inner_steps=steps)(one)(weights())[1] for one in (e, same))
    torch.testing.assert_close(flat(third), flat(plain), rtol=1e-12, atol=1e-14)
    other = estimator(adaptation, inner_steps=steps)(episode(third=True))(weights())[1]
    assert away(other, plain) > 1e-3


def test_an_independent_batch_gives_the_hessian_of_fallahs_eq_8() -> None:
    e, lr = episode(third=True), 0.1
    x: Any = e.hessian_x
    y: Any = e.hessian_y
    w, there, value = by_hand(weights(), e, lr, 1)
    v = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, there)])
    here = torch.cat([a.detach().reshape(-1) for a in w])

    def third(at: Tensor) -> Tensor:
        parts = iter(torch.split(at, [a.numel() for a in w]))
        a, b, c, d = (next(parts).reshape(old.shape) for old in w)
        return nn.functional.cross_entropy(torch.tanh(x @ a.T + b) @ c.T + d, y)

    here.requires_grad_()
    slope = torch.autograd.grad(third(here), here, create_graph=True)[0]
    hessian = torch.stack([torch.autograd.grad(one, here, retain_graph=True)[0] for one in slope])
    found = estimator("maml-exact", inner_steps=1)(e)(weights())[1]
    torch.testing.assert_close(flat(found), v - lr * hessian @ v, rtol=1e-11, atol=1e-13)


def test_meta_sgd_with_equal_rates_is_maml_of_one_step() -> None:
    at = weights("meta-sgd")
    w, _ = trees.parted(at, "rates")
    even = trees.mirrored(w, trees.apply(lambda a: torch.full_like(a, 0.1), w), "rates")
    _, found = estimator("meta-sgd")(episode())(even)
    _, wanted = estimator("maml-exact", inner_steps=1)(episode())(w)
    torch.testing.assert_close(flat(trees.parted(found, "rates")[0]), flat(wanted), rtol=1e-13, atol=1e-15)
    assert trees.norm(trees.parted(found, "rates")[1]) > 1e-3


# Closed forms on quadratics -------------------------------------------------------------------------------------------

SUPPORT, QUERY, THIRD = (DEVICES[f"device-{i}"] for i in range(3))
HERE = models.to_torch(tree(np.ones(SIZE)))


def bowl(loss: Quadratic) -> gradients.Loss:
    hessian, minimum = torch.tensor(loss.hessian), torch.tensor(loss.minimum)
    return lambda w: 0.5 * (flat(w) - minimum) @ hessian @ (flat(w) - minimum)


def closed(lr: float, steps: int, hessian: Any) -> tuple[Any, Any]:
    """(∇query at T(w), and the same with the steps' (I − lr H) before it)."""
    shrink = np.linalg.matrix_power(np.eye(SIZE) - lr * SUPPORT.hessian, steps)
    slope = QUERY.slope(shrink @ (np.ones(SIZE) - SUPPORT.minimum) + SUPPORT.minimum)
    return slope, np.linalg.matrix_power(np.eye(SIZE) - lr * hessian, steps) @ slope


@pytest.mark.parametrize("steps", [1, 3])
def test_maml_gradients_on_quadratics_are_those_of_the_closed_form(steps: int) -> None:
    first_order, exact = closed(0.05, steps, SUPPORT.hessian)
    _, found = gradients.maml_exact(bowl(SUPPORT), bowl(QUERY), 0.05, steps)(HERE)
    _, first = gradients.maml_first_order(bowl(SUPPORT), bowl(QUERY), 0.05, steps)(HERE)
    np.testing.assert_allclose(vector(models_of(found)), exact, rtol=1e-12)
    np.testing.assert_allclose(vector(models_of(first)), first_order, rtol=1e-12)
    assert np.linalg.norm(exact - first_order) > 0.03 * np.linalg.norm(exact)


def models_of(params: Params) -> Params:
    return trees.apply(lambda a: a.detach().numpy(), params)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("length", [1e-3, 1e-2, 0.1, 1.0])
def test_hessian_free_is_exact_on_quadratics_for_any_sensible_difference(steps: int, length: float) -> None:
    """``length`` is δ‖v‖."""
    product = gradients.central_difference(bowl(SUPPORT), length / float(trees.norm(HERE)))
    _, found = gradients.maml_with_hessian(bowl(SUPPORT), bowl(QUERY), 0.05, steps, product)(HERE)
    np.testing.assert_allclose(vector(models_of(found)), closed(0.05, steps, SUPPORT.hessian)[1], rtol=1e-10)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_third_batch_gives_its_own_hessian(steps: int) -> None:
    wanted = closed(0.05, steps, THIRD.hessian)[1]
    for product in (
        gradients.hessian_product(bowl(THIRD)),
        gradients.central_difference(bowl(THIRD), 1e-2),
    ):
        _, found = gradients.maml_with_hessian(bowl(SUPPORT), bowl(QUERY), 0.05, steps, product)(HERE)
        np.testing.assert_allclose(vector(models_of(found)), wanted, rtol=1e-10)


def test_the_difference_is_relative_and_a_direction_of_zero_has_a_product_of_zero() -> None:
    seen: list[float] = []

    def loss(w: Params) -> Tensor:
        seen.append(float(torch.linalg.vector_norm(flat(w).detach() - 1)))
        return bowl(SUPPORT)(w)

    product = gradients.central_difference(loss, 0.01)
    for scale in (1e-6, 1.0, 1e6):
        product(HERE, trees.scale(HERE, scale))
    assert seen == pytest.approx([0.01 * np.sqrt(SIZE)] * 6, rel=1e-6)
    nothing = product(HERE, trees.zeros_like(HERE))
    assert not flat(nothing).any()


def test_meta_sgd_on_quadratics_has_the_closed_form_in_weights_and_rates() -> None:
    rates = np.linspace(0.01, 0.06, SIZE)
    both = trees.mirrored(HERE, models.to_torch(tree(rates)), "rates")
    _, found = gradients.meta_sgd(bowl(SUPPORT), bowl(QUERY))(both)
    slope = SUPPORT.slope(np.ones(SIZE))
    after = QUERY.slope(np.ones(SIZE) - rates * slope)
    of_w, of_rates = trees.parted(models_of(found), "rates")
    np.testing.assert_allclose(vector(of_w), after - SUPPORT.hessian @ (rates * after), rtol=1e-12)
    np.testing.assert_allclose(vector(of_rates), -slope * after, rtol=1e-12)


@dataclass(frozen=True)
class Adapted(Quadratic):
    """f_i(T_i(w)) of a device whose T_i is one SGD step of rate ``lr``: a quadratic of Hessian (I − lr H) H (I − lr H)
    about the same minimum, whose gradient the estimator finds."""

    own: Quadratic
    lr: float
    estimate: Callable[[gradients.Loss, float], Gradient]

    def gradient(self, at: Params) -> Params:
        _, slope = self.estimate(bowl(self.own), self.lr)(models.to_torch(at))
        return models_of(slope)


def adapted(own: Quadratic, lr: float, estimate: Callable[[gradients.Loss, float], Gradient]) -> Adapted:
    shrink = np.eye(SIZE) - lr * own.hessian
    return Adapted(shrink @ own.hessian @ shrink, own.minimum, own, lr, estimate)


def hessian_free(loss: gradients.Loss, lr: float) -> Gradient:
    return gradients.maml_with_hessian(loss, loss, lr, 1, gradients.central_difference(loss, 1e-2))


@pytest.mark.parametrize(
    ("build", "estimate", "found"),
    [
        (dyn, lambda loss, lr: gradients.maml_exact(loss, loss, lr, 1), True),
        (scaf, lambda loss, lr: gradients.maml_exact(loss, loss, lr, 1), True),
        (dyn, hessian_free, True),
        (dyn, lambda loss, lr: gradients.maml_first_order(loss, loss, lr, 1), False),
        (average, lambda loss, lr: gradients.maml_exact(loss, loss, lr, 1), False),
    ],
    ids=["pfldyn", "pflscaf", "pfldyn, hessian-free", "pfldyn, first-order", "per-fedavg"],
)
@pytest.mark.slow
def test_with_maml_the_minimiser_of_the_mean_loss_after_adaptation_is_found(
    build: Callable[..., QuadraticFleet], estimate: Callable[[gradients.Loss, float], Gradient], found: bool
) -> None:
    """Acar's objective (OPT), in closed form; first-order and averaging stop elsewhere."""
    losses = {name: adapted(DEVICES[name], 0.05, estimate) for name in list(DEVICES)[:3]}
    fleet = build(losses=losses, local_steps=5)
    for _ in range(100):
        fleet.round()
    assert (fleet.error < 1e-8) is found
    assert found or fleet.error > 0.02


def test_first_order_is_exact_where_there_is_no_curvature_or_no_step() -> None:
    slope = torch.arange(SIZE, dtype=torch.float64)
    for support, lr in ((lambda w: flat(w) @ slope, 0.1), (bowl(SUPPORT), 0.0)):
        _, exact = gradients.maml_exact(support, bowl(QUERY), lr, 3)(HERE)
        _, first = gradients.maml_first_order(support, bowl(QUERY), lr, 3)(HERE)
        assert torch.equal(flat(exact), flat(first))


# What the client's loop relies on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptation", ADAPTATIONS)
def test_a_gradient_leaves_the_weights_alone_and_has_their_names(adaptation: str) -> None:
    at = weights(adaptation)
    before = trees.apply(lambda a: a.clone(), parameters(at))
    value, found = estimator(adaptation)(episode())(at)
    assert {g: list(named) for g, named in found.items()} == {g: list(named) for g, named in at.items()}
    assert torch.equal(flat(before), flat(parameters(at)))
    assert bool(torch.isfinite(value))
    assert not flat(parameters(found)).requires_grad


@pytest.mark.parametrize("third", [False, True])
@pytest.mark.parametrize("adaptation", ADAPTATIONS)
def test_clients_side_by_side_have_the_gradients_that_each_has_alone(adaptation: str, third: bool) -> None:
    """Also with batches of other sizes, where the loss ignores the padding."""
    sizes = [(12, 8, 10), (7, 8, 3), (2, 9, 10)] if adaptation in PADDED else [(12, 8, 10)] * 3
    several = [episode(seed, third=third, sizes=size) for seed, size in enumerate(sizes)]
    ats = [weights(adaptation, seed) for seed in range(3)]
    alone = [estimator(adaptation)(e)(at) for e, at in zip(several, ats, strict=True)]
    stacked: Params = trees.apply(
        lambda *arrays: torch.stack(arrays) if isinstance(arrays[0], Tensor) else arrays[0], *ats
    )
    with trees.side_by_side():
        values, found = estimator(adaptation, clients=True)(Episode.stacked(several))(stacked)
    for i, (value, wanted) in enumerate(alone):
        assert float(values[i].detach()) == pytest.approx(float(value.detach()), rel=1e-12)
        mine = trees.apply(lambda a, i=i: a[i], found)
        # central differences divide the rounding error by 2δ
        tolerance = 1e-8 if adaptation == "maml-hessian-free" else 1e-12
        torch.testing.assert_close(flat(mine), flat(wanted), rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("adaptation", ADAPTATIONS)
def test_no_clients_gradient_depends_on_who_stands_beside_it(adaptation: str) -> None:
    at = weights(adaptation)
    stacked = trees.apply(lambda a: torch.stack([a, a]) if isinstance(a, Tensor) else a, at)
    with trees.side_by_side():
        gradient = estimator(adaptation, clients=True)
        first = gradient(Episode.stacked([episode(0), episode(1)]))(stacked)[1]
        other = gradient(Episode.stacked([episode(0), episode(2)]))(stacked)[1]
    assert torch.equal(flat(trees.apply(lambda a: a[0], first)), flat(trees.apply(lambda a: a[0], other)))
    beside = [flat(parameters(trees.apply(lambda a: a[1], found))) for found in (first, other)]
    assert not torch.equal(*beside)
