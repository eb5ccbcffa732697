"""Models: an encoder ``embed(x) -> z`` and usually a linear ``head``, behind the layout's preprocessing.

Named models are in ``architectures``. No model may have running statistics (BatchNorm), because those of different
devices do not average well.

A user's own model is ``package.module:build`` of an installed package, a function
``build(shape: tuple[int, ...], classes: int, **options) -> nn.Module`` whose module has ``embed`` and maybe ``head``.

Shapes: N samples, D embedding width, K classes.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fleet_core.algorithms.interface import Method
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError
from fleet_core.base.trees import Params
from fleet_core.data.model_input import TOKENS
from fleet_core.learning.adapters import with_adapters
from fleet_core.learning.architectures import ADAPTABLE, MAX_SIZE, MODELS
from fleet_core.model.layout import MODEL_GROUPS, InputSpec, Layout, TensorSpec
from fleet_core.tasks.anomaly import KIND as ANOMALY
from fleet_core.tasks.anomaly import Anomaly
from fleet_core.tasks.task import Task
from fleet_core.training.local_round import NumpyParams, check_task

TorchParams = dict[str, dict[str, Tensor]]


NO_PACKAGES = {*sys.stdlib_module_names, "test", "__main__"}
ADAPTER = "adapter"
IMAGES = 4
"""Number of axes of a batch of images."""


class Network(nn.Module):
    """A model with its preprocessing: raw samples, (x · scale − mean) / std per channel, then the core.

    int64 samples (tokens) reach the core unchanged. For faster laboratories: ``channels_last`` stores images with
    channels last, which changes only roundings; ``reduced`` computes the products of the embedding and of its
    derivatives in bfloat16. task: as in the layout; it decides the loss.
    """

    channels_last = reduced = False

    def __init__(self, core: nn.Module, spec: InputSpec, task: Task | None = None) -> None:
        super().__init__()
        self.core, self.spec, self.task = core, spec, task
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
        x, core = self.prepare(x), cast(Any, self.core)
        if self.channels_last and x.dim() == IMAGES:
            x = x.contiguous(memory_format=torch.channels_last)
        if not self.reduced:
            return cast(Tensor, core.embed(x))
        with torch.autocast(x.device.type, torch.bfloat16):
            z_ND = core.embed(x)
        return cast(Tensor, z_ND.to(next(self.core.parameters()).dtype))

    def forward(self, x: Tensor, output: str = "predict") -> Tensor:
        """Raw samples -> logits or standardized numbers [N, K] (``predict``), or z [N, D] (``embed``). Of anomalies:
        the differences between the repetition and the prepared sample."""
        z_ND = self.embed(x)
        if output == "embed":
            return z_ND
        out_NK = cast(Tensor, cast(Any, self.core).head(z_ND))
        return out_NK - self.prepare(x).flatten(1) if isinstance(self.task, Anomaly) else out_NK


def outputs(network: nn.Module, params: Params, x: Tensor, output: str) -> Tensor:
    """``network(x, output)`` with the torch tensors ``params`` instead of its own; arrays not in ``params`` are
    kept."""
    named = {f"core.{name}": array for group in params.values() for name, array in group.items()}
    return cast(Tensor, functional_call(network, named, (x, output)))


def hold(network: nn.Module, params: Params) -> None:
    """Sets arrays of the network, for the arrays that ``outputs`` is not given. Its own parameters then require no
    gradients."""
    named = dict(network.named_parameters())
    network.requires_grad_(False)
    for arrays in params.values():
        for name, array in arrays.items():
            named[f"core.{name}"].copy_(array)


def describe(
    model: str, input: InputSpec, classes: Sequence[str], options: Mapping[str, Any], task: Task | None = None
) -> Layout:
    """The layout of a model, found by building it and running it on two samples. task: what it answers instead of
    ``classes``, which are then empty. Raises ConfigError."""
    if classes and task is not None:
        raise ConfigError(f"a model of {task.kind} with {len(classes)} classes", expected="classes or a task")
    if isinstance(task, Anomaly):
        _check_repeats(task, input)
    draft = Layout(model, input, tuple(classes), 1, (), schema.plain(options), task=task)
    network = _network(draft)
    tensors = tuple(_spec(name, p, model) for name, p in network.core.named_parameters())
    return replace(draft, tensors=tensors, embedding=_dry_run(network, draft))


def _check_repeats(task: Anomaly, spec: InputSpec) -> None:
    """Raises ConfigError unless a model can repeat samples of this form."""
    size = math.prod(spec.shape)
    if spec.dtype == "int64":
        raise ConfigError("samples are tokens, which a model cannot repeat", expected=f"numbers for a task {ANOMALY}")
    if task.width != size:
        raise ConfigError(f"model.task.width is {task.width}", expected=f"{size}, the numbers of a sample")


def build(layout: Layout, *, channels_last: bool = False, reduced: bool = False) -> Network:
    """The layout's model with arbitrary weights. Raises ConfigError when the installed model has other arrays."""
    network = _network(layout)
    network.channels_last, network.reduced = channels_last, reduced
    found = {(t.name, t.shape) for t in (_spec(n, p, layout.model) for n, p in network.core.named_parameters())}
    if found != {(t.name, t.shape) for t in layout.tensors}:
        raise ConfigError(
            f"the model '{layout.model}' that is installed here has other arrays than the fleet's layout",
            hint="install the version of the package that the fleet uses",
        )
    return network


def check_groups(method: Method, layout: Layout) -> None:
    """Raises ConfigError when the method cannot learn the layout's task, or the model lacks a group that the method
    trains. A model without a body fits every method that trains the whole model."""
    check_task(method, layout)
    groups = {tensor.group for tensor in layout.tensors}
    parts = [set(part) & set(MODEL_GROUPS) for part in (method.shared, method.personal)]
    needed = {"body"} if method.graphs == ("embed",) or {"body"} in parts else set[str]()
    needed |= {"head"} & parts[0].union(parts[1])
    lacking = next((g for g in MODEL_GROUPS if g in needed - groups), None)
    if lacking is not None:
        raise ConfigError(
            f"{method.name} trains the {lacking} of a model, and '{layout.model}' has none",
            hint="use another model, or a method that does not need it: metafleet methods",
        )


def initial(layout: Layout, seed: int) -> NumpyParams:
    """Initial weights, float32, by the module's own initialisation from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        named = dict(build(layout).core.named_parameters())
    return layout.ordered(
        {g: {t.name: named[t.name].detach().numpy() for t in layout.tensors if t.group == g} for g in ("body", "head")}
    )


def to_torch(params: Params, device: torch.device | None = None) -> TorchParams:
    """numpy -> torch, copied, with the same dtype."""
    return {g: {n: torch.tensor(a, device=device) for n, a in named.items()} for g, named in params.items()}


def to_numpy(params: Params) -> NumpyParams:
    """torch -> numpy float32."""
    return {g: {n: a.detach().to(torch.float32).cpu().numpy() for n, a in named.items()} for g, named in params.items()}


def _network(layout: Layout) -> Network:
    _check_input(layout.input)
    builder = _builder(layout.model)
    _check_tokens(layout)
    _check_options(layout, builder)
    own = {name: value for name, value in layout.options.items() if name != ADAPTER or layout.model not in ADAPTABLE}
    try:
        core = builder(tuple(layout.input.shape), len(layout.answers), **own)
    except Exception as error:  # the builder is the user's code
        raise ConfigError(f"the model '{layout.model}' cannot be built: {error}") from error
    if own.keys() != layout.options.keys():
        _add_adapters(core, layout)
    if not isinstance(core, nn.Module) or not callable(getattr(core, "embed", None)):
        raise ConfigError(f"the model '{layout.model}' has no embed(x)", expected="an nn.Module with embed, maybe head")
    return Network(core, layout.input, layout.task)


def _add_adapters(core: nn.Module, layout: Layout) -> None:
    rank = layout.options[ADAPTER]
    if type(rank) is not int or not 0 <= rank <= MAX_SIZE:
        raise ConfigError(f"the model '{layout.model}' has adapter = {rank!r}", expected=f"a rank from 0 to {MAX_SIZE}")
    if rank:
        with_adapters(core, rank)


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
    if package.partition(".")[0] in NO_PACKAGES:  # layouts are untrusted input
        raise ConfigError(f"the model '{model}' is in Python's own library", expected="package.module:build of yours")
    try:
        return cast(Callable[..., nn.Module], getattr(importlib.import_module(package), name))
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise ConfigError(
            f"the model '{model}' cannot be imported: {error}", hint=f"install the package of '{package}' here"
        ) from error


def _check_options(layout: Layout, builder: Callable[..., nn.Module]) -> None:
    known = list(inspect.signature(builder).parameters.values())[2:]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known):
        return
    names = [*(p.name for p in known), *([ADAPTER] if layout.model in ADAPTABLE else [])]
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


def _check_tokens(layout: Layout) -> None:
    wanted = layout.model in TOKENS
    if layout.model in MODELS and wanted != (layout.input.dtype == "int64"):
        raise ConfigError(
            f"the model '{layout.model}' takes {'tokens' if wanted else 'numbers'}, not {layout.input.dtype}",
            expected="input.dtype int64" if wanted else "input.dtype float32 or uint8",
        )


def _spec(name: str, parameter: nn.Parameter, model: str) -> TensorSpec:
    if parameter.dtype != torch.float32:
        raise ConfigError(f"parameter {name} of the model '{model}' is {parameter.dtype}", expected="float32")
    return TensorSpec(name, "head" if name.startswith("head.") else "body", tuple(parameter.shape))


def blank(spec: InputSpec, number: int) -> Tensor:
    return torch.zeros((number, *spec.shape), dtype=getattr(torch, spec.dtype))


def _dry_run(network: Network, layout: Layout) -> int:
    """The embedding's width. Raises ConfigError when the model does not accept its input or has running statistics."""
    before = {name: buffer.clone() for name, buffer in network.core.named_buffers()}
    z_ND = _try(network, layout, "embed")
    if z_ND.ndim != 2 or len(z_ND) != 2:
        found = list(z_ND.shape)
        raise ConfigError(f"embed(x) of the model '{layout.model}' returns {found} for two samples", expected="[2, D]")
    wanted = [2, len(layout.answers)]
    if hasattr(network.core, "head") and (found := list(_try(network, layout, "predict").shape)) != wanted:
        raise ConfigError(
            f"the head of the model '{layout.model}' returns {found} for two samples", expected=f"{wanted}"
        )
    if any(not torch.equal(before[name], buffer) for name, buffer in network.core.named_buffers()):
        raise ConfigError(
            f"the model '{layout.model}' keeps running statistics, which devices do not share",
            hint="use GroupNorm instead of BatchNorm, or track_running_stats=False",
        )
    return int(z_ND.shape[1])


def _try(network: Network, layout: Layout, output: str) -> Tensor:
    try:
        with torch.no_grad():
            return cast(Tensor, network(blank(layout.input, 2), output))
    except Exception as error:  # the module is the user's code
        raise ConfigError(
            f"the model '{layout.model}' does not take samples of shape {list(layout.input.shape)}: {error}"
        ) from error
