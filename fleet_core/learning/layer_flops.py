"""Counts the floating-point operations of a model's layers."""

from __future__ import annotations

from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fleet_core.algorithms.interface import Method
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.learning.models import blank
from fleet_core.model.layout import Layout
from fleet_core.training import flops as training_flops
from fleet_core.training.flops import Layer
from fleet_core.training.round_plans import Plan

COUNTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
FREE = (nn.GroupNorm, nn.LayerNorm, nn.Embedding)
"""Layers whose operations are counted, and layers whose few operations are ignored."""

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
    """``training.flops.round_flops`` of a network."""
    return training_flops.round_flops(method, layers_of(network, layout), layout, hyper, plan, moving)


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
