"""Counts floating-point operations: of a model's forward pass, and of the gradients of a method."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fleet_core.algorithms.interface import Method
from fleet_core.base.moving import EVERYTHING, Moving
from fleet_core.learning.gradient_estimators import EPISODIC, INNER
from fleet_core.learning.models import blank
from fleet_core.learning.round_plans import Plan
from fleet_core.model.layout import Layout

COUNTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
FREE = (nn.GroupNorm, nn.LayerNorm, nn.Embedding)
"""Layers whose operations are counted, and layers whose few operations are ignored."""


@dataclass(frozen=True)
class Layer:
    """A layer with weights, as the forward pass comes to it. arrays: their names. forward: operations of a sample."""

    arrays: frozenset[str]
    forward: int


_LAYERS: WeakKeyDictionary[nn.Module, tuple[Layer, ...] | None] = WeakKeyDictionary()


def layers_of(network: nn.Module, layout: Layout) -> tuple[Layer, ...] | None:
    """The layers in the order of the forward pass: two operations per multiply-add of convolutions, linear and
    recurrent layers (an LSTM of width H with I inputs: 2·4·H·(I + H) per step and layer).

    None when a layer with weights is of another kind. The result is cached per network.
    """
    if network not in _LAYERS:
        _LAYERS[network] = _counted(network, layout)
    return _LAYERS[network]


def flops_per_sample(network: nn.Module, layout: Layout) -> int | None:
    """Floating-point operations of one sample's forward pass; None if they are not counted."""
    layers = layers_of(network, layout)
    return None if layers is None else sum(layer.forward for layer in layers)


def round_flops(
    method: Method, network: nn.Module, layout: Layout, hyper: Any, plan: Plan, moving: Moving = EVERYTHING
) -> int | None:
    """Floating-point operations of one client's round: of all gradients, and of FedProto's final pass over all samples.
    None if those of the model cannot be counted."""
    layers, forward = layers_of(network, layout), flops_per_sample(network, layout)
    if layers is None or forward is None:
        return None
    support, query, third = (sum(len(part) for draw in plan.draws for part in draw[k : k + 1]) for k in range(3))
    inner, repeated = getattr(hyper, "inner_steps", 1), getattr(hyper, "personal_steps", 1)
    whole = moving.everything or method.adaptation in INNER
    once = 3 * forward if whole else _gradient(layers, {t.name for t in layout.part(moving).tensors})
    gradients = flops_of(method.adaptation, forward, support, query, inner, third, once)
    return repeated * gradients + forward * plan.samples


def _gradient(layers: Sequence[Layer], moving: Collection[str]) -> int:
    """Operations of one sample's forward and backward pass where a part moves. The backward pass ends at the first
    layer that does; in a layer it costs as much as the forward pass for weights that move, and as much for what it
    hands down, which the first does not."""
    moves = [not layer.arrays.isdisjoint(moving) for layer in layers]
    first = moves.index(True) if True in moves else len(layers)
    return sum(layer.forward * (1 + moves[k] + (k > first)) for k, layer in enumerate(layers))


def flops_of(
    adaptation: str, forward: int, support: int, query: int, inner_steps: int = 0, third: int = 0,
    gradient: int | None = None,
) -> int:
    """Floating-point operations of a gradient. A backward pass counts as two forward passes.

    forward: operations of one sample's forward pass. gradient: of its forward and backward pass, if some arrays are
    frozen. third: samples of a separate batch for the Hessian. A support sample counts three forward passes per inner
    step, and six more when the step is differentiated or its Hessian-vector product is computed from two gradients. On
    a third batch the exact product counts nine, including the pass that it differentiates.
    """
    gradient = 3 * forward if gradient is None else gradient
    if adaptation in EPISODIC:
        return gradient * (support + query)
    second = 6 * support
    if adaptation == "maml-first-order":
        second = 0
    elif third:
        second = (6 if adaptation == "maml-hessian-free" else 9) * third
    return forward * inner_steps * (3 * support + second) + gradient * query


def _counted(network: nn.Module, layout: Layout) -> tuple[Layer, ...] | None:
    found: list[Layer] = []
    names = {module: name for name, module in network.named_modules()}

    def count(layer: nn.Module, _: Any, out: Any) -> None:
        if isinstance(layer, FREE):
            forward = 0
        elif isinstance(layer, nn.RNNBase):
            steps = out[0].data.shape[:-1].numel()  # .data: packed sequences have no shape of their own
            forward = 2 * steps * sum(p.numel() for p in layer.parameters() if p.ndim == 2)
        else:
            forward = 2 * cast(Tensor, layer.weight)[0].numel() * out.numel()
        own = (f"{names[layer]}.{name}".removeprefix("core.") for name, _ in layer.named_parameters(recurse=False))
        found.append(Layer(frozenset(own), forward))

    hooks = [m.register_forward_hook(count) for m in network.modules() if isinstance(m, (*COUNTED, *FREE))]
    try:
        with torch.no_grad():
            x = blank(layout.input, 1).to(next(network.parameters()).device)
            network(x, "predict" if layout.parameters(("head",)) else "embed")
    finally:
        for hook in hooks:
            hook.remove()
    weighted = (m for m in network.modules() if any(True for _ in m.parameters(recurse=False)))
    return tuple(found) if all(isinstance(m, (*COUNTED, *FREE)) for m in weighted) else None
