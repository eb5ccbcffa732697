"""PFLDyn: dynamic regularization of the personalized objective.

Acar, Zhao, Zhu, Matas Navarro, Mattina, Whatmough, Saligrama, "Debiasing Model Updates for Improving Personalized
Federated Training", ICML 2021, Algorithms 1 and 2. With no adaptation this is FedDyn (Acar et al., ICLR 2021).
Deviations: the served model is a running mean that moves by P/m per round in place of the mean of every device's latest
model (the same thing when all devices take part); a device's dual is committed only when its update was counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fleet_core.algorithms import aggregation
from fleet_core.algorithms.interface import (
    ClientRule,
    ClientState,
    GradFn,
    LocalSgd,
    Payload,
    ServerRule,
    ServerState,
    Update,
    descend,
    positive,
    rate,
)
from fleet_core.base import trees
from fleet_core.base.trees import Params


@dataclass(frozen=True, kw_only=True)
class Dyn(LocalSgd):
    """penalty: α, the weight of the quadratic term (Acar: 0.1 with Proto, 0.01 with MAML)."""

    penalty: float = positive(0.1)


class DynClient(ClientRule):
    """Minimises f_i(T_i(w)) − ⟨w, g_i⟩ + α/2 ‖w − w^t‖² and keeps g_i, the dual."""

    keeps = ("dual",)

    def init(self, model: Params, personal: Params, hyper: Dyn) -> ClientState:
        return {"dual": trees.zeros_like(model)}

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: Dyn
    ) -> tuple[Payload, ClientState]:
        anchor, dual, penalty = broadcast.groups, state["dual"], hyper.penalty

        def correction(w: Params) -> Params:  # gradient of Regularizer, Alg. 2
            return trees.apply(lambda w, at, g: (w - at) * penalty - g, w, anchor, dual)

        local = descend(anchor, steps, hyper, rate(hyper, broadcast.scalars["round"]), correction)
        delta = trees.subtract(local, anchor)
        return Payload(delta), {"dual": trees.axpy(-penalty, delta, dual)}  # g_i ← g_i − α (w_i − w^t)

    def after_loss(self, pending: ClientState, error: Params, hyper: Dyn, round_number: float) -> ClientState:
        return {"dual": trees.axpy(hyper.penalty, error, pending["dual"])}  # the dual follows the decoded update


class DynServer(ServerRule):
    """g ← g − α/m Σ (w_i − w^t); w ← mean(w_i) − g/α (Update₁, Alg. 2; note 1/m, not 1/P)."""

    sums = True
    serves = "another"

    def init(self, first: Params, hyper: Dyn) -> ServerState:
        return ServerState(model=first, served=first, memory={"dual": trees.zeros_like(first)})

    def apply(self, state: ServerState, updates: Iterable[Update], members: int, hyper: Dyn) -> ServerState:
        delta_sum, count = aggregation.total(updates, lambda update: update.payload.groups)
        mean = trees.axpy(1 / count, delta_sum, state.model)
        dual = trees.axpy(-hyper.penalty / members, delta_sum, state.memory["dual"])
        model = trees.axpy(-1 / hyper.penalty, dual, mean)
        served = aggregation.running_mean(state.served, mean, count, members)
        return replace(state, model=model, served=served, memory={"dual": dual})

    def joined(self, state: ServerState, members: int, new: int = 1) -> ServerState:
        """The mean of all g_i including the new ones, which are zero."""
        dual = trees.scale(state.memory["dual"], (members - new) / members)
        return replace(state, memory={"dual": dual})

    def left(self, state: ServerState, members: int) -> ServerState:
        """The server does not know the g_i that left, so every dual starts again from zero in a new epoch."""
        return replace(state, memory={"dual": trees.zeros_like(state.model)}, dual_epoch=state.dual_epoch + 1)
