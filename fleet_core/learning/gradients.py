"""Gradients of a loss with respect to named tensors: plain, through the SGD steps of MAML, and of Meta-SGD.

A gradient is a function of named tensors (float32 or float64) that returns the loss and its gradient, with the same
groups and names.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.training import inner_steps
from fleet_core.training.inner_steps import Product

Loss = Callable[[Params], Tensor]
Gradient = Callable[[Params], tuple[Tensor, Params]]


def leaves(at: Params) -> Params:
    """The same values as leaf tensors that require gradients."""
    return trees.apply(lambda a: a.detach().requires_grad_(), at)


def value_and_gradient(loss: Loss, at: Params, *, create_graph: bool = False) -> tuple[Tensor, Params]:
    """``loss`` and its gradient at ``at``, whose tensors require gradients; zeros for tensors that it does not use.

    Stacked clients have one loss each. A client's loss does not depend on the others' arrays, so the gradient of the
    sum contains the gradients of all.
    """
    value = loss(at)
    grads = iter(
        torch.autograd.grad(value.sum(), flat(at), create_graph=create_graph, allow_unused=True, materialize_grads=True)
    )
    return value, trees.apply(lambda _: next(grads), at)


def sgd(loss: Loss, at: Params, lr: float, steps: int) -> Params:
    """The result of ``steps`` SGD steps from ``at``, with its graph back to ``at``."""
    for _ in range(steps):
        _, gradient = value_and_gradient(loss, at, create_graph=True)
        at = trees.axpy(-lr, gradient, at)
    return at


def direct(loss: Loss) -> Gradient:
    """The gradient of ``loss`` itself."""
    return lambda at: value_and_gradient(loss, leaves(at))


def maml_exact(support: Loss, query: Loss, lr: float, steps: int) -> Gradient:
    """∇_w query(T(w)), T = ``steps`` SGD steps on ``support`` at rate ``lr``."""
    return direct(lambda w: query(sgd(support, w, lr, steps)))


def maml_first_order(support: Loss, query: Loss, lr: float, steps: int) -> Gradient:
    """``inner_steps.first_order`` of losses."""
    return inner_steps.first_order(direct(support), direct(query), lr, steps)


def maml_with_hessian(support: Loss, query: Loss, lr: float, steps: int, product: Product) -> Gradient:
    """``inner_steps.with_hessian`` of losses."""
    return inner_steps.with_hessian(direct(support), direct(query), lr, steps, product)


def hessian_product(loss: Loss) -> Product:
    """The function (w, v) ↦ H(w) v, by differentiating ⟨∇loss(w), v⟩."""

    def product(w: Params, v: Params) -> Params:
        at = leaves(w)
        _, slope = value_and_gradient(loss, at, create_graph=True)
        along = torch.stack([(g * d).sum() for g, d in zip(flat(slope), flat(v), strict=True)]).sum()
        grads = iter(torch.autograd.grad(along, flat(at), allow_unused=True, materialize_grads=True))
        return trees.apply(lambda _: next(grads), at)

    return product


def central_difference(loss: Loss, difference: float) -> Product:
    """``inner_steps.central_difference`` of a loss."""
    return inner_steps.central_difference(direct(loss), difference)


def meta_sgd(support: Loss, query: Loss) -> Gradient:
    """∇_(w,a) query(w − a∘∇support(w)) for a tree with w and, in the group ``rates``, a."""

    def adapted(at: Params) -> Params:
        w, rates = trees.parted(at, "rates")
        _, slope = value_and_gradient(support, w, create_graph=True)
        return trees.apply(lambda w, a, g: w - a * g, w, rates, slope)

    return direct(lambda at: query(adapted(at)))


def flat(tree: Params) -> list[Tensor]:
    return [array for named in tree.values() for array in named.values()]
