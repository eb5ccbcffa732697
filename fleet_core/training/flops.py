"""Counts the floating-point operations of a round from those of a model's layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fleet_core.algorithms.interface import EPISODIC, INNER, Method
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.model.layout import Layout
from fleet_core.training.round_plans import Plan


@dataclass(frozen=True)
class Layer:
    """A layer with weights, in the order of the forward pass. arrays: names of the weights. forward: operations of a
    sample."""

    arrays: frozenset[str]
    forward: int


def round_flops(
    method: Method, layers: Sequence[Layer] | None, layout: Layout, hyper: Any, plan: Plan, moving: Moving = EVERYTHING
) -> int | None:
    """Floating-point operations of one client's round: of all gradients, and of FedProto's final pass over all samples.
    None without ``layers``: those of the model cannot be counted."""
    if layers is None:
        return None
    forward = sum(layer.forward for layer in layers)
    support, query, third = (sum(len(part) for draw in plan.draws for part in draw[k : k + 1]) for k in range(3))
    inner, repeated = getattr(hyper, "inner_steps", 1), getattr(hyper, "personal_steps", 1)
    whole = moving.everything or method.adaptation in INNER
    once = 3 * forward if whole else _gradient(layers, {t.name for t in layout.part(moving).tensors})
    gradients = flops_of(method.adaptation, forward, support, query, inner, third, once)
    return repeated * gradients + forward * plan.samples


def _gradient(layers: Sequence[Layer], moving: Collection[str]) -> int:
    """Operations of one sample's forward and backward pass if some arrays are frozen. The backward pass ends at the
    first layer with an array that moves. In a layer it costs as much as the forward pass for the gradient of weights
    that move, and as much again for the gradient of the layer's input, which that first layer does not compute."""
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
