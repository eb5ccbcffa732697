"""Gradient estimators: what a local step uses as the gradient of its loss after adaptation.

- ``none``: the loss on one batch: the cross-entropy, or that of the model's task (``losses.of_task``).
- ``proto``: cross-entropy to the class means of the support (Acar et al., ICML 2021, §2; Snell et al. 2017).
- ``maml-exact``: the derivative through inner SGD steps, ∇_w f(T(w); D') (Fallah et al. 2020, eq. 5-8 with D'' = D;
  on a third batch D'' where the episode has one, as eq. 8 is printed).
- ``maml-first-order``: the Hessian dropped, ∇f(·; D') at T(w) (Fallah's FO; Chen et al. 2018).
- ``maml-hessian-free``: every Hessian-vector product by a central difference (Fallah's HF). Fallah prints it without
  the 2 and with the vectors exchanged; this one is around w, divided by 2δ, δ relative to ‖w‖/‖v‖.
- ``meta-sgd``: the gradient in the weights and in the learned rates of one inner step (Chen et al., eq. 3).
- ``metavers``: proto with a triplet term and its margin (Lim et al. 2024, eq. 1-5).
- ``gp``: the predictive likelihood of Gaussian processes (Achituve et al. 2021), see ``gaussian_loss``.
- ``joint``: that of proto and the head's cross-entropy on the same embedded samples (``methods.joint``).
- ``fedproto``: the cross-entropy and the distance of the batch's class means to the fleet's (Tan et al. 2022, eq. 7-8).

An estimator turns an episode into a ``Gradient`` (see ``gradients``). A group that is not a parameter (``margin``,
``prototypes``) holds constants; in the result, the same group holds what the step has measured.

For stacked clients every array has one more axis in front, and a loss is [clients].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.learning import gaussian_loss, losses
from fleet_core.learning.gradients import (
    Gradient,
    Loss,
    central_difference,
    direct,
    flat,
    hessian_product,
    leaves,
    maml_exact,
    maml_first_order,
    maml_with_hessian,
    meta_sgd,
    value_and_gradient,
)
from fleet_core.learning.models import Network, outputs

PADDED = (
    "none", "proto", "maml-exact", "maml-first-order", "maml-hessian-free", "meta-sgd", "fedproto", "joint",
)  # fmt: skip
"""Adaptations whose losses ignore samples of class ``NO_CLASS``, so that batches can be padded with these."""
NO_CLASS = -1


@dataclass(frozen=True)
class Episode:
    """The samples of one step: support (D) and query (D') [N, *shape] with labels int64 [N], or standardized targets
    float32 [N, K]. ``none`` uses only the query. hessian_x, hessian_y: a third batch D'', for methods that use one."""

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor
    hessian_x: Tensor | None = None
    hessian_y: Tensor | None = None

    @staticmethod
    def stacked(several: Sequence[Episode]) -> Episode:
        """Stacks clients along a new first axis; smaller batches are padded with samples of ``NO_CLASS``, or whose
        targets are NaN."""
        names = [name for name, part in vars(several[0]).items() if part is not None]
        return Episode(**{name: _padded([getattr(one, name) for one in several], name) for name in names})


def _padded(batches: Sequence[Tensor], name: str) -> Tensor:
    most = max(len(batch) for batch in batches)
    value = (math.nan if batches[0].is_floating_point() else NO_CLASS) if name.endswith("_y") else 0
    return torch.stack([
        torch.cat([batch, batch.new_full((most - len(batch), *batch.shape[1:]), value)]) if len(batch) < most else batch
        for batch in batches
    ])


class Estimators:
    """Gradients of episodes for one network. classes: number of classes. hyper: the method's hyper-parameters.
    clients: whether episodes and parameters have a first axis of clients."""

    def __init__(self, network: nn.Module, classes: int, hyper: Any, *, clients: bool = False):
        self._network, self._classes, self._hyper, self._clients = network, classes, hyper, clients

    def of(self, adaptation: str) -> Callable[[Episode], Gradient]:
        """The estimator of ``adaptation``: episode -> gradient."""
        return {
            "none": lambda e: direct(self._entropy(e.query_x, e.query_y)),
            "proto": lambda e: direct(self._episodic(self.proto_loss, e)),
            "maml-exact": self._exact,
            "maml-first-order": lambda e: maml_first_order(*self._both(e), *self._inner()),
            "maml-hessian-free": self._hessian_free,
            "meta-sgd": lambda e: meta_sgd(*self._both(e)),
            "metavers": self._metavers,
            "fedproto": self._fedproto,
            "gp": lambda e: direct(self._gp(e)),
            "joint": lambda e: direct(self._episodic(self.joint_loss, e)),
        }[adaptation]

    def measure(self, x: Tensor, y: Tensor) -> Gradient:
        """Returns totals and counts per class over all of x, y in the group ``prototypes``, and no gradient."""

        def gradient(at: Params) -> tuple[Tensor, Params]:
            model = {g: named for g, named in at.items() if g != "prototypes"}
            with torch.no_grad():
                total, count = self._lifted(self._totals)(model, x, y)
            return torch.zeros(()), {**model, "prototypes": {"count": count, "total": total}}

        return gradient

    def _lifted(self, of_batch: Callable[..., Any]) -> Callable[..., Any]:
        """Vectorizes a function of one client's parameters and batch over stacked clients, if there are any."""
        if not self._clients:
            return of_batch
        from torch.func import vmap  # takes memory, and only laboratories stack clients

        return vmap(of_batch, randomness="different")

    def _loss(self, of_batch: Callable[..., Tensor], *batch: Tensor) -> Loss:
        lifted = self._lifted(of_batch)
        return lambda w: lifted(w, *batch)

    def _entropy(self, x: Tensor, y: Tensor) -> Loss:
        return self._loss(lambda w, x, y: self._of_head(outputs(self._network, w, x, "predict"), y), x, y)

    @property
    def _of_head(self) -> Callable[[Tensor, Tensor], Tensor]:
        return _loss_of(self._network, padded=self._clients)

    def _both(self, e: Episode) -> tuple[Loss, Loss]:
        return self._entropy(e.support_x, e.support_y), self._entropy(e.query_x, e.query_y)

    def _inner(self) -> tuple[float, int]:
        return self._hyper.inner_lr, self._hyper.inner_steps

    def _exact(self, e: Episode) -> Gradient:
        support, query = self._both(e)
        if e.hessian_x is None or e.hessian_y is None:
            return maml_exact(support, query, *self._inner())
        third = self._entropy(e.hessian_x, e.hessian_y)
        return maml_with_hessian(support, query, *self._inner(), hessian_product(third))

    def _hessian_free(self, e: Episode) -> Gradient:
        support, query = self._both(e)
        third = support if e.hessian_x is None or e.hessian_y is None else self._entropy(e.hessian_x, e.hessian_y)
        return maml_with_hessian(support, query, *self._inner(), central_difference(third, self._hyper.difference))

    def _embedded(self, w: Params, *batches: Tensor) -> tuple[Tensor, Tensor]:
        z, first = outputs(self._network, w, torch.cat(batches), "embed"), batches[0].shape[0]
        return z[:first], z[first:]

    def _episodic(self, of_batch: Callable[..., Tensor], e: Episode) -> Loss:
        return self._loss(of_batch, e.support_x, e.support_y, e.query_x, e.query_y)

    def proto_loss(self, w: Params, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
        support, query = self._embedded(w, sx, qx)
        return losses.proto_loss(support, sy, query, qy, self._classes, self._hyper.distance)

    def joint_loss(self, w: Params, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
        support, query = self._embedded(w, sx, qx)
        means = losses.proto_loss(support, sy, query, qy, self._classes, self._hyper.distance)
        head = self._of_head(self._head(w, torch.cat([support, query])), torch.cat([sy, qy]))
        share = float(self._hyper.means_share)
        return share * means + (1 - share) * head

    def _gp(self, e: Episode) -> Loss:
        """Stacked clients are computed one after another, because each has a tree of its own."""

        def loss(w: Params, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
            support, query = self._embedded(w, sx, qx)
            return gaussian_loss.loss(support, sy, query, qy, self._hyper)

        batch = e.support_x, e.support_y, e.query_x, e.query_y
        if not self._clients:
            return lambda w: loss(w, *batch)
        return lambda w: torch.stack([
            loss(trees.apply(lambda a, i=i: a[i], w), *(part[i] for part in batch)) for i in range(len(e.query_y))
        ])

    def vers_loss(
        self, w: Params, margin: Tensor, share: Tensor, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(loss, the margin that the device measures)."""
        hyper = self._hyper
        support, query = self._embedded(w, sx, qx)
        entropy = losses.proto_loss(support, sy, query, qy, self._classes, hyper.distance)
        z, y = torch.cat([support, query]), torch.cat([sy, qy])
        printed = hyper.margin_divisor == "printed"
        own = losses.spread(z, y, self._classes, hyper.margin_distance, printed).detach()
        used = torch.full_like(own, hyper.fixed_margin) if hyper.fixed_margin else torch.maximum(margin, own)
        triplets = losses.centroid_triplets(
            z, y, self._classes, used, hyper.distance,
            total=hyper.triplet_sum, to_centroid=hyper.negative == "centroid",
        )
        return share * entropy + (1 - share) * triplets, own

    def _metavers(self, e: Episode) -> Gradient:
        batch = (e.support_x, e.support_y, e.query_x, e.query_y)

        def gradient(at: Params) -> tuple[Tensor, Params]:
            w = {g: named for g, named in at.items() if g != "margin"}
            given, each = at["margin"], flat(w)[0].new_ones(e.support_y.shape[:-1])
            margin, share = each * float(given["value"]), each * float(given["loss_share"])
            measured: list[Tensor] = []
            whole = self._lifted(self.vers_loss)

            def loss(w: Params) -> Tensor:
                value, own = whole(w, margin, share, *batch)
                measured.append(own)
                return cast(Tensor, value)

            value, slope = value_and_gradient(loss, leaves(w))
            return value, {**slope, "margin": {"value": measured[0], "loss_share": share}}

        return gradient

    def fedproto_loss(self, w: Params, total: Tensor, count: Tensor, x: Tensor, y: Tensor) -> Tensor:
        z = outputs(self._network, w, x, "embed")
        means = total / count.clamp(min=1)[:, None]
        pull = losses.pull(z, y, means, count, square=self._hyper.pull_form == "square")
        return self._of_head(self._head(w, z), y) + float(self._hyper.pull) * pull

    def _fedproto(self, e: Episode) -> Gradient:
        def gradient(at: Params) -> tuple[Tensor, Params]:
            w = {g: named for g, named in at.items() if g != "prototypes"}
            fleet, whole = at["prototypes"], self._lifted(self.fedproto_loss)
            value, slope = value_and_gradient(
                lambda w: whole(w, fleet["total"], fleet["count"], e.query_x, e.query_y), leaves(w)
            )
            return value, {**slope, "prototypes": fleet}

        return gradient

    def _head(self, w: Params, z: Tensor) -> Tensor:
        head = cast(Any, self._network).core.head
        return cast(Tensor, functional_call(head, {n.removeprefix("head."): a for n, a in w["head"].items()}, (z,)))

    def _totals(self, w: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = outputs(self._network, w, x, "embed")
        member = losses.one_hot(y, self._classes, z.dtype)
        return member.T @ z, member.sum(0)


def entropy(network: nn.Module, x: Tensor, y: Tensor) -> Loss:
    """The loss of what the head computes on one batch: the cross-entropy, or that of the model's task."""
    loss = _loss_of(network)
    return lambda w: loss(outputs(network, w, x, "predict"), y)


def _loss_of(network: nn.Module, *, padded: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """padded: leaves out samples of ``NO_CLASS``, or whose targets are NaN."""
    task = network.task if isinstance(network, Network) else None
    if task is None:
        return losses.known_cross_entropy if padded else losses.cross_entropy
    return (losses.known_of_task if padded else losses.of_task)(task)
