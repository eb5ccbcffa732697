"""The named models: sizes counted by hand, gradients compared with finite differences in float64, batching over
clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from export import gate
from export.graph import export_graph
from fleet_core.base import trees
from fleet_core.base.errors import ConfigError
from fleet_core.learning import architectures, losses, models
from fleet_core.learning.layer_flops import flops_per_sample
from fleet_core.model.layout import InputSpec, Layout

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TEN = tuple(map(str, range(10)))
SMALL: dict[str, tuple[InputSpec, dict[str, Any]]] = {
    "char-lstm": (InputSpec((5,), "int64"), {"vocabulary": 7, "character_width": 3, "width": 4}),
    "cnn-leaf": (InputSpec((2, 6, 5)), {"channels": (3, 4), "hidden": (6,)}),
    "cnn1d": (InputSpec((2, 12)), {"channels": (4, 8), "width": 5}),
    "conv4": (InputSpec((2, 16, 16)), {"channels": 4, "groups": 2}),
    "ds-cnn": (InputSpec((2, 12)), {"channels": (4, 6)}),
    "lenet": (InputSpec((1, 16, 16)), {}),
    "lenet-lim": (InputSpec((2, 7, 9)), {"channels": (3, 4), "hidden": (6, 5)}),
    "logistic": (InputSpec((2, 3)), {}),
    "mlp": (InputSpec((6,)), {"hidden": (5, 4), "activation": "elu"}),
}
EVERY = pytest.mark.parametrize("model", sorted(architectures.MODELS))

Loss = Callable[[Any], Tensor]


def small(model: str) -> Layout:
    spec, options = SMALL[model]
    return models.describe(model, spec, ("a", "b", "c"), options)


def samples(layout: Layout, number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(len(layout.classes), (number,), generator=generator)
    if layout.input.dtype == "int64":
        return torch.randint(layout.options["vocabulary"], (number, *layout.input.shape), generator=generator), y
    return torch.randn((number, *layout.input.shape), generator=generator), y


def weights(layout: Layout, seed: int = 0) -> trees.Params:
    return trees.apply(lambda a: torch.tensor(a, dtype=torch.float64), models.initial(layout, seed))


def entropy(layout: Layout, seed: int = 0) -> Loss:
    """Cross-entropy of four samples as a function of the weights."""
    network, (x, y) = models.build(layout), samples(layout, 4, seed)
    return lambda w: losses.cross_entropy(models.outputs(network, w, x, "predict"), y)


def adapted(support: Loss, query: Loss, rate: float = 0.5) -> Loss:
    """The query loss after one step on the support loss, as exact MAML differentiates it."""
    return lambda w: query(trees.axpy(-rate, grad(support)(w), w))


def by_autograd(loss: Loss, w: trees.Params) -> trees.Params:
    leaves = trees.apply(lambda a: a.clone().requires_grad_(), w)
    found = iter(torch.autograd.grad(loss(leaves), flat(leaves)))
    return trees.apply(lambda _: next(found), leaves)


def flat(tree: trees.Params) -> list[Tensor]:
    return [array for named in tree.values() for array in named.values()]


def assert_close(left: trees.Params, right: trees.Params) -> None:
    torch.testing.assert_close(flat(left), flat(right), rtol=1e-9, atol=1e-12)


# Sizes


@pytest.mark.parametrize(
    ("model", "spec", "classes", "options", "body", "head"),
    [
        # Fallah's 80-60 ELU and pFedMe's hidden layer of 100, on MNIST
        ("mlp", InputSpec((784,)), 10, {"hidden": (80, 60), "activation": "elu"}, 785 * 80 + 81 * 60, 61 * 10),
        ("mlp", InputSpec((1, 28, 28)), 10, {}, 785 * 100, 101 * 10),
        ("logistic", InputSpec((1, 28, 28)), 10, {}, 0, 785 * 10),
        # Acar on CIFAR: 32 -> 28 -> 14 -> 10 -> 5
        ("lenet", InputSpec((3, 32, 32)), 10, {}, 76 * 64 + 1601 * 64 + 1601 * 384 + 385 * 192, 193 * 10),
        # Lim as printed: 32 -> 31 -> 15 -> 14 -> 7; with kernels of 5 the network of pFedHN: 32 -> 28 -> 14 -> 10 -> 5
        ("lenet-lim", InputSpec((3, 32, 32)), 10, {}, 13 * 16 + 65 * 32 + 1569 * 120 + 121 * 84, 85 * 10),
        ("lenet-lim", InputSpec((3, 32, 32)), 10, {"kernel": 5}, 76 * 16 + 401 * 32 + 801 * 120 + 121 * 84, 85 * 10),
        # LEAF: 28 -> 28 -> 14 -> 14 -> 7
        ("cnn-leaf", InputSpec((1, 28, 28)), 10, {}, 26 * 32 + 801 * 64 + 3137 * 2048, 2049 * 10),
        # 28 -> 14 -> 7 -> 3 -> 1 and 84 -> 42 -> 21 -> 10 -> 5; two values of GroupNorm per channel
        ("conv4", InputSpec((1, 28, 28)), 5, {}, 10 * 64 + 3 * 577 * 64 + 4 * 128, 65 * 5),
        ("conv4", InputSpec((3, 84, 84)), 5, {"channels": 32}, 28 * 32 + 3 * 289 * 32 + 4 * 64, 801 * 5),
        # 128 -> 64 -> 32 -> 16
        ("cnn1d", InputSpec((3, 128)), 3, {}, 22 * 16 + 81 * 32 + 161 * 24 + 2 * 72 + 385 * 64, 65 * 3),
        # depthwise 7 or 3×3 without bias, pointwise with one, two values of GroupNorm per channel
        ("ds-cnn", InputSpec((3, 128)), 3, {}, 22 * 32 + 3 * (7 * 32 + 33 * 32) + 4 * 64, 129 * 3),
        ("ds-cnn", InputSpec((3, 32, 32)), 10, {}, 28 * 32 + 3 * (9 * 32 + 33 * 32) + 4 * 64, 129 * 10),
        # Chen's Shakespeare: 53 characters, 8 wide; per LSTM layer four gates with two biases each
        ("char-lstm", InputSpec((80,), "int64"), 53, {}, 53 * 8 + 1024 * (8 + 256 + 2) + 1024 * (512 + 2), 257 * 53),
        ("char-lstm", InputSpec((9,), "int64"), 4, {"vocabulary": 90, "layers": 1, "width": 6}, 720 + 24 * 16, 28),
    ],
)  # fmt: skip
def test_parameters_are_those_counted_by_hand(
    model: str, spec: InputSpec, classes: int, options: dict[str, Any], body: int, head: int
) -> None:
    layout = models.describe(model, spec, TEN[:classes] if classes < 10 else tuple(map(str, range(classes))), options)
    assert (layout.parameters(("body",)), layout.parameters(("head",))) == (body, head)


@pytest.mark.parametrize(
    ("model", "spec", "width"),
    [
        ("mlp", InputSpec((784,)), 100),
        ("logistic", InputSpec((2, 3, 4)), 24),
        ("lenet", InputSpec((1, 28, 28)), 192),
        ("lenet-lim", InputSpec((1, 28, 28)), 84),
        ("cnn-leaf", InputSpec((1, 28, 28)), 2048),
        ("conv4", InputSpec((1, 28, 28)), 64),
        ("conv4", InputSpec((3, 32, 32), "uint8", 1 / 255), 256),
        ("cnn1d", InputSpec((9, 128)), 64),
        ("ds-cnn", InputSpec((9, 128)), 128),
        ("ds-cnn", InputSpec((1, 5, 3)), 128),
        ("char-lstm", InputSpec((80,), "int64"), 256),
    ],
)
def test_an_embedding_is_one_row_per_sample_and_the_head_reads_it(model: str, spec: InputSpec, width: int) -> None:
    layout = models.describe(model, spec, TEN, {})
    network = models.build(layout)
    x = torch.ones((3, *spec.shape), dtype=getattr(torch, spec.dtype))
    z_ND = network(x, "embed")
    assert layout.embedding == width
    assert z_ND.shape == (3, width)
    head: Any = network.core.head
    assert torch.equal(network(x), head(z_ND))


def test_an_embedding_that_is_not_rectified_is_the_same_before_its_relu() -> None:
    spec = InputSpec((3, 20, 20))
    layouts = [models.describe("lenet-lim", spec, TEN, {"kernel": 5, "rectified": last}) for last in (True, False)]
    both = [models.build(layout) for layout in layouts]
    both[1].load_state_dict(both[0].state_dict())
    x = torch.randn((4, 3, 20, 20), generator=torch.Generator().manual_seed(0))
    rectified, plain = (network(x, "embed").detach() for network in both)
    assert float(plain.min()) < 0
    assert torch.equal(torch.relu(plain), rectified)


def test_images_pixel_after_pixel_change_roundings_alone() -> None:
    layout = models.describe("lenet", InputSpec((3, 20, 20)), TEN, {})
    plain, other = models.build(layout).double(), models.build(layout, channels_last=True).double()
    other.load_state_dict(plain.state_dict())
    x = torch.randn((4, 3, 20, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(other(x), plain(x), rtol=1e-12, atol=1e-14)


def test_a_reduced_model_multiplies_in_bfloat16_and_answers_in_float32() -> None:
    layout = models.describe("lenet", InputSpec((3, 20, 20)), TEN, {})
    full, reduced = models.build(layout), models.build(layout, reduced=True)
    reduced.load_state_dict(full.state_dict())
    x = torch.randn((4, 3, 20, 20), generator=torch.Generator().manual_seed(0))
    for output in ("embed", "predict"):
        exact, found = full(x, output).detach(), reduced(x, output)
        away = float((found.detach() - exact).norm() / exact.norm())
        assert 1e-5 < away < 0.02
        assert found.dtype == torch.float32
    found.square().sum().backward()
    grads = [p.grad for p in reduced.parameters()]
    assert all(g is not None and g.dtype == torch.float32 and bool(g.any()) for g in grads)


@pytest.mark.parametrize(
    ("model", "spec", "options", "flops"),
    [
        ("logistic", InputSpec((1, 28, 28)), {}, 2 * 784 * 10),
        ("lenet-lim", InputSpec((3, 32, 32)), {},
         2 * (31**2 * 12 * 16 + 14**2 * 64 * 32 + 1568 * 120 + 120 * 84 + 84 * 10)),
        ("conv4", InputSpec((1, 28, 28)), {},
         2 * (28**2 * 9 * 64 + (14**2 + 7**2 + 3**2) * 9 * 64 * 64 + 64 * 10)),
        ("char-lstm", InputSpec((80,), "int64"), {},
         80 * (2 * 4 * 256 * (8 + 256) + 2 * 4 * 256 * (256 + 256)) + 2 * 256 * 10),
    ],
)  # fmt: skip
def test_operations_are_those_counted_by_hand(model: str, spec: InputSpec, options: dict[str, Any], flops: int) -> None:
    layout = models.describe(model, spec, TEN, options)
    assert flops_per_sample(models.build(layout), layout) == flops


def test_operations_are_counted_where_the_model_is() -> None:
    layout = small("lenet")
    here, elsewhere = models.build(layout), models.build(layout).to("meta")
    assert flops_per_sample(elsewhere, layout) == flops_per_sample(here, layout)


class Reads(nn.Module):
    """A user's recurrent model."""

    def __init__(self, layer: nn.RNNBase, packed: bool = False) -> None:
        super().__init__()
        self.layer, self.packed = layer, packed

    def embed(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [x.shape[1]] * len(x), batch_first=True)
        states: Tensor = self.layer(packed if self.packed else x)[1]
        return states[-1]


@pytest.mark.parametrize(
    ("layer", "packed", "flops"),
    [
        (nn.GRU(3, 5, batch_first=True), False, 7 * 2 * 3 * 5 * (3 + 5)),
        (nn.GRU(3, 5, batch_first=True), True, 7 * 2 * 3 * 5 * (3 + 5)),
        (nn.RNN(3, 5, bidirectional=True, batch_first=True), False, 7 * 2 * 2 * 5 * (3 + 5)),
    ],
)
def test_operations_of_other_recurrent_layers_are_counted_alike(layer: nn.RNNBase, packed: bool, flops: int) -> None:
    spec = InputSpec((7, 3))
    layout = Layout("own", spec, TEN, 5, ())
    assert flops_per_sample(models.Network(Reads(layer, packed), spec), layout) == flops


# Weights


@EVERY
def test_first_weights_are_a_function_of_the_seed(model: str) -> None:
    layout = small(model)
    first, again, other = (models.initial(layout, seed) for seed in (1, 1, 2))
    for group, named in first.items():
        for name, array in named.items():
            assert array.tobytes() == again[group][name].tobytes()
            constant = np.ptp(array) == 0  # GroupNorm's ones and zeros
            assert constant or not np.array_equal(array, other[group][name])
    layout.check(first, ("body", "head"))


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_from_outside_give_what_the_module_gives_with_them(model: str, dtype: torch.dtype) -> None:
    layout = small(model)
    network, (x, _) = models.build(layout), samples(layout, 3)
    w = trees.apply(lambda a: torch.tensor(a, dtype=dtype), models.initial(layout, 5))
    module = models.build(layout).to(dtype)
    module.core.load_state_dict({name: array for named in w.values() for name, array in named.items()})
    for output in ("embed", "predict"):
        wanted = module(x, output)
        assert wanted.dtype == dtype
        assert torch.equal(models.outputs(network, w, x, output), wanted)


@EVERY
def test_no_named_model_keeps_anything_but_weights(model: str) -> None:
    network = models.build(small(model))
    assert list(network.core.buffers()) == []
    assert not any(isinstance(m, nn.modules.batchnorm._NormBase) for m in network.modules())


def test_a_model_without_a_body_is_described_built_and_started() -> None:
    layout = small("logistic")
    assert [(t.group, t.shape) for t in layout.tensors] == [("head", (3, 6)), ("head", (3,))]
    first = models.initial(layout, 0)
    assert list(first) == ["head"]
    network, (x, _) = models.build(Layout.from_json(layout.to_json())), samples(layout, 4)
    assert torch.equal(models.outputs(network, {}, x, "embed"), x.flatten(1))
    found = models.outputs(network, models.to_torch(first), x, "predict")
    np.testing.assert_allclose(
        found, x.flatten(1).numpy() @ first["head"]["head.weight"].T + first["head"]["head.bias"], rtol=1e-5
    )


# Gradients


@EVERY
def test_the_gradient_of_every_array_is_its_finite_difference(model: str) -> None:
    layout = small(model)
    loss, w, h = entropy(layout), weights(layout), 1e-6
    found, generator = by_autograd(loss, w), torch.Generator().manual_seed(1)
    for group, named in w.items():
        for name, array in named.items():
            along = torch.randn(array.shape, dtype=array.dtype, generator=generator)
            above, below = (float(loss({**w, group: {**named, name: array + s * along}})) for s in (h, -h))
            slope = float((found[group][name] * along).sum())
            assert slope == pytest.approx((above - below) / (2 * h), rel=1e-4, abs=1e-8), name
            assert found[group][name].abs().max() > 1e-6, name


@EVERY
def test_the_transform_gives_autograds_gradient(model: str) -> None:
    layout = small(model)
    loss, w = entropy(layout), weights(layout)
    assert_close(grad(loss)(w), by_autograd(loss, w))


@EVERY
def test_the_derivative_through_a_step_is_autograds_and_the_finite_difference(model: str) -> None:
    layout = small(model)
    support, query, w, h = entropy(layout, 0), entropy(layout, 1), weights(layout), 1e-6
    loss = adapted(support, query)
    found = grad(loss)(w)

    leaves = trees.apply(lambda a: a.clone().requires_grad_(), w)
    inner = iter(torch.autograd.grad(support(leaves), flat(leaves), create_graph=True))
    stepped = trees.axpy(-0.5, trees.apply(lambda _: next(inner), leaves), leaves)
    outer = iter(torch.autograd.grad(query(stepped), flat(leaves)))
    assert_close(found, trees.apply(lambda _: next(outer), leaves))

    generator = torch.Generator().manual_seed(1)
    along = trees.apply(lambda a: torch.randn(a.shape, dtype=a.dtype, generator=generator), w)
    above, below = (float(loss(trees.axpy(step, along, w))) for step in (h, -h))
    slope = sum(float((a * b).sum()) for a, b in zip(flat(found), flat(along), strict=True))
    assert slope == pytest.approx((above - below) / (2 * h), rel=1e-4)
    first_order = grad(query)(trees.apply(lambda a: a.detach(), stepped))
    assert any((a - b).abs().max() > 1e-6 for a, b in zip(flat(found), flat(first_order), strict=True))


# Batching


def stacked(layout: Layout, number: int) -> tuple[trees.Params, list[trees.Params]]:
    """Weights of ``number`` clients, stacked in one tree and one by one."""
    each = [weights(layout, seed) for seed in range(number)]
    return trees.apply(lambda *arrays: torch.stack(arrays), *each), each


@pytest.mark.parametrize("model", sorted(architectures.BATCHABLE))
def test_clients_with_weights_of_their_own_run_as_one_batch(model: str) -> None:
    layout = small(model)
    together, each = stacked(layout, 3)
    network = models.build(layout)
    drawn = [samples(layout, 4, seed) for seed in range(3)]
    x, y = (torch.stack(arrays) for arrays in zip(*drawn, strict=True))

    def loss(w: Any, x: Tensor, y: Tensor) -> Tensor:
        return losses.cross_entropy(models.outputs(network, w, x, "predict"), y)

    for output in ("embed", "predict"):
        found = vmap(lambda w, x, kind=output: models.outputs(network, w, x, kind))(together, x)
        for i, w in enumerate(each):
            torch.testing.assert_close(found[i], models.outputs(network, w, x[i], output))
    gradients = vmap(grad(loss))(together, x, y)
    for i, w in enumerate(each):
        assert_close(trees.apply(lambda a, i=i: a[i], gradients), grad(loss)(w, x[i], y[i]))


def test_every_model_is_either_batchable_or_said_not_to_be() -> None:
    assert set(architectures.MODELS) - architectures.BATCHABLE == {"char-lstm"}
    assert set(SMALL) == set(architectures.MODELS)


# What a model computes


@pytest.mark.parametrize(
    ("model", "padding", "hidden"),
    [("lenet", 0, ("fc1", "fc2")), ("lenet-lim", 0, ("fc1", "fc2")), ("cnn-leaf", 2, ("fc1",))],
)
def test_a_lenet_is_two_convolutions_and_its_hidden_layers(model: str, padding: int, hidden: tuple[str, ...]) -> None:
    layout = small(model)
    (x, _), w = samples(layout, 2), weights(layout)["body"]
    z = x.double()
    for name in ("conv1", "conv2"):
        z = nn.functional.conv2d(z, w[f"{name}.weight"], w[f"{name}.bias"], padding=padding).clamp(min=0)
        even = z[..., : z.shape[2] // 2 * 2, : z.shape[3] // 2 * 2]
        z = even.reshape(*z.shape[:2], z.shape[2] // 2, 2, z.shape[3] // 2, 2).amax((3, 5))
    z = z.flatten(1)
    for name in hidden:
        z = (z @ w[f"{name}.weight"].T + w[f"{name}.bias"]).clamp(min=0)
    torch.testing.assert_close(models.outputs(models.build(layout), {"body": w}, x, "embed"), z)


@pytest.mark.parametrize(("model", "same"), [("ds-cnn", True), ("cnn1d", False)])
def test_when_something_happens_in_a_window_does_not_count_where_a_model_pools(model: str, same: bool) -> None:
    """The burst and the layers' view of it lie inside the window; it moves by whole strides."""
    network = models.build(models.describe(model, InputSpec((2, 256)), TEN, {}))
    burst = torch.randn((2, 16), generator=torch.Generator().manual_seed(0))
    x = torch.zeros((3, 2, 256))
    for window, start in zip(x, (80, 100, 152), strict=True):
        window[:, start : start + 16] = burst
    z = network(x, "embed").detach()
    assert bool(torch.allclose(z, z[:1].expand_as(z), atol=1e-5)) == same
    assert not torch.allclose(network(x * 0, "embed")[:1], z[:1], atol=1e-2)


def test_a_relu_before_the_pool_would_give_the_same_bits_and_gradients() -> None:
    x = torch.randint(-3, 4, (2, 3, 8, 8)).double()  # many equal values, in the windows and around zero
    results: list[tuple[Tensor, ...]] = []
    for after in (True, False):
        leaf = x.clone().requires_grad_()
        pooled = nn.functional.max_pool2d(leaf if after else torch.relu(leaf), 2)
        out = torch.relu(pooled) if after else pooled
        results.append((out, *torch.autograd.grad((out * torch.arange(96).reshape(out.shape)).sum(), leaf)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_char_lstm_is_the_textbook_recurrence() -> None:
    layout = small("char-lstm")
    (x, _), w = samples(layout, 2), weights(layout)["body"]
    states = w["characters.weight"][x]
    for layer in ("l0", "l1"):
        h = c = torch.zeros(2, 4, dtype=torch.float64)
        outs = []
        for t in range(x.shape[1]):
            gates = states[:, t] @ w[f"lstm.weight_ih_{layer}"].T + w[f"lstm.bias_ih_{layer}"]
            gates = gates + h @ w[f"lstm.weight_hh_{layer}"].T + w[f"lstm.bias_hh_{layer}"]
            i, f, g, o = gates.chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outs.append(h)
        states = torch.stack(outs, 1)
    found = models.outputs(models.build(layout), {"body": w}, x, "embed")
    torch.testing.assert_close(found, states[:, -1])


def test_leafs_one_is_added_to_the_forget_gates_of_the_first_weights_alone() -> None:
    plain, biased = (
        models.initial(models.describe("char-lstm", SPECS["char-lstm"], TEN, options), 0)["body"]
        for options in ({"width": 6}, {"width": 6, "forget_bias": 1.0})
    )
    for name, array in plain.items():
        added = np.zeros_like(array)
        added[6:12] += name.startswith("lstm.bias_ih")
        np.testing.assert_array_equal(biased[name], array + added)


def test_conv4_is_four_blocks_of_normalised_convolutions() -> None:
    layout = small("conv4")
    (x, _), w = samples(layout, 2), weights(layout)["body"]
    z = x.double()
    for i in range(4):
        z = nn.functional.conv2d(z, w[f"convs.{i}.weight"], w[f"convs.{i}.bias"], padding=1)
        groups = z.reshape(2, 2, 2, *z.shape[2:])  # two groups of two channels
        mean, spread = groups.mean((2, 3, 4), keepdim=True), groups.var((2, 3, 4), unbiased=False, keepdim=True)
        z = ((groups - mean) / (spread + 1e-5).sqrt()).reshape(z.shape).clamp(min=0)
        z = z.reshape(2, 4, z.shape[2] // 2, 2, z.shape[3] // 2, 2).amax((3, 5))
    found = models.outputs(models.build(layout), {"body": w}, x, "embed")
    torch.testing.assert_close(found, z.flatten(1))


# Mistakes


@pytest.mark.parametrize(
    ("model", "options", "complaints"),
    [
        ("mlp", {"hidden": 5}, ["hidden is 5, expected 0 to 100 whole numbers from 1 to 65536"]),
        ("mlp", {"hidden": [3, 0], "activation": "tanh"}, ["hidden is [3, 0]", "expected relu or elu"]),
        ("mlp", {"hidden": [True]}, ["hidden is [True]"]),
        ("mlp", {"hidden": [100_000]}, ["hidden is [100000]"]),
        ("mlp", {"hidden": [1] * 101}, ["expected 0 to 100 whole numbers"]),
        ("logistic", {"hidden": [3]}, ["no option 'hidden'; expected none"]),
        ("cnn1d", {"channels": [], "width": 0}, ["channels is [], expected 1 to 100", "width is 0, expected a whole"]),
        ("ds-cnn", {"channels": []}, ["channels is [], expected 1 to 100"]),
        ("lenet", {"kernel": 3}, ["no option 'kernel'"]),
        ("lenet-lim", {"kernel": 2.0, "channels": [8], "hidden": "ab"},
         ["kernel is 2.0", "channels is [8], expected 2 whole numbers", "hidden is 'ab'"]),
        ("lenet-lim", {"kernal": 5}, ["did you mean 'kernel'?"]),
        ("cnn-leaf", {"hidden": [8, 9, 10], "channels": [8]}, ["hidden is [8, 9, 10]", "expected 2 whole numbers"]),
        ("conv4", {"groups": 3}, ["channels is 64 and groups 3, expected groups that divide the channels"]),
        ("conv4", {"groups": 0, "channels": "64"}, ["groups is 0", "channels is '64'"]),
        ("char-lstm", {"vocabulary": 1, "width": -1, "layers": 0, "character_width": None},
         ["vocabulary is 1, expected a whole number from 2", "width is -1", "layers is 0", "character_width is None"]),
        ("char-lstm", {"forget_bias": "1"}, ["forget_bias is '1', expected a number from -100 to 100"]),
        ("char-lstm", {"forget_bias": float("nan")}, ["forget_bias is nan"]),
    ],
)  # fmt: skip
def test_options_that_a_model_cannot_have_are_all_named(
    model: str, options: dict[str, Any], complaints: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        models.describe(model, SPECS[model], TEN, options)
    assert all(complaint in str(caught.value) for complaint in complaints), str(caught.value)


SPECS = {
    "char-lstm": InputSpec((80,), "int64"),
    "cnn-leaf": InputSpec((1, 28, 28)),
    "cnn1d": InputSpec((3, 128)),
    "conv4": InputSpec((1, 28, 28)),
    "ds-cnn": InputSpec((3, 128)),
    "lenet": InputSpec((1, 28, 28)),
    "lenet-lim": InputSpec((1, 28, 28)),
    "logistic": InputSpec((784,)),
    "mlp": InputSpec((784,)),
}


@pytest.mark.parametrize(
    ("model", "spec", "complaint"),
    [
        ("cnn1d", InputSpec((1, 28, 28)), "it takes series [C, T], not samples of shape [1, 28, 28]"),
        ("ds-cnn", InputSpec((80,)), "it takes series [C, T] or images [C, H, W], not samples of shape [80]"),
        ("conv4", InputSpec((28, 28)), "it takes images [C, H, W], not samples of shape [28, 28]"),
        ("conv4", InputSpec((1, 28, 15)), "16 pixels or more on each side, not 15"),
        ("lenet", InputSpec((1, 15, 28)), "16 pixels or more on each side, not 15"),
        ("cnn-leaf", InputSpec((1, 3, 28)), "4 pixels or more on each side, not 3"),
        ("lenet-lim", InputSpec((1, 6, 28)), "7 pixels or more on each side, not 6"),
        ("char-lstm", InputSpec((2, 80), "int64"), "it takes tokens [T], not samples of shape [2, 80]"),
        ("char-lstm", InputSpec((80,)), "takes tokens, not float32; expected input.dtype int64"),
        ("logistic", InputSpec((80,), "int64"), "takes numbers, not int64; expected input.dtype float32 or uint8"),
        ("lenet-lin", InputSpec((1, 28, 28)), "did you mean 'lenet-lim'?"),
    ],
)
def test_a_model_for_other_samples_is_refused(model: str, spec: InputSpec, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        models.describe(model, spec, TEN, {})
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("model", "spec"),
    [("lenet", (1, 16, 16)), ("lenet-lim", (1, 7, 7)), ("cnn-leaf", (1, 4, 4)), ("conv4", (1, 16, 16))],
)
def test_the_smallest_images_pass(model: str, spec: tuple[int, ...]) -> None:
    assert models.describe(model, InputSpec(spec), TEN, {}).embedding > 0


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 997), (1, 1, 1), (2, 8, 8), (3, 37, 50)])
def test_a_model_that_pools_takes_any_size_with_the_same_weights(shape: tuple[int, ...]) -> None:
    layout = models.describe("ds-cnn", InputSpec(shape), TEN, {})
    other = models.describe("ds-cnn", InputSpec((*shape[:1], *(2 * size for size in shape[1:]))), TEN, {})
    assert (layout.embedding, layout.tensors) == (128, other.tensors)


# Graphs


@pytest.mark.slow
@pytest.mark.parametrize("model", ["char-lstm", "logistic"])
def test_a_model_becomes_a_graph_with_torchs_numbers(model: str) -> None:
    layout = small(model)
    graph = export_graph(layout, kinds=("embed", "predict"))
    network, (x, _) = models.build(layout), samples(layout, 6)
    w = layout.seeded(9)
    wanted = models.outputs(network, models.to_torch(w), x, "predict").detach().numpy()
    np.testing.assert_allclose(gate.run(graph.graphs["predict"], w, x.numpy()), wanted, atol=1e-5)
    assert np.ptp(wanted, axis=0).max() > 1e-3
