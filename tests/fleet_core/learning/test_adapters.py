"""Low-rank adapters: zero at the start, a sum of two products, trained alone, exported, drawn from a seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from export import gate
from export.graph import export_graph
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.errors import ConfigError
from fleet_core.codecs.kinds.registry import DRAWN
from fleet_core.learning import models
from fleet_core.learning.adapters import Adapted, with_adapters
from fleet_core.learning.architectures import ADAPTABLE, MODELS
from fleet_core.learning.layer_flops import layers_of
from fleet_core.model import payloads, select_arrays
from fleet_core.model.layout import InputSpec, Layout
from tests.fleet_core.learning.test_models import SMALL

pytestmark = pytest.mark.usefixtures("one_torch_thread")

EVERY = pytest.mark.parametrize("model", sorted(ADAPTABLE))
RANK = 2


def adapted(model: str) -> Layout:
    spec, options = SMALL[model]
    return models.describe(model, spec, ("a", "b", "c"), {**options, "adapter": RANK})


def inputs(layout: Layout, number: int = 3) -> torch.Tensor:
    return torch.randn((number, *layout.input.shape), generator=torch.Generator().manual_seed(0))


@EVERY
def test_a_model_begins_as_it_is_without_adapters(model: str) -> None:
    spec, options = SMALL[model]
    plain, layout = models.describe(model, spec, ("a", "b", "c"), options), adapted(model)
    expected, found = (
        models.outputs(models.build(one), models.to_torch(models.initial(one, 3)), inputs(one), "predict")
        for one in (plain, layout)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    names = {t.name for t in layout.tensors}
    assert {t.name for t in plain.tensors} == {n.replace(".base.", ".") for n in names if ".adapter." not in n}


@EVERY
def test_the_first_model_still_goes_as_its_seed(model: str) -> None:
    layout = adapted(model)
    weights = models.initial(layout, 5)
    form, data = payloads.encode_whole(weights, 5)
    assert form in DRAWN
    decoded = payloads.decode(form, data, layout, ("body", "head"))
    assert payloads.identity(decoded) == payloads.identity(weights)


@EVERY
@pytest.mark.slow
def test_its_graph_answers_as_torch_does(model: str) -> None:
    layout = adapted(model)
    gate.check(export_graph(layout, kinds=("embed",), seed=0), models.build(layout))


@pytest.mark.parametrize(("base", "x"), [
    (nn.Linear(5, 4), torch.randn(3, 5)),
    (nn.Conv1d(3, 4, 5, stride=2, padding=2), torch.randn(2, 3, 11)),
    (nn.Conv2d(2, 6, 3, padding=1, dilation=1), torch.randn(2, 2, 7, 8)),
])  # fmt: skip
def test_it_adds_a_product_of_low_rank_to_the_weights(base: Any, x: torch.Tensor) -> None:
    """For a convolution B A is a kernel too."""
    layer = Adapted(base, RANK)
    arrays: dict[str, Any] = dict(layer.adapter.named_parameters())
    down, up = arrays["down.weight"], arrays["up.weight"]
    nn.init.normal_(up)
    product = (up.flatten(1) @ down.flatten(1)).reshape(base.weight.shape)
    assert torch.linalg.matrix_rank(product.flatten(1)) <= RANK
    if isinstance(base, nn.Linear):
        beside = x @ product.T
    else:
        conv: Any = nn.functional.conv1d if x.dim() == 3 else nn.functional.conv2d
        beside = conv(x, product, None, base.stride, base.padding, base.dilation)
    torch.testing.assert_close(layer(x), base(x) + beside)


class Own(nn.Module):
    """A user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv1d(4, 4, 3, groups=4), nn.Conv1d(4, 6, 1)), nn.Linear(6, 5)])
        self.head = nn.Linear(5, 2)


def test_every_linear_layer_and_convolution_but_the_head_gets_one() -> None:
    """A depthwise convolution has no matrix that could be of low rank."""
    model = Own()
    assert with_adapters(model, 1) == 2
    assert [name for name, module in model.named_modules() if isinstance(module, Adapted)] == ["blocks.0.1", "blocks.1"]


def test_adapters_alone_have_few_values_and_their_own_gradients() -> None:
    layout = models.describe("cnn1d", InputSpec((3, 128)), ("a", "b", "c"), {"adapter": RANK})
    moving, problems = select_arrays.selected(["*.adapter.*"], layout, METHODS["p-avg-proto"])
    assert not problems
    sizes = {key: layout.part(moving).parameters(("body",)) for key in ("adapters",)}
    assert sizes["adapters"] * 15 < layout.parameters(("body",))
    assert all(".adapter." in t.name for t in layout.part(moving).tensors)
    layers = layers_of(models.build(layout), layout)
    assert layers is not None
    assert {"convs.0.adapter.down.weight"} in [set(layer.arrays) for layer in layers]


@pytest.mark.parametrize("rank", [-1, 1.5, "4", True, 1 << 20])
def test_a_rank_that_is_none_is_refused(rank: Any) -> None:
    with pytest.raises(ConfigError, match=r"has adapter = .*expected a rank from 0 to 65536"):
        models.describe("mlp", InputSpec((6,)), ("a", "b"), {"adapter": rank})


@pytest.mark.parametrize("model", sorted(set(MODELS) - ADAPTABLE))
def test_a_model_without_a_layer_for_it_has_no_such_option(model: str) -> None:
    spec, options = SMALL[model]
    with pytest.raises(ConfigError, match="has no option 'adapter'"):
        models.describe(model, spec, ("a", "b", "c"), {**options, "adapter": 2})


def test_rank_0_is_no_adapter() -> None:
    layout = models.describe("mlp", InputSpec((6,)), ("a", "b"), {"adapter": 0})
    np.testing.assert_equal([t.name for t in layout.tensors], ["layers.0.weight", "layers.0.bias", "head.weight",
                                                               "head.bias"])
