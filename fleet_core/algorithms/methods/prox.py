"""FedProx: a proximal term around the received model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2
and eq. 2. Deviation: every device makes the same number of steps; the paper lets slow ones stop early.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleet_core.algorithms.interface import ClientRule, ClientState, GradFn, Payload, descend, rate, weight
from fleet_core.algorithms.methods.average import Averaging
from fleet_core.base import trees
from fleet_core.base.trees import Params


@dataclass(frozen=True, kw_only=True)
class Prox(Averaging):
    """proximity: μ, the weight of the quadratic term; 0 is FedAvg."""

    proximity: float = weight(0.01)


class ProxClient(ClientRule):
    """K steps on f_i(w) + μ/2 ‖w − w^t‖²; sends w_i − w^t."""

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: Prox
    ) -> tuple[Payload, ClientState]:
        anchor = broadcast.groups

        def correction(w: Params) -> Params:
            return trees.scale(trees.subtract(w, anchor), hyper.proximity)

        local = descend(anchor, steps, hyper, rate(hyper, broadcast.scalars["round"]), correction)
        return Payload(trees.subtract(local, anchor)), state
