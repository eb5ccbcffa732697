"""Models, losses, gradient estimators and the client's loop. The algebra is compared in float64."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fleet_core import learning
from fleet_core.algorithms import trees
from fleet_core.algorithms.methods import METHODS
from fleet_core.algorithms.seam import Payload
from fleet_core.errors import ConfigError, DataError, RoundError
from fleet_core.layout import InputSpec, Layout
from fleet_core.learning import gradients, losses, models, train

ADAPTATIONS = ("none", "proto", "maml-exact", "maml-first-order")
TOY = InputSpec((6,))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def toy_layout(classes: int = 3, **options: Any) -> Layout:
    names = [f"c{i}" for i in range(classes)]
    return models.describe("mlp", TOY, names, {"hidden": [8], "activation": "elu", **options})


def toy_samples(number: int = 60, classes: int = 3, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """One centre per class in the first three values; loud noise in the others, which training must learn to ignore."""
    rng = np.random.default_rng(seed)
    y = np.arange(number) % classes
    centres = rng.standard_normal((classes, 6)) * (2, 2, 2, 0, 0, 0)
    noise = rng.standard_normal((number, 6)) * (0.3, 0.3, 0.3, 3, 3, 3)
    return (centres[y] + noise).astype(np.float32), y.astype(np.int64)


# Models


def test_lenet_has_the_parameters_of_the_paper() -> None:
    layout = models.describe("lenet", InputSpec((1, 32, 32)), [str(i) for i in range(10)], {})
    assert layout.parameters(("body", "head")) == 794_762
    assert layout.embedding == 192


def test_cnn1d_is_small_and_takes_heartbeats() -> None:
    layout = models.describe("cnn1d", InputSpec((3, 128)), ("N", "S", "V"), {})
    assert layout.parameters(("body", "head")) < 40_000
    assert layout.embedding == 64
    assert models.build(layout)(torch.zeros(2, 3, 128)).shape == (2, 3)


def test_only_the_head_is_in_group_head() -> None:
    layout = toy_layout()
    assert {t.name: t.group for t in layout.tensors} == {
        "layers.0.weight": "body",
        "layers.0.bias": "body",
        "head.weight": "head",
        "head.bias": "head",
    }


def test_a_layout_survives_json() -> None:
    layout = models.describe("mlp", TOY, ("a", "b"), {"hidden": (5, 4)})
    assert Layout.from_json(layout.to_json()) == layout
    assert models.build(Layout.from_json(layout.to_json()))(torch.zeros(1, 6)).shape == (1, 2)


def test_preprocessing_is_per_channel_and_inside_the_model() -> None:
    spec = InputSpec((2, 4, 4), "uint8", scale=0.5, mean=(1.0, 2.0), std=(2.0, 4.0))
    network = models.Network(nn.Linear(1, 1), spec)
    prepared = network.prepare(torch.full((1, 2, 4, 4), 10, dtype=torch.uint8))
    assert torch.equal(prepared[0, 0], torch.full((4, 4), 2.0))
    assert torch.equal(prepared[0, 1], torch.full((4, 4), 0.75))


def test_first_weights_depend_on_the_seed_alone() -> None:
    layout = toy_layout()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = models.initial(layout, 1)
    assert torch.equal(torch.rand(1), expected), "the caller's random numbers are left alone"
    torch.manual_seed(6)
    assert all((a == b).all() for a, b in zip(flat(first), flat(models.initial(layout, 1)), strict=True))
    assert not (first["body"]["layers.0.weight"] == models.initial(layout, 2)["body"]["layers.0.weight"]).any()
    layout.check(first, ("body", "head"))
    assert {a.dtype for a in flat(first)} == {np.dtype(np.float32)}


class Own(nn.Module):
    """A model of one's own, with what a test wants in it."""

    def __init__(self, shape: tuple[int, ...], classes: int, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(shape[0], 4), *layers)
        self.head = nn.Linear(4, classes)

    def embed(self, x: Tensor) -> Tensor:
        z: Tensor = self.layers(x)
        return z


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An installed package ``bring.own``."""
    module = types.ModuleType("bring_own")
    monkeypatch.setitem(sys.modules, "bring_own", module)
    return module


def test_a_model_of_ones_own_is_imported_by_name(package: types.ModuleType) -> None:
    package.__dict__["build"] = lambda shape, classes, width=1: Own(shape, classes)
    layout = models.describe("bring_own:build", TOY, ("a", "b"), {"width": 3})
    assert layout.embedding == 4
    assert models.build(layout)(torch.zeros(5, 6)).shape == (5, 2)


def test_running_statistics_are_refused(package: types.ModuleType) -> None:
    package.__dict__["build"] = lambda shape, classes: Own(shape, classes, nn.BatchNorm1d(4))
    with pytest.raises(ConfigError, match="running statistics"):
        models.describe("bring_own:build", TOY, ("a", "b"), {})
    package.__dict__["build"] = lambda shape, classes: Own(shape, classes, nn.BatchNorm1d(4, track_running_stats=False))
    assert models.describe("bring_own:build", TOY, ("a", "b"), {}).embedding == 4


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda shape, classes: nn.Linear(6, 2), "no embed"),
        (lambda shape, classes: Own((shape[0] + 1,), classes), "does not take samples of shape"),
        (lambda shape, classes: Own(shape, classes + 1), "the head of the model"),
        (lambda shape, classes: Own(shape, classes, nn.Unflatten(1, (2, 2))), r"embed\(x\) of the model .* returns"),
        (lambda shape, classes: Own(shape, classes).double(), "float64"),
        (lambda shape, classes: 1 / 0, "cannot be built"),
    ],
)
def test_a_model_of_ones_own_that_does_not_fit_is_refused(
    package: types.ModuleType, build: Callable[..., Any], complaint: str
) -> None:
    package.__dict__["build"] = build
    with pytest.raises(ConfigError, match=complaint):
        models.describe("bring_own:build", TOY, ("a", "b"), {})


@pytest.mark.parametrize(
    ("name", "spec", "options", "complaint"),
    [
        ("cnn2d", TOY, {}, "did you mean 'cnn1d'"),
        ("no_such_package:build", TOY, {}, "install the package of 'no_such_package'"),
        ("math:build", TOY, {}, "cannot be imported"),
        ("mlp", TOY, {"hiden": [3]}, "did you mean 'hidden'"),
        ("mlp", TOY, {"activation": "tanh"}, "expected relu or elu"),
        ("lenet", InputSpec((1, 8, 8)), {}, "16 pixels"),
        ("lenet", TOY, {}, "cannot be built"),
        ("mlp", InputSpec((6,), mean=(1.0,)), {}, "input.mean has 1 values"),
        ("mlp", InputSpec((1, 6), std=(0.0,)), {}, "not above 0"),
        ("mlp", InputSpec((6,), "int64", scale=2.0), {}, "tokens"),
    ],
)
def test_a_mistake_in_the_models_description_is_named(
    name: str, spec: InputSpec, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        models.describe(name, spec, ("a", "b"), options)
    assert complaint in str(caught.value)


def test_another_version_of_the_model_is_refused() -> None:
    layout = toy_layout()
    with pytest.raises(ConfigError, match="other arrays"):
        models.build(replace(layout, options={"hidden": [9]}))


# Losses


def test_cross_entropy_is_torchs() -> None:
    logits, y = torch.randn(7, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    torch.testing.assert_close(losses.cross_entropy(logits, y), nn.functional.cross_entropy(logits, y))


def test_proto_loss_is_the_cross_entropy_of_squared_distances() -> None:
    z_support = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    query = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    found = losses.proto_loss(z_support, torch.tensor([0, 0, 1]), query, torch.tensor([1]), classes=2)
    near, far = np.exp(-1.0), np.exp(-5.0)  # to (1, 0) and to (0, 3)
    assert float(found) == pytest.approx(-np.log(far / (near + far)), rel=1e-12)


def test_a_class_that_the_support_lacks_changes_nothing() -> None:
    z = torch.randn(9, 3, dtype=torch.float64)
    y = torch.tensor([0, 1, 0, 1, 0])
    query_y = torch.tensor([0, 1, 1, 0])
    few = losses.proto_loss(z[:5], y, z[5:], query_y, classes=2)
    many = losses.proto_loss(z[:5], y, z[5:], query_y, classes=7)
    assert float(few) == float(many)
    with_stranger = losses.proto_loss(z[:5], y, z[5:8], torch.tensor([0, 1, 6]), classes=7)
    assert float(with_stranger) == float(losses.proto_loss(z[:5], y, z[5:7], torch.tensor([0, 1]), classes=7))


def test_an_episode_without_a_common_class_has_loss_and_gradient_zero() -> None:
    z = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    loss = losses.proto_loss(z[:2], torch.tensor([0, 0]), z[2:], torch.tensor([1, 1]), classes=2)
    (gradient,) = torch.autograd.grad(loss, [z])
    assert float(loss.detach()) == 0
    assert not gradient.any()


def test_proto_loss_and_scores_follow_a_permutation_of_the_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(30, 5, dtype=torch.float64, generator=generator)
    y, permuted = torch.arange(30) % 4, torch.tensor([2, 0, 3, 1])
    proto, count = losses.prototypes(z[:20], y[:20], 4)
    again, count_again = losses.prototypes(z[:20], permuted[y[:20]], 4)
    scores, scores_again = losses.proto_logits(z, proto, count), losses.proto_logits(z, again, count_again)
    assert torch.equal(scores_again[:, permuted], scores)
    loss = losses.proto_loss(z[:20], y[:20], z[20:], y[20:], 4)
    torch.testing.assert_close(losses.proto_loss(z[:20], permuted[y[:20]], z[20:], permuted[y[20:]], 4), loss)


# Gradients


def one_array(values: Tensor) -> dict[str, dict[str, Tensor]]:
    return {"body": {"w": values}}


def quadratic(matrix: Tensor, vector: Tensor) -> gradients.Loss:
    def loss(w: trees.Params) -> Tensor:
        value: Tensor = 0.5 * w["body"]["w"] @ matrix @ w["body"]["w"] - vector @ w["body"]["w"]
        return value

    return loss


@pytest.fixture
def quadratics() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Support matrix and vector, query matrix and vector, and a point."""
    rng = torch.Generator().manual_seed(3)
    halves = [torch.randn(4, 4, dtype=torch.float64, generator=rng) for _ in range(2)]
    vectors = [torch.randn(4, dtype=torch.float64, generator=rng) for _ in range(3)]
    return halves[0] @ halves[0].T, vectors[0], halves[1] @ halves[1].T, vectors[1], vectors[2]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_exact_maml_is_the_closed_form_on_quadratics(
    quadratics: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], steps: int
) -> None:
    a, b, c, d, w = quadratics
    lr, step = 0.05, torch.eye(4, dtype=torch.float64) - 0.05 * a
    at = w
    for _ in range(steps):
        at = at - lr * (a @ at - b)
    _, exact = gradients.maml_exact(quadratic(a, b), quadratic(c, d), lr, steps)(one_array(w))
    _, first = gradients.maml_first_order(quadratic(a, b), quadratic(c, d), lr, steps)(one_array(w))
    torch.testing.assert_close(first["body"]["w"], c @ at - d)
    torch.testing.assert_close(exact["body"]["w"], torch.linalg.matrix_power(step, steps) @ (c @ at - d))


def test_first_order_is_exact_when_the_support_loss_is_linear(
    quadratics: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    a, b, c, d, w = quadratics
    linear = quadratic(0 * a, b)
    _, exact = gradients.maml_exact(linear, quadratic(c, d), 0.1, 2)(one_array(w))
    _, first = gradients.maml_first_order(linear, quadratic(c, d), 0.1, 2)(one_array(w))
    assert torch.equal(exact["body"]["w"], first["body"]["w"])


def estimate(adaptation: str, *, lr: float = 0.1, steps: int = 2) -> tuple[gradients.Gradient, trees.Params]:
    """The estimator on a toy episode, and float64 weights to call it at."""
    layout, (x, y) = toy_layout(), toy_samples(20)
    hyper = METHODS["pfldyn-maml"].hyper(inner_lr=lr, inner_steps=steps)
    tensors = torch.tensor(x, dtype=torch.float64), torch.tensor(y)
    episode = gradients.Episode(tensors[0][:12], tensors[1][:12], tensors[0][12:], tensors[1][12:])
    gradient = gradients.estimator(adaptation, models.build(layout), 3, hyper)(episode)
    return gradient, trees.apply(lambda a: torch.tensor(a, dtype=torch.float64), models.initial(layout, 0))


@pytest.mark.parametrize("adaptation", ["none", "proto", "maml-exact"])
def test_gradients_are_the_finite_differences_of_their_loss(adaptation: str) -> None:
    gradient, w = estimate(adaptation)
    _, found = gradient(w)
    generator = torch.Generator().manual_seed(1)
    along = trees.apply(lambda a: torch.randn(a.shape, dtype=a.dtype, generator=generator), w)
    h = 1e-5
    above, below = (float(gradient(trees.axpy(sign * h, along, w))[0].detach()) for sign in (1, -1))
    slope = sum(float((a * b).sum()) for a, b in zip(flat(found), flat(along), strict=True))
    assert slope == pytest.approx((above - below) / (2 * h), rel=1e-7, abs=1e-9)


def test_first_order_is_exact_at_an_inner_rate_of_zero() -> None:
    exact, w = estimate("maml-exact", lr=0.0)
    first, _ = estimate("maml-first-order", lr=0.0)
    assert all(torch.equal(a, b) for a, b in zip(flat(exact(w)[1]), flat(first(w)[1]), strict=True))
    exact, first = estimate("maml-exact", lr=0.1)[0], estimate("maml-first-order", lr=0.1)[0]
    assert not all(torch.equal(a, b) for a, b in zip(flat(exact(w)[1]), flat(first(w)[1]), strict=True))


def test_exact_maml_is_autograd_through_a_step_written_by_hand() -> None:
    gradient, w = estimate("maml-exact", lr=0.1, steps=1)
    _, found = gradient(w)
    x, y = (torch.tensor(a) for a in toy_samples(20))
    leaf = trees.apply(lambda a: a.clone().requires_grad_(), w)
    (body, bias), (head, head_bias) = leaf["body"].values(), leaf["head"].values()

    def loss(weights: list[Tensor], part: slice) -> Tensor:
        hidden = nn.functional.elu(x[part].double() @ weights[0].T + weights[1])
        return nn.functional.cross_entropy(hidden @ weights[2].T + weights[3], y[part])

    weights = [body, bias, head, head_bias]
    inner = torch.autograd.grad(loss(weights, slice(0, 12)), weights, create_graph=True)
    stepped = [a - 0.1 * g for a, g in zip(weights, inner, strict=True)]
    by_hand = torch.autograd.grad(loss(stepped, slice(12, 20)), weights)
    for a, b in zip(flat(found), by_hand, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("adaptation", ADAPTATIONS)
def test_a_gradient_leaves_the_weights_alone_and_has_their_names(adaptation: str) -> None:
    gradient, w = estimate(adaptation)
    before = trees.apply(lambda a: a.clone(), w)
    value, found = gradient(w)
    assert {g: list(named) for g, named in found.items()} == {g: list(named) for g, named in w.items()}
    assert all(torch.equal(a, b) for a, b in zip(flat(before), flat(w), strict=True))
    assert bool(torch.isfinite(value))
    assert all(not a.requires_grad for a in flat(found))


# The client's loop


def round_of(name: str, *, seed: int = 0, samples: Any = None, weights: Any = None, **hyper: Any) -> train.TrainResult:
    method, layout = METHODS[name], toy_layout()
    settings = {"local_steps": 8, "client_lr": 0.1, "batch": 20, "support_batch": 10, "query_batch": 10, **hyper}
    known = {k: v for k, v in settings.items() if k in method.hyper.__dataclass_fields__}
    broadcast = Payload(method.params(weights or models.initial(layout, 0)), {"round": 1})
    x, y = samples or toy_samples()
    return train.train_round(
        method, models.build(layout), layout, broadcast, {}, x, y, method.hyper(**known), np.random.default_rng(seed)
    )


@pytest.mark.parametrize("name", METHODS)
def test_equal_generators_give_equal_bits(name: str) -> None:
    first, again, other = (round_of(name, seed=seed) for seed in (4, 4, 5))
    assert same(first.update.groups, again.update.groups)
    assert not same(first.update.groups, other.update.groups)
    assert all(same(first.pending[role], again.pending[role]) for role in first.pending)


@pytest.mark.parametrize("name", METHODS)
def test_rounds_lower_the_loss(name: str) -> None:
    method, layout = METHODS[name], toy_layout()
    weights: Any = models.initial(layout, 0)
    seen = []
    for number in range(12):
        result = round_of(name, seed=number, weights=weights)
        weights = {**weights, **trees.add(method.params(weights), result.update.groups)}
        seen.append(result.loss)
    assert seen[-1] < 0.5 * seen[0]


@pytest.mark.parametrize("name", METHODS)
def test_a_round_sends_the_shared_groups_in_float32(name: str) -> None:
    result = round_of(name)
    toy_layout().check(result.update.groups, METHODS[name].shared)
    assert {a.dtype for a in flat(result.update.groups)} == {np.dtype(np.float32)}
    assert (result.samples, result.steps) == (60, 8)
    assert result.left_out == {}


def test_a_first_dual_comes_from_zero() -> None:
    result = round_of("pfldyn-proto", penalty=0.25)
    for dual, delta in zip(flat(result.pending["dual"]), flat(result.update.groups), strict=True):
        np.testing.assert_allclose(dual, -0.25 * delta, rtol=1e-6)


def test_the_broadcast_is_left_as_it_was() -> None:
    weights = models.initial(toy_layout(), 0)
    before = trees.apply(lambda a: a.copy(), weights)
    round_of("pfldyn-maml", weights=weights)
    assert same(before, weights)


def test_progress_counts_the_steps() -> None:
    method, layout, seen = METHODS["fedavg"], toy_layout(), []
    broadcast = Payload(models.initial(layout, 0), {"round": 1})
    train.train_round(
        method, models.build(layout), layout, broadcast, {}, *toy_samples(), method.hyper(local_steps=3),
        np.random.default_rng(0), lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_class_with_one_sample_is_left_out_and_named() -> None:
    x, y = toy_samples(40, classes=2)
    result = round_of("p-avg-proto", samples=(np.concatenate([x, x[:1]]), np.append(y, 2)))
    assert result.left_out == {2: 1}


def test_prototypes_take_a_label_that_the_fleet_does_not_know() -> None:
    x, y = toy_samples()
    assert round_of("p-avg-proto", samples=(x, y + 4)).loss > 0
    with pytest.raises(DataError, match="the label 6 is no class of the fleet"):
        round_of("fedavg", samples=(x, y + 4))


@pytest.mark.parametrize(
    "samples",
    [
        (np.zeros((4, 5), np.float32), np.zeros(4, np.int64)),
        (np.zeros((4, 6), np.float64), np.zeros(4, np.int64)),
        (np.zeros((4, 6), np.float32), np.zeros(3, np.int64)),
        (np.zeros((0, 6), np.float32), np.zeros(0, np.int64)),
        (np.zeros((4, 6), np.float32), np.full(4, -1)),
    ],
)
def test_samples_of_another_form_are_refused(samples: Any) -> None:
    with pytest.raises(DataError):
        round_of("fedavg", samples=samples)


def test_a_loss_that_is_not_finite_ends_the_round() -> None:
    with pytest.raises(RoundError, match="the loss is nan at step 2"):
        round_of("fedavg", client_lr=1e30, clip_norm=0.0, weight_decay=1e30)


def test_permuted_labels_give_the_same_prototype_update() -> None:
    x, y = toy_samples()
    permuted = np.array([2, 0, 1])[y]
    for steps in (1, 8):
        plain = round_of("p-avg-proto", samples=(x, y), local_steps=steps)
        other = round_of("p-avg-proto", samples=(x, permuted), local_steps=steps)
        for a, b in zip(flat(plain.update.groups), flat(other.update.groups), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6 * steps)


@pytest.mark.parametrize("adaptation", ADAPTATIONS)
def test_counted_operations_are_those_of_torchs_counter(adaptation: str) -> None:
    layout = models.describe("mlp", TOY, ("a", "b", "c"), {"hidden": [32, 32, 32]})
    network, (x, y) = models.build(layout), toy_samples(20)
    tensors = torch.tensor(x), torch.tensor(y)
    episode = gradients.Episode(tensors[0][:12], tensors[1][:12], tensors[0][12:], tensors[1][12:])
    hyper = METHODS["pfldyn-maml"].hyper(inner_lr=0.1, inner_steps=2)
    gradient = gradients.estimator(adaptation, network, 3, hyper)(episode)
    with FlopCounterMode(display=False) as counter:
        gradient(models.to_torch(models.initial(layout, 0)))
    forward = models.flops_per_sample(network, layout)
    assert forward == 2 * (6 * 32 + 2 * 32 * 32 + 32 * 3)
    support = 12 if adaptation != "none" else 0
    ours = train.flops_of(adaptation, forward, support, 8, hyper.inner_steps)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.2)


def test_layers_of_unknown_cost_are_not_guessed(package: types.ModuleType) -> None:
    package.__dict__["build"] = lambda shape, classes: Own(shape, classes, nn.PReLU())
    layout = models.describe("bring_own:build", TOY, ("a", "b"), {})
    assert models.flops_per_sample(models.build(layout), layout) is None


# Personalization by SGD


@pytest.mark.parametrize(
    ("name", "hyper", "lr", "steps"),
    [
        ("pfldyn-maml", {"inner_lr": 0.2, "inner_steps": 3}, 0.2, 3),
        ("fedavg", {"finetune_lr": 0.1, "finetune_steps": 2}, 0.1, 2),
        ("fedavg", {"finetune_steps": 0}, 0.1, 0),
        ("p-avg-proto", {}, 0.1, 0),
    ],
)
def test_adapt_takes_full_batch_steps_however_many_samples_there_are(
    name: str, hyper: dict[str, Any], lr: float, steps: int
) -> None:
    method, layout = METHODS[name], toy_layout()
    network, (x, y) = models.build(layout), toy_samples(train.CHUNK * 2 + 7)
    weights = models.initial(layout, 0)
    found = train.adapt(method, network, layout, weights, x, y, method.hyper(**hyper))
    loss = gradients.entropy(network, torch.tensor(x), torch.tensor(y))
    wanted = gradients.sgd(loss, gradients.leaves(models.to_torch(weights)), lr, steps, differentiable=False)
    for a, b in zip(flat(found), flat(models.to_numpy(wanted)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_logits_do_not_depend_on_how_many_samples_are_asked_for() -> None:
    layout, (x, _) = toy_layout(), toy_samples(train.CHUNK + 3)
    network, weights = models.build(layout), models.initial(layout, 0)
    logits = train.predict_logits(network, weights, x)
    np.testing.assert_allclose(logits[-2:], train.predict_logits(network, weights, x[-2:]), atol=1e-6)
    assert logits.shape == (train.CHUNK + 3, 3)
    assert train.embed(network, weights, x).shape == (train.CHUNK + 3, 8)


def test_the_learning_package_uses_no_optimizer_and_no_transform() -> None:
    """Each costs a device about 70 MB."""
    used = set()
    for path in Path(learning.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                used |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute):
                used.add(ast.unparse(node))
    assert "torch.autograd.grad" in used
    assert {name for name in used if name.startswith(("torch.func", "torch.optim"))} == {"torch.func.functional_call"}


def flat(tree: trees.Params) -> list[Any]:
    return [array for named in tree.values() for array in named.values()]


def same(left: trees.Params, right: trees.Params) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(flat(left), flat(right), strict=True))
