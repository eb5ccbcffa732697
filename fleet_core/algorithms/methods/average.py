"""Federated averaging, the server and client rule of FedAvg, P-Avg (Proto) and Per-FedAvg.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1;
Fallah et al., "Personalized Federated Learning: A Meta-Learning Approach", 2020, Algorithm 1, is the same rule on
meta-gradients. Deviation: the mean over devices is uniform, as in Fallah and in the program of Acar et al., while
McMahan's is weighted by samples (``weighted``).

The server takes the mean change as a direction. SGD at rate 1 is averaging; at rate b it gives the mixture
(1 − b) w + b mean(w_i) of pFedMe. Adam and Yogi are those of Reddi et al., "Adaptive Federated Optimization", 2021.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fleet_core.algorithms import aggregation, optimizers
from fleet_core.algorithms.interface import (
    ClientRule,
    ClientState,
    GradFn,
    LocalSgd,
    Method,
    Payload,
    ServerRule,
    ServerState,
    Update,
    descend,
    one_of,
    positive,
    rate,
    weight,
)
from fleet_core.algorithms.optimizers import ClassMoments
from fleet_core.base import trees
from fleet_core.base.trees import Params

LARGEST_BETA = 0.999_999
MOMENTS = ("server_beta1", "server_beta2", "server_epsilon", "server_start")
"""The settings of Adam and Yogi."""
STEPS = "server_steps"
"""How many steps the server's optimizer has taken: scalars of the state, ``server_steps.group/name`` for each array."""


@dataclass(frozen=True, kw_only=True)
class Averaging(LocalSgd):
    """What the server does with the mean change of its cohort.

    weighted: weight the mean by the devices' numbers of samples.
    server_optimizer, server_lr: how the mean change moves the model.
    server_beta1, server_beta2, server_epsilon: constants of Adam and Yogi (Reddi: 0.9, 0.99, τ = 1e-3).
    server_start: initial value of their second moment; None for Kingma's bias correction (Reddi: τ²).
    """

    weighted: bool = False
    server_optimizer: str = one_of("sgd", optimizers.SERVER)
    server_lr: float = positive(1.0)
    server_beta1: float = weight(0.9, most=LARGEST_BETA)
    server_beta2: float = weight(0.99, most=LARGEST_BETA)
    server_epsilon: float = positive(1e-3)
    server_start: float | None = weight(None)

    def unread(self, method: Method) -> dict[str, str]:
        sgd = dict.fromkeys(MOMENTS, "the server steps with SGD, which has no moments")
        return {**super().unread(method), **(sgd if self.server_optimizer == "sgd" else {})}


class AverageClient(ClientRule):
    """K steps of SGD; sends w_i − w."""

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: LocalSgd
    ) -> tuple[Payload, ClientState]:
        anchor = broadcast.groups
        local = descend(anchor, steps, hyper, rate(hyper, broadcast.scalars["round"]))
        return Payload(trees.subtract(local, anchor)), state


class AverageServer(ServerRule):
    """w ← 1/P Σ w_i over the devices that took part, or a step of the server's optimizer in that direction."""

    sums = True

    def apply(self, state: ServerState, updates: Iterable[Update], members: int, hyper: Averaging) -> ServerState:
        model, memory, scalars = moved(state, mean(updates, hyper), hyper)
        return replace(state, model=model, served=model, memory=memory, scalars=scalars)


def mean(updates: Iterable[Update], hyper: Averaging) -> Params:
    """Mean of the received updates: uniform, or weighted by samples."""
    if hyper.weighted:
        total, _ = aggregation.total(updates, lambda update: trees.scale(update.payload.groups, float(update.samples)))
        return trees.scale(total, 1 / max(1, sum(update.samples for update in updates)))
    total, count = aggregation.total(updates, lambda update: update.payload.groups)
    return trees.scale(total, 1 / count)


def moved(
    state: ServerState, change: Params, hyper: Averaging
) -> tuple[Params, Mapping[str, Params], Mapping[str, float]]:
    """(model, memory, scalars) after the server's step along ``change``."""
    if hyper.server_optimizer == "sgd":
        return trees.axpy(hyper.server_lr, change, state.model), state.memory, state.scalars
    start = hyper.server_start
    step, after = optimizers.adam(
        change, _moments(state, change, start or 0.0), beta1=hyper.server_beta1, beta2=hyper.server_beta2,
        epsilon=hyper.server_epsilon, corrected=start is None, yogi=hyper.server_optimizer == "yogi",
    )
    memory: dict[str, Any] = {**state.memory, "first_moment": after.first, "second_moment": after.second}
    model = trees.axpy(hyper.server_lr, step, state.model)
    counts = {f"{STEPS}.{g}/{n}": float(count) for g, named in after.count.items() for n, count in named.items()}
    return model, memory, {**state.scalars, **counts}


def _moments(state: ServerState, change: Params, start: float) -> ClassMoments:
    """The server's moments of the arrays of ``change``; an array that has not moved yet has initial moments. A
    checkpoint of an earlier version has one count for all arrays."""
    fresh, first = ClassMoments.begin(change, start), state.memory.get("first_moment", {})
    counts = {
        g: {n: int(state.scalars.get(f"{STEPS}.{g}/{n}", state.scalars.get(STEPS, 0))) for n in named}
        for g, named in first.items()
    }
    return ClassMoments(
        trees.merged(fresh.first, first), trees.merged(fresh.second, state.memory.get("second_moment", {})),
        trees.merged(fresh.count, counts),
    )
