"""A device's own model by gradient steps, with the gradients of an engine.

Full-batch steps: MAML's inner steps (Fallah et al. 2020), fine-tuning, or Meta-SGD's step with learned rates (Chen et
al. 2018, eq. 3); or the minimiser of a Moreau envelope (Dinh et al. 2020); or groups that stay on the device. A new
device first trains those groups: by fine-tuning, or towards the fleet's class means, as a new client of Tan et al. 2022
("Model Inference") does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fleet_core.algorithms.interface import ClientState, Method, Payload, own_steps
from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.model.layout import MODEL_GROUPS, Layout
from fleet_core.training.local_round import Engine, NumpyParams, check, targets, train_one
from fleet_core.training.round_plans import CHUNK, Participant, Samples


def adapt(
    engine: Engine, method: Method, layout: Layout, served: Params, x: Samples, y: Samples, hyper: Any,
    state: ClientState | None = None, scalars: Mapping[str, float] | None = None,
) -> NumpyParams:
    """The device's own weights of ``body`` and ``head``, as far as the method has them.

    served: the served model's groups. x, y: raw samples to personalize on. state: the device's, with its personal
    groups if it took part. scalars: ``seed`` and ``round``, for initial values and draws. Deterministic. Raises
    DataError.
    """
    known = dict(scalars or {})
    mine = (state or {}).get("personal")
    first = mine is None or method.personalizer == "moreau"
    own = engine.first_personal(method, layout, known) if first or mine is None else mine
    params = layout.ordered({**trees.only(served, MODEL_GROUPS), **own})
    if method.personalizer == "moreau":
        if mine is not None and hyper.answer == "last":
            return layout.ordered(mine)
        return by_training(engine, method, layout, params, x, y, hyper, known)
    if method.personalizer == "fleet-proto" and mine is None:
        tuned = replace(hyper, local_steps=hyper.finetune_steps, client_lr=hyper.finetune_lr, lr_decay=1.0)
        return by_training(engine, method, layout, served, x, y, tuned, known) if hyper.finetune_steps else params
    if method.personalizer == "meta-sgd":
        check(method, layout, x, y)
        _, rates = trees.parted(served, "rates")
        return _stepped(engine, params, engine.arrays(rates), 1, x, targets(layout, y))
    lr, steps = own_steps(method, hyper, trained=mine is not None)
    if steps:
        check(method, layout, x, y)
    moving = {g: {n: lr if g in method.moving else 0.0 for n in named} for g, named in params.items()}
    return _stepped(engine, params, moving, steps, x, targets(layout, y))


def by_training(
    engine: Engine, method: Method, layout: Layout, served: Params, x: Samples, y: Samples, hyper: Any,
    scalars: Mapping[str, float],
) -> NumpyParams:
    """The personal groups after a round of local training from the served model: pFedMe's θ_i."""
    broadcast = Payload(served, {"round": 1.0, **scalars})
    rng = np.random.default_rng([int(broadcast.scalars.get("seed", 0)), int(broadcast.scalars["round"])])
    result = train_one(engine, method, layout, broadcast, Participant({}, x, y, rng), hyper)
    return layout.ordered(result.pending["personal"])


def _stepped(
    engine: Engine, params: Params, rates: Params, steps: int, x: Samples, y: Samples
) -> NumpyParams:
    """w ← w − a∘∇f(w) over all samples, ``steps`` times; a group with rate 0 does not change."""
    w = engine.arrays(params)
    with engine.adapting():
        for _ in range(steps):
            total = trees.zeros_like(w)
            for start in range(0, len(y), CHUNK):
                part = y[start : start + CHUNK]
                _, gradient = engine.entropy(x[start : start + CHUNK], part)(w)
                total = trees.axpy(len(part) / len(y), gradient, total)
            w = trees.apply(lambda w, a, g: w - a * g, w, rates, total)
    return engine.numpy(w)
