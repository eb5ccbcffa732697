"""The export of a method's gradient: what is refused by name, what the gate finds, and layers differentiated twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.second_derivatives import Twice
from export.train_graph import Reference, check, export_train
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.errors import BundleError
from fleet_core.learning import models
from fleet_core.model.layout import InputSpec
from tests.support.simulation import SEED, hyper_of, toy_layout
from tests.support.train_graphs import train_graph

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Dropping(nn.Module):
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.layer, self.drop, self.head = nn.Linear(inputs, 8), nn.Dropout(0.5), nn.Linear(8, classes)

    def embed(self, x: Tensor) -> Tensor:
        return torch.relu(self.drop(self.layer(x)))


def dropping(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Dropping(shape[0], classes)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "spec", "method", "why"), [
    ("tests.export.test_train_graph:dropping", InputSpec((6,)), "fedavg", "draws at random in training"),
    ("mlp", InputSpec((6,)), "pfedgp", "the estimator gp of pfedgp cannot become a graph"),
    ("char-lstm", InputSpec((40,), "int64"), "fedavg", r"recurrent layers \(LSTM\), over 40 steps"),
    ("char-lstm", InputSpec((8,), "int64"), "pfldyn-maml", r"recurrent layers \(LSTM\), whose second derivative"),
])
def test_what_cannot_become_a_graph_is_said_by_name(model: str, spec: InputSpec, method: str, why: str) -> None:
    layout = models.describe(model, spec, ("a", "b"), {})
    with pytest.raises(BundleError, match=why) as caught:
        export_train(layout, METHODS[method], hyper_of(method), models.initial(layout, 0))
    assert caught.value.hint == "devices of this fleet need torch to train"


class Mixing(nn.Module):
    """Takes the batch's mean from each sample, as BatchNorm does."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(inputs, 8), nn.Linear(8, classes)

    def embed(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.layer(x))
        return z - z.mean(0, keepdim=True)


def mixing(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Mixing(shape[0], classes)


@pytest.mark.parametrize(("model", "method", "in_passes"), [
    ("mlp", "fedavg", True), ("mlp", "pfldyn-proto", False),
    ("tests.export.test_train_graph:mixing", "fedavg", False),
])
@pytest.mark.slow
def test_only_the_mean_of_samples_that_are_apart_is_computed_in_passes(
    model: str, method: str, in_passes: bool
) -> None:
    layout = models.describe(model, InputSpec((6,)), ("a", "b"), {})
    graph = export_train(layout, METHODS[method], hyper_of(method), models.initial(layout, 0))
    assert (graph.info.pass_of > 0) is in_passes


@pytest.mark.slow
def test_the_gate_finds_a_graph_that_is_not_torchs() -> None:
    """A graph of another distance, and one whose golden outputs are of other weights."""
    graph = train_graph("pfldyn-proto")
    network = models.build(toy_layout()).train()
    check(graph, Reference(graph, network, hyper_of("pfldyn-proto")))
    with pytest.raises(BundleError, match="the graph 'train' differs from torch"):
        check(graph, Reference(graph, network, hyper_of("pfldyn-proto", distance="norm")))
    other = replace(graph, info=replace(graph.info, seed=SEED + 1))
    with pytest.raises(BundleError, match="does not give its golden outputs"):
        check(other, Reference(graph, network, hyper_of("pfldyn-proto")))


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1-D, strided, grouped": (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (3, 4, 11)),
    "2-D, dilated, no bias": (nn.Conv2d(2, 3, 3, dilation=2, bias=False), (2, 2, 9, 9)),
    "max pool": (nn.MaxPool2d(2), (2, 3, 7, 6)),
    "max pool, overlapping, padded": (nn.MaxPool2d(3, stride=2, padding=1), (2, 3, 7, 6)),
    "max pool 1-D": (nn.MaxPool1d(2), (2, 3, 7)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_torchs_second_derivative(name: str) -> None:
    layer, shape = LAYERS[name]
    layer, generator = layer.double(), torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)

    def product(*tensors: Tensor) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        named = dict(zip(dict(layer.named_parameters()), leaves[1:], strict=True))
        out = torch.func.functional_call(layer, named, (leaves[0],))
        slope: Any = torch.autograd.grad((out**3).sum(), leaves, create_graph=True)
        along = sum((g * torch.cos(g.detach())).sum() for g in slope)
        return list(torch.autograd.grad(along, leaves))

    tensors = [x, *(p.detach() for p in layer.parameters())]
    wanted = product(*tensors)
    with Twice():
        found = product(*tensors)
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "spec", "method"), [
    ("cnn1d", InputSpec((2, 32)), "pfldyn-proto"), ("lenet-lim", InputSpec((1, 12, 12), "uint8", 1 / 255), "fedavg"),
    ("lenet-lim", InputSpec((1, 12, 12), "uint8", 1 / 255), "per-fedavg-exact"),
    ("ds-cnn", InputSpec((3, 32)), "metavers"), ("char-lstm", InputSpec((3,), "int64"), "fedavg"),
])
def test_a_models_gradient_becomes_a_graph(model: str, spec: InputSpec, method: str) -> None:
    every: dict[str, dict[str, Any]] = {"char-lstm": {"width": 6}, "cnn1d": {"channels": [4, 4], "width": 8}}
    layout = models.describe(model, spec, ("a", "b", "c"), every.get(model, {}))
    graph = export_train(layout, METHODS[method], hyper_of(method), models.initial(layout, 0))
    assert set(graph.graphs) == ({"train", "product"} if method == "per-fedavg-exact" else {"train"})
    assert graph.info.forward is not None
