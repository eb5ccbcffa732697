"""Gradient estimators: what a device's step takes as the gradient of its loss after adaptation.

- ``none``: cross-entropy on one batch.
- ``proto``: cross-entropy to the class means of the support (Acar et al., ICML 2021, §2; Snell et al. 2017).
- ``maml-exact``: the derivative through inner SGD steps, ∇_w f(T(w); D') (Fallah et al. 2020, eq. 5-8 with D'' = D).
- ``maml-first-order``: the Hessian dropped, ∇f(·; D') at T(w) (Fallah's FO; Chen et al. 2018).

A gradient here is a function of named tensors (float32 or float64) that returns the loss and its gradient, alike in
groups and names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fleet_core.algorithms import trees
from fleet_core.algorithms.seam import GradFn
from fleet_core.algorithms.trees import Params
from fleet_core.learning import losses
from fleet_core.learning.models import outputs

Loss = Callable[[Params], Tensor]
Gradient = Callable[[Params], tuple[Tensor, Params]]


@dataclass(frozen=True)
class Episode:
    """The samples of one step: support (D) and query (D') [N, *shape] with labels int64 [N]; "none" uses the query."""

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor


def leaves(at: Params) -> Params:
    """The same values, cut from any graph, ready to be differentiated by."""
    return trees.apply(lambda a: a.detach().requires_grad_(), at)


def value_and_gradient(loss: Loss, at: Params, *, create_graph: bool = False) -> tuple[Tensor, Params]:
    """``loss`` and its gradient at ``at``, whose tensors require gradients; zeros for tensors that it does not use."""
    flat = [array for named in at.values() for array in named.values()]
    value = loss(at)
    grads = iter(torch.autograd.grad(value, flat, create_graph=create_graph, allow_unused=True, materialize_grads=True))
    return value, trees.apply(lambda _: next(grads), at)


def sgd(loss: Loss, at: Params, lr: float, steps: int, *, differentiable: bool) -> Params:
    """``steps`` SGD steps from ``at``; with ``differentiable`` the result keeps its graph back to ``at``."""
    for _ in range(steps):
        _, gradient = value_and_gradient(loss, at, create_graph=differentiable)
        at = trees.axpy(-lr, gradient, at)
        at = at if differentiable else leaves(at)
    return at


def direct(loss: Loss) -> Gradient:
    """The gradient of ``loss`` itself."""
    return lambda at: value_and_gradient(loss, leaves(at))


def maml_exact(support: Loss, query: Loss, lr: float, steps: int) -> Gradient:
    """∇_w query(T(w)), T = ``steps`` SGD steps on ``support`` at rate ``lr``."""
    return direct(lambda w: query(sgd(support, w, lr, steps, differentiable=True)))


def maml_first_order(support: Loss, query: Loss, lr: float, steps: int) -> Gradient:
    """∇query at T(w)."""
    return lambda at: value_and_gradient(query, sgd(support, leaves(at), lr, steps, differentiable=False))


def entropy(network: nn.Module, x: Tensor, y: Tensor) -> Loss:
    """The cross-entropy of the head's logits on one batch."""
    return lambda w: losses.cross_entropy(outputs(network, w, x, "predict"), y)


def estimator(adaptation: str, network: nn.Module, classes: int, hyper: Any) -> Callable[[Episode], Gradient]:
    """The gradient that ``adaptation`` makes of an episode; ``hyper`` has inner_lr and inner_steps for MAML."""

    def loss(x: Tensor, y: Tensor) -> Loss:
        return entropy(network, x, y)

    def proto(episode: Episode) -> Gradient:
        return direct(lambda w: _proto_loss(network, w, episode, classes))

    def maml(kind: Callable[[Loss, Loss, float, int], Gradient]) -> Callable[[Episode], Gradient]:
        return lambda e: kind(
            loss(e.support_x, e.support_y), loss(e.query_x, e.query_y), hyper.inner_lr, hyper.inner_steps
        )

    estimators: dict[str, Callable[[Episode], Gradient]] = {
        "none": lambda e: direct(loss(e.query_x, e.query_y)),
        "proto": proto,
        "maml-exact": maml(maml_exact),
        "maml-first-order": maml(maml_first_order),
    }
    return estimators[adaptation]


def recorded(gradient: Gradient, values: list[float]) -> GradFn:
    """``gradient`` as the seam wants it, the loss appended to ``values``."""

    def step(at: Params) -> Params:
        value, direction = gradient(at)
        values.append(float(value.detach()))
        return direction

    return step


def _proto_loss(network: nn.Module, w: Params, episode: Episode, classes: int) -> Tensor:
    z = outputs(network, w, torch.cat([episode.support_x, episode.query_x]), "embed")
    support = len(episode.support_x)
    return losses.proto_loss(z[:support], episode.support_y, z[support:], episode.query_y, classes)
