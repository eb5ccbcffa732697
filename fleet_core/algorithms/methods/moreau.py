"""pFedMe: every device keeps a personal model, tied to the shared one by a Moreau envelope.

Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1, eq. 2-8: θ_i(w)
minimises f_i(θ) + λ/2 ‖θ − w‖², found by a few SGD steps on one fresh minibatch; then the device's own w moves by
ηλ(w − θ). The server mixes, w ← (1 − β) w + β mean(w_i), which is its SGD at rate β (``server_lr``).

The paper does not say where the search for θ starts: with ``warm_start``, as in the authors' program, from the last θ
of the round; without it, from w. Deviation: in the paper every device trains in every round and only some are averaged;
here the cohort trains and all of it is averaged (``averaged`` in a laboratory's experiment is the paper's form). For an
evaluation a device finds its θ from the served w, unless ``answer`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleet_core.algorithms.interface import (
    ClientRule,
    ClientState,
    GradFn,
    Payload,
    count,
    descend,
    one_of,
    positive,
    rate,
    weight,
)
from fleet_core.algorithms.methods.average import Averaging
from fleet_core.base import trees
from fleet_core.base.trees import Params

ANSWERS = ("new", "last")


@dataclass(frozen=True, kw_only=True)
class Moreau(Averaging):
    """envelope: λ. personal_lr, personal_steps: learning rate and number of steps of the search for θ (the paper's K).
    client_lr: η. local_steps: R. answer: ``new`` answers with a θ found from the served model; ``last``, as the paper
    evaluates, with the θ of the device's last round, if there is one."""

    envelope: float = positive(15.0)
    personal_lr: float = positive(0.1)
    personal_steps: int = count(5)
    warm_start: bool = True
    answer: str = one_of("new", ANSWERS)
    client_lr: float = positive(0.01)
    clip_norm: float = weight(0.0)


def minimiser(w: Params, start: Params, gradient: GradFn, hyper: Moreau) -> Params:
    """θ(w), by SGD on f(θ) + λ/2 ‖θ − w‖² from ``start``, every step on the same samples."""
    return descend(
        start, [gradient] * hyper.personal_steps, hyper, hyper.personal_lr,
        lambda theta: trees.scale(trees.subtract(theta, w), hyper.envelope),
    )


class MoreauClient(ClientRule):
    """w ← w − ηλ(w − θ(w)) per step; sends w_i − w^t and keeps the last θ."""

    keeps = ("personal",)

    def init(self, model: Params, personal: Params, hyper: Moreau) -> ClientState:
        return {"personal": model}

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: Moreau
    ) -> tuple[Payload, ClientState]:
        w = theta = broadcast.groups
        step = rate(hyper, broadcast.scalars["round"]) * hyper.envelope
        for gradient in steps:
            theta = minimiser(w, theta if hyper.warm_start else w, gradient, hyper)
            w = trees.apply(lambda w, t: w - (w - t) * step, w, theta)
        return Payload(trees.subtract(w, broadcast.groups)), {"personal": theta}
