"""FedProto: only class means are sent.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI
2022, Algorithm 1, eq. 3-8: the loss is cross-entropy plus λ times the distance of the device's class means to the
fleet's, and the server averages class means weighted by their counts. The whole model is personal. Deviations: eq. 6 as
printed divides the weighted mean by the number of devices once more, which would draw the means towards zero; in eq. 8
a device's class means are those of the batch. By default the distance is that of the authors' program, the mean square
between each sample and the fleet's mean of its class; eq. 8's is ``pull_form = "norm"``. Their program averages means
without weights.

Means are sent as totals and counts, which can be summed: ``prototypes/total`` [classes, width] and
``prototypes/count`` [classes]. Counts tell the server which classes a device has. The method requires that a label
means the same class on all devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fleet_core.algorithms import aggregation
from fleet_core.algorithms.interface import (
    ClientState,
    GradFn,
    LocalSgd,
    Payload,
    ServerRule,
    ServerState,
    Update,
    descend,
    one_of,
    rate,
    weight,
)
from fleet_core.algorithms.methods.partial_sharing import KeepingClient
from fleet_core.algorithms.step_measures import with_constants
from fleet_core.base.trees import Params

PULL_FORMS = ("norm", "square")


@dataclass(frozen=True, kw_only=True)
class Pull(LocalSgd):
    """pull: λ, the weight of the distance between the device's class means and the fleet's (Tan: 1 on MNIST and
    FEMNIST, 0.1 on CIFAR-10). pull_form: that distance: the ``square`` of the authors' program, which becomes weak
    near the fleet's means, or ``norm`` as in eq. 8. On heart beats and human activity ``square`` was as good or better
    for every weight and rate tried (``benchmarks/papers/sensors``, chosen.json)."""

    pull: float = weight(0.1)
    pull_form: str = one_of("square", PULL_FORMS)


class PrototypeClient(KeepingClient):
    """K steps on the device's own model, pulled towards the fleet's class means; sends totals and counts per class.

    The last of ``steps`` measures totals and counts over all of the device's samples with the trained model.
    """

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: LocalSgd
    ) -> tuple[Payload, ClientState]:
        measured: list[Params] = []
        gradients = with_constants(steps, broadcast.groups, measured)
        lr = rate(hyper, broadcast.scalars["round"])
        own = descend(state["personal"], itertools.islice(gradients, hyper.local_steps), hyper, lr)
        next(gradients)(own)
        return Payload(measured[-1]), {"personal": own}


class PrototypeServer(ServerRule):
    """Totals and counts of the round; a class that no device had keeps its former ones (eq. 6)."""

    def apply(self, state: ServerState, updates: Iterable[Update], members: int, hyper: LocalSgd) -> ServerState:
        groups, _ = aggregation.total(updates, lambda update: update.payload.groups)
        old, new = state.model["prototypes"], groups["prototypes"]
        absent = (new["count"] == 0) * 1.0
        model = {
            "prototypes": {
                "count": new["count"] + old["count"] * absent,
                "total": new["total"] + old["total"] * absent[:, None],
            }
        }
        return replace(state, model=model, served=model)
