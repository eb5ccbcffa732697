"""Models: an encoder ``embed(x) -> z`` and, where it has one, a linear ``head``, behind the layout's preprocessing.

The named models hold no BatchNorm: running statistics of different devices do not average well.
LeNet is the network of Acar et al., ICML 2021 (conv5×5-64, maxpool2, conv5×5-64, maxpool2, fc 384, fc 192, fc classes;
no padding: 794,762 parameters for 1×32×32 and ten classes).

A model of one's own is ``package.module:build`` of an installed package, a function
``build(shape: tuple[int, ...], classes: int, **options) -> nn.Module`` whose module has ``embed`` and maybe ``head``.

Shapes: N samples, C channels, T time steps, D embedding width, K classes.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fleet_core import schema
from fleet_core.algorithms.trees import Params
from fleet_core.errors import ConfigError
from fleet_core.layout import InputSpec, Layout, TensorSpec

NumpyParams = dict[str, dict[str, np.ndarray[Any, Any]]]
TorchParams = dict[str, dict[str, Tensor]]


class Mlp(nn.Module):
    """Fully connected layers on the flattened sample. Embedding: the last hidden layer after its activation."""

    def __init__(
        self, shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (100,), activation: str = "relu"
    ) -> None:
        super().__init__()
        if activation not in ("relu", "elu"):
            raise ValueError(f"unknown activation '{activation}', expected relu or elu")
        self.activation = torch.relu if activation == "relu" else nn.functional.elu
        widths = [math.prod(shape), *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(widths[-1], classes)

    def embed(self, x: Tensor) -> Tensor:
        z_ND = x.flatten(1)
        for layer in self.layers:
            z_ND = self.activation(layer(z_ND))
        return z_ND


class Cnn1d(nn.Module):
    """Strided convolutions with GroupNorm on [C, T] series, flattened; the embedding is one hidden layer of ``width``.

    Flattening keeps where in the series something happens: on a validation split of the heartbeats it gave a macro-F1
    of 0.94 where the mean over time gave 0.83.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, channels: Sequence[int] = (16, 32, 24), width: int = 64
    ) -> None:
        super().__init__()
        (inputs, length), kernels = shape, (7, *[5] * (len(channels) - 1))
        pairs = list(pairwise([inputs, *channels]))
        self.convs = nn.ModuleList(
            nn.Conv1d(a, b, k, stride=2, padding=k // 2) for (a, b), k in zip(pairs, kernels, strict=True)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(math.gcd(b, max(1, b // 4)), b) for b in channels)
        self.hidden = nn.Linear(channels[-1] * math.ceil(length / 2 ** len(channels)), width)
        self.head = nn.Linear(width, classes)

    def embed(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return torch.relu(self.hidden(x.flatten(1)))


class LeNet(nn.Module):
    """The network of Acar et al. on images [C, H, W]; embedding 192 wide."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 64, 5)
        self.conv2 = nn.Conv2d(64, 64, 5)
        self.fc1 = nn.Linear(64 * self._side(height) * self._side(width), 384)
        self.fc2 = nn.Linear(384, 192)
        self.head = nn.Linear(192, classes)

    @staticmethod
    def _side(length: int) -> int:
        side = ((length - 4) // 2 - 4) // 2
        if side < 1:
            raise ValueError(f"lenet needs images of 16 pixels or more on each side, not {length}")
        return side

    def embed(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2):
            x = nn.functional.max_pool2d(torch.relu(conv(x)), 2)
        return torch.relu(self.fc2(torch.relu(self.fc1(x.flatten(1)))))


MODELS: dict[str, Callable[..., nn.Module]] = {"cnn1d": Cnn1d, "lenet": LeNet, "mlp": Mlp}


COUNTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
FREE = (nn.GroupNorm, nn.LayerNorm)
"""Layers whose operations are counted, and layers whose few operations are not worth counting."""


class Network(nn.Module):
    """A model behind its preprocessing: raw samples, (x · scale − mean) / std per channel, then the core.

    int64 samples (tokens) reach the core as they are.
    """

    def __init__(self, core: nn.Module, spec: InputSpec) -> None:
        super().__init__()
        self.core, self.spec = core, spec
        ones = (1,) * (len(spec.shape) - 1)
        self.register_buffer("mean", torch.tensor(spec.mean).reshape(-1, *ones), persistent=False)
        self.register_buffer("std", torch.tensor(spec.std).reshape(-1, *ones), persistent=False)

    def prepare(self, x: Tensor) -> Tensor:
        if self.spec.dtype == "int64":
            return x
        dtype = next(self.core.parameters()).dtype
        x = x.to(dtype)
        if self.spec.scale != 1.0:
            x = x * self.spec.scale
        if self.spec.mean:
            x = x - cast(Tensor, self.mean).to(dtype)
        return x / cast(Tensor, self.std).to(dtype) if self.spec.std else x

    def embed(self, x: Tensor) -> Tensor:
        """Raw samples [N, *shape] -> z [N, D]."""
        return cast(Tensor, cast(Any, self.core).embed(self.prepare(x)))

    def forward(self, x: Tensor, output: str = "predict") -> Tensor:
        """Raw samples -> logits [N, K] (``predict``) or z [N, D] (``embed``)."""
        z_ND = self.embed(x)
        return z_ND if output == "embed" else cast(Tensor, cast(Any, self.core).head(z_ND))


def outputs(network: nn.Module, params: Params, x: Tensor, output: str) -> Tensor:
    """``network`` on ``x`` with the torch tensors ``params`` in place of its own; what they lack stays its own."""
    named = {f"core.{name}": array for group in params.values() for name, array in group.items()}
    return cast(Tensor, functional_call(network, named, (x, output)))


def describe(model: str, input: InputSpec, classes: Sequence[str], options: Mapping[str, Any]) -> Layout:
    """The layout of a model: it is built once and run on two samples. Raises ConfigError."""
    draft = Layout(model, input, tuple(classes), 1, (), schema.plain(options))
    network = _network(draft)
    tensors = tuple(_spec(name, p, model) for name, p in network.core.named_parameters())
    return replace(draft, tensors=tensors, embedding=_dry_run(network, draft))


def build(layout: Layout) -> Network:
    """The layout's model with weights of no meaning. Raises ConfigError where this installation's model is another."""
    network = _network(layout)
    found = {(t.name, t.shape) for t in (_spec(n, p, layout.model) for n, p in network.core.named_parameters())}
    if found != {(t.name, t.shape) for t in layout.tensors}:
        raise ConfigError(
            f"the model '{layout.model}' that is installed here has other arrays than the fleet's layout",
            hint="install the version of the package that the fleet uses",
        )
    return network


def initial(layout: Layout, seed: int) -> NumpyParams:
    """First weights, float32, by the module's own initialisation from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        named = dict(build(layout).core.named_parameters())
    return layout.ordered(
        {g: {t.name: named[t.name].detach().numpy() for t in layout.tensors if t.group == g} for g in ("body", "head")}
    )


def to_torch(params: Params) -> TorchParams:
    """numpy -> torch, copied, of the same dtype."""
    return {g: {n: torch.tensor(a) for n, a in named.items()} for g, named in params.items()}


def to_numpy(params: Params) -> NumpyParams:
    """torch -> numpy float32."""
    return {g: {n: a.detach().to(torch.float32).numpy() for n, a in named.items()} for g, named in params.items()}


def flops_per_sample(network: nn.Module, layout: Layout) -> int | None:
    """Floating-point operations of one sample's forward pass: two per multiply-add of convolutions and linear layers.

    None when a layer with weights is of another kind, for which nothing is counted. Counted once for a network.
    """
    if network not in _FLOPS:
        _FLOPS[network] = _count_flops(network, layout)
    return _FLOPS[network]


_FLOPS: WeakKeyDictionary[nn.Module, int | None] = WeakKeyDictionary()


def _count_flops(network: nn.Module, layout: Layout) -> int | None:
    counts: list[int] = []

    def count(layer: nn.Module, _: Any, out: Tensor) -> None:
        counts.append(2 * cast(Tensor, layer.weight)[0].numel() * out.numel())

    hooks = [m.register_forward_hook(count) for m in network.modules() if isinstance(m, COUNTED)]
    try:
        with torch.no_grad():
            network(_blank(layout.input, 1), "predict" if layout.parameters(("head",)) else "embed")
    finally:
        for hook in hooks:
            hook.remove()
    weighted = (m for m in network.modules() if any(True for _ in m.parameters(recurse=False)))
    return sum(counts) if all(isinstance(m, (*COUNTED, *FREE)) for m in weighted) else None


def _network(layout: Layout) -> Network:
    _check_input(layout.input)
    builder = _builder(layout.model)
    _check_options(layout, builder)
    try:
        core = builder(tuple(layout.input.shape), len(layout.classes), **layout.options)
    except Exception as error:  # the builder may be anyone's code
        raise ConfigError(f"the model '{layout.model}' cannot be built: {error}") from error
    if not isinstance(core, nn.Module) or not callable(getattr(core, "embed", None)):
        raise ConfigError(f"the model '{layout.model}' has no embed(x)", expected="an nn.Module with embed, maybe head")
    return Network(core, layout.input)


def _builder(model: str) -> Callable[..., nn.Module]:
    if model in MODELS:
        return MODELS[model]
    package, colon, name = model.partition(":")
    if not colon:
        near = schema.suggest(model, MODELS)
        raise ConfigError(
            f"unknown model '{model}'",
            expected=f"{', '.join(MODELS)} or package.module:build",
            hint=f"did you mean '{near}'?" if near else None,
        )
    try:
        return cast(Callable[..., nn.Module], getattr(importlib.import_module(package), name))
    except Exception as error:  # importing runs anyone's code
        raise ConfigError(
            f"the model '{model}' cannot be imported: {error}", hint=f"install the package of '{package}' here"
        ) from error


def _check_options(layout: Layout, builder: Callable[..., nn.Module]) -> None:
    known = list(inspect.signature(builder).parameters.values())[2:]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known):
        return
    names = [p.name for p in known]
    for option in layout.options:
        if option not in names:
            near = schema.suggest(option, names)
            raise ConfigError(
                f"the model '{layout.model}' has no option '{option}'",
                expected=", ".join(names) or "none",
                hint=f"did you mean '{near}'?" if near else None,
            )


def _check_input(spec: InputSpec) -> None:
    for name, values in (("mean", spec.mean), ("std", spec.std)):
        if values and len(values) != spec.shape[0]:
            raise ConfigError(f"input.{name} has {len(values)} values", expected=f"one per channel, {spec.shape[0]}")
    if any(value <= 0 for value in spec.std):
        raise ConfigError("input.std holds a value that is not above 0")
    if spec.dtype == "int64" and (spec.mean or spec.std or spec.scale != 1.0):
        raise ConfigError("int64 samples are tokens: they take no scale, mean or std")


def _spec(name: str, parameter: nn.Parameter, model: str) -> TensorSpec:
    if parameter.dtype != torch.float32:
        raise ConfigError(f"parameter {name} of the model '{model}' is {parameter.dtype}", expected="float32")
    return TensorSpec(name, "head" if name.startswith("head.") else "body", tuple(parameter.shape))


def _blank(spec: InputSpec, number: int) -> Tensor:
    return torch.zeros((number, *spec.shape), dtype=getattr(torch, spec.dtype))


def _dry_run(network: Network, layout: Layout) -> int:
    """The embedding's width. Raises ConfigError where it does not take its input or keeps running statistics."""
    before = {name: buffer.clone() for name, buffer in network.core.named_buffers()}
    z_ND = _try(network, layout, "embed")
    if z_ND.ndim != 2 or len(z_ND) != 2:
        found = list(z_ND.shape)
        raise ConfigError(f"embed(x) of the model '{layout.model}' returns {found} for two samples", expected="[2, D]")
    wanted = [2, len(layout.classes)]
    if hasattr(network.core, "head") and (found := list(_try(network, layout, "predict").shape)) != wanted:
        raise ConfigError(
            f"the head of the model '{layout.model}' returns {found} for two samples", expected=f"{wanted}"
        )
    if any(not torch.equal(before[name], buffer) for name, buffer in network.core.named_buffers()):
        raise ConfigError(
            f"the model '{layout.model}' keeps running statistics, which devices do not share",
            hint="use GroupNorm in place of BatchNorm, or track_running_stats=False",
        )
    return int(z_ND.shape[1])


def _try(network: Network, layout: Layout, output: str) -> Tensor:
    try:
        with torch.no_grad():
            return cast(Tensor, network(_blank(layout.input, 2), output))
    except Exception as error:  # the module may be anyone's code
        raise ConfigError(
            f"the model '{layout.model}' does not take samples of shape {list(layout.input.shape)}: {error}"
        ) from error
