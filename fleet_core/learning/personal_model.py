"""A device's own model: the personalizers that need torch.

They take full-batch gradient steps: MAML's inner steps (Fallah et al. 2020), fine-tuning, or Meta-SGD's step with
learned rates (Chen et al. 2018, eq. 3); or find the minimiser of a Moreau envelope (Dinh et al. 2020); or use groups
that stay on the device. A new device first trains those groups: by fine-tuning, or towards the fleet's class means, as
a new client of Tan et al. 2022 ("Model Inference") does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fleet_core.algorithms.interface import ClientState, Method, Payload, own_steps
from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.learning.gradient_estimators import entropy
from fleet_core.learning.gradients import leaves, value_and_gradient
from fleet_core.learning.local_training import CHUNK, first_personal, flushed, train_round
from fleet_core.learning.models import to_numpy, to_torch
from fleet_core.model.layout import MODEL_GROUPS, Layout
from fleet_core.training.local_round import NumpyParams, check
from fleet_core.training.round_plans import Samples


def adapt(
    method: Method, model: nn.Module, layout: Layout, served: Params, x: Samples, y: Samples, hyper: Any,
    state: ClientState | None = None, scalars: Mapping[str, float] | None = None,
) -> NumpyParams:
    """The device's own weights of ``body`` and ``head``, as far as the method has them.

    served: the served model's groups. x, y: raw samples to personalize on. state: the device's, with its personal
    groups if it took part. scalars: ``seed`` and ``round``, for initial values and draws. Deterministic. Raises
    DataError.
    """
    known = dict(scalars or {})
    mine = (state or {}).get("personal")
    own = first_personal(method, layout, known) if mine is None or method.personalizer == "moreau" else mine
    params = layout.ordered({**trees.only(served, MODEL_GROUPS), **own})
    if method.personalizer == "moreau":
        if mine is not None and hyper.answer == "last":
            return layout.ordered(mine)
        return by_training(method, model, layout, params, x, y, hyper, known)
    if method.personalizer == "fleet-proto" and mine is None:
        tuned = replace(hyper, local_steps=hyper.finetune_steps, client_lr=hyper.finetune_lr, lr_decay=1.0)
        return by_training(method, model, layout, served, x, y, tuned, known) if hyper.finetune_steps else params
    if method.personalizer == "meta-sgd":
        check(method, layout, x, y)
        _, rates = trees.parted(served, "rates")
        return _stepped(model, params, rates, 1, x, y)
    lr, steps = own_steps(method, hyper, trained=mine is not None)
    if steps:
        check(method, layout, x, y)
    rates = {g: {n: lr if g in method.moving else 0.0 for n in named} for g, named in params.items()}
    return _stepped(model, params, rates, steps, x, y)


def by_training(
    method: Method, model: nn.Module, layout: Layout, served: Params, x: Samples, y: Samples, hyper: Any,
    scalars: Mapping[str, float],
) -> NumpyParams:
    """The personal groups after a round of local training from the served model: pFedMe's θ_i."""
    broadcast = Payload(served, {"round": 1.0, **scalars})
    rng = np.random.default_rng([int(broadcast.scalars.get("seed", 0)), int(broadcast.scalars["round"])])
    result = train_round(method, model, layout, broadcast, {}, x, y, hyper, rng)
    return layout.ordered(result.pending["personal"])


def _stepped(model: nn.Module, params: Params, rates: Params, steps: int, x: Samples, y: Samples) -> NumpyParams:
    """w ← w − a∘∇f(w) over all samples, ``steps`` times; a group with rate 0 does not change."""
    w: Params = to_torch(params, _device(model))
    rates = trees.apply(lambda a: a if isinstance(a, float) else torch.tensor(a, device=_device(model)), rates)
    model.eval()
    with flushed():
        for _ in range(steps):
            w = trees.apply(lambda w, a, g: w - a * g, w, rates, _full_gradient(model, leaves(w), x, y))
    return to_numpy(w)


def _full_gradient(model: nn.Module, w: Params, x: Samples, y: Samples) -> Params:
    """Gradient of the mean cross-entropy over all samples, chunk by chunk."""
    total = trees.apply(lambda a: torch.zeros_like(a), w)
    for start in range(0, len(y), CHUNK):
        x_chunk = torch.tensor(x[start : start + CHUNK]).to(_device(model))
        y_chunk = torch.tensor(y[start : start + CHUNK].astype(np.int64)).to(_device(model))
        _, gradient = value_and_gradient(entropy(model, x_chunk, y_chunk), w)
        total = trees.axpy(len(y_chunk) / len(y), gradient, total)
    return total


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
