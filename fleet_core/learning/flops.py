"""Counts floating-point operations: of a model's forward pass, and of the gradients of a method."""

from __future__ import annotations

from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fleet_core.learning.gradient_estimators import EPISODIC
from fleet_core.learning.models import blank
from fleet_core.model.layout import Layout

COUNTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
FREE = (nn.GroupNorm, nn.LayerNorm, nn.Embedding)
"""Layers whose operations are counted, and layers whose few operations are ignored."""

_FLOPS: WeakKeyDictionary[nn.Module, int | None] = WeakKeyDictionary()


def flops_per_sample(network: nn.Module, layout: Layout) -> int | None:
    """Floating-point operations of one sample's forward pass: two per multiply-add of convolutions, linear and
    recurrent layers (an LSTM of width H with I inputs: 2·4·H·(I + H) per step and layer).

    None when a layer with weights is of another kind. The result is cached per network.
    """
    if network not in _FLOPS:
        _FLOPS[network] = _count_flops(network, layout)
    return _FLOPS[network]


def flops_of(
    adaptation: str, forward: int, support: int, query: int, inner_steps: int = 0, third: int = 0
) -> int:
    """Floating-point operations of a gradient. A backward pass counts as two forward passes.

    forward: operations of one sample's forward pass. third: samples of a separate batch for the Hessian. A support
    sample counts three forward passes per inner step, and six more when the step is differentiated or its
    Hessian-vector product is computed from two gradients. On a third batch the exact product counts nine, including the
    pass that it differentiates.
    """
    if adaptation in EPISODIC:
        return 3 * forward * (support + query)
    second = 6 * support
    if adaptation == "maml-first-order":
        second = 0
    elif third:
        second = (6 if adaptation == "maml-hessian-free" else 9) * third
    return forward * (inner_steps * (3 * support + second) + 3 * query)


def _count_flops(network: nn.Module, layout: Layout) -> int | None:
    counts: list[int] = []

    def count(layer: nn.Module, _: Any, out: Any) -> None:
        if isinstance(layer, nn.RNNBase):
            steps = out[0].data.shape[:-1].numel()  # .data: packed sequences have no shape of their own
            counts.append(2 * steps * sum(p.numel() for p in layer.parameters() if p.ndim == 2))
        else:
            counts.append(2 * cast(Tensor, layer.weight)[0].numel() * out.numel())

    hooks = [m.register_forward_hook(count) for m in network.modules() if isinstance(m, COUNTED)]
    try:
        with torch.no_grad():
            x = blank(layout.input, 1).to(next(network.parameters()).device)
            network(x, "predict" if layout.parameters(("head",)) else "embed")
    finally:
        for hook in hooks:
            hook.remove()
    weighted = (m for m in network.modules() if any(True for _ in m.parameters(recurse=False)))
    return sum(counts) if all(isinstance(m, (*COUNTED, *FREE)) for m in weighted) else None
