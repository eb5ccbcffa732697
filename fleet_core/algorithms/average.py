"""Federated averaging, the server and client rule of FedAvg, P-Avg (Proto) and Per-FedAvg.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1;
Fallah et al., "Personalized Federated Learning: A Meta-Learning Approach", 2020, Algorithm 1, is the same rule on
meta-gradients. Deviation: the mean over devices is uniform, as in Fallah and in the program of Acar et al., while
McMahan's is weighted by samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fleet_core.algorithms import closing, trees
from fleet_core.algorithms.seam import (
    ClientRule,
    ClientState,
    GradFn,
    LocalSgd,
    Payload,
    ServerRule,
    ServerState,
    Update,
    descend,
    rate,
)
from fleet_core.algorithms.trees import Params


class AverageClient(ClientRule):
    """K steps of SGD; sends w_i − w."""

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: LocalSgd
    ) -> tuple[Payload, ClientState]:
        anchor = broadcast.groups
        local = descend(anchor, steps, hyper, rate(hyper, broadcast.scalars["round"]))
        return Payload(trees.subtract(local, anchor)), state


class AverageServer(ServerRule):
    """w ← 1/P Σ w_i over the devices that took part."""

    def apply(self, state: ServerState, updates: Iterable[Update], members: int, hyper: LocalSgd) -> ServerState:
        delta_sum, count = closing.total(updates, lambda update: update.payload.groups)
        model: Params = trees.axpy(1 / count, delta_sum, state.model)
        return replace(state, model=model, judged=model)
