"""PFLScaf: control variates on the personalized objective; without adaptation this is SCAFFOLD.

Acar et al., ICML 2021, Algorithm 2, Update₂; Karimireddy et al., "SCAFFOLD", ICML 2020, Algorithm 1 with option II.
In both papers a device sends two vectors. Here it sends one: the change of its control, −g − (w_i − w^t)/(Kβ), can be
computed by the server from g, as devices decoded it, and w_i − w^t, which it receives.

Deviations: the change is divided by the rate of the steps (``control_rate``); the program of Acar et al. divides by the
initial rate while it steps with the decayed one. With a codec without error feedback the device's control follows the
decoded update, as for PFLDyn.
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
    Method,
    Payload,
    ServerRule,
    ServerState,
    Update,
    descend,
    one_of,
    rate,
)
from fleet_core.base import trees
from fleet_core.base.trees import Params


@dataclass(frozen=True, kw_only=True)
class Scaf(LocalSgd):
    """control_rate: the rate in the control's divisor Kβ: that of the steps (``stepped``), or the ``initial`` one as in
    the program of Acar et al."""

    control_rate: str = one_of("stepped", ("stepped", "initial"))

    def unread(self, method: Method) -> dict[str, str]:
        same = {"control_rate": "without lr_decay both rates are the same"} if self.lr_decay == 1 else {}
        return {**super().unread(method), **same}


def distance(hyper: Scaf, round_number: float) -> float:
    """Kβ, the divisor in the change of a device's control."""
    lr = rate(hyper, round_number) if hyper.control_rate == "stepped" else hyper.client_lr
    return hyper.local_steps * lr


def change(control: Params, delta: Params, divisor: float) -> Params:
    """g_i^new − g_i^old = −g − (w_i − w^t)/(Kβ)."""
    return trees.apply(lambda g, d: -g - d * (1 / divisor), control, delta)


class ScafClient(ClientRule):
    """K steps on f_i(T_i(w)) + ⟨w, −g_i + g⟩; keeps g_i, the control."""

    keeps = ("control",)

    def init(self, model: Params, personal: Params, hyper: Scaf) -> ClientState:
        return {"control": trees.zeros_like(trees.parted(model, "control")[0])}

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: Scaf
    ) -> tuple[Payload, ClientState]:
        (anchor, control), own = trees.parted(broadcast.groups, "control"), state["control"]
        number, pull = broadcast.scalars["round"], trees.subtract(control, own)
        delta = trees.subtract(descend(anchor, steps, hyper, rate(hyper, number), lambda w: pull), anchor)
        return Payload(delta), {"control": trees.add(own, change(control, delta, distance(hyper, number)))}

    def after_loss(self, pending: ClientState, error: Params, hyper: Scaf, round_number: float) -> ClientState:
        return {"control": trees.axpy(1 / distance(hyper, round_number), error, pending["control"])}


class ScafServer(ServerRule):
    """w ← mean(w_i); g ← g + 1/m Σ (g_i^new − g_i^old). The served model is the running mean of PFLDyn's page."""

    sums = True
    serves = "mean"

    def init(self, first: Params, hyper: Scaf) -> ServerState:
        model, _ = trees.parted(first, "control")
        return ServerState(model=model, served=model, memory={"control": trees.zeros_like(model)})

    def broadcast(self, state: ServerState) -> Payload:
        return Payload(trees.mirrored(state.model, state.memory["control"], "control"))

    def as_received(self, state: ServerState, groups: Params) -> ServerState:
        """The decoded control is kept beside the exact one, which stays the mean of all g_i."""
        model, control = trees.parted(groups, "control")
        return replace(state, model=model, memory={**state.memory, "heard": control})

    def apply(self, state: ServerState, updates: Iterable[Update], members: int, hyper: Scaf) -> ServerState:
        delta_sum, count = aggregation.total(updates, lambda update: update.payload.groups)
        mean = trees.axpy(1 / count, delta_sum, state.model)
        decoded = state.memory.get("heard", state.memory["control"])
        moved = change(trees.scale(decoded, count), delta_sum, distance(hyper, state.round))
        control = trees.axpy(1 / members, moved, state.memory["control"])
        served = aggregation.running_mean(state.served, mean, count, members)
        return replace(state, model=mean, served=served, memory={"control": control})

    def joined(self, state: ServerState, members: int, new: int = 1) -> ServerState:
        """The mean of all g_i including the new ones, which are zero."""
        control = trees.scale(state.memory["control"], (members - new) / members)
        return replace(state, memory={"control": control})

    def left(self, state: ServerState, members: int) -> ServerState:
        """The server does not know the g_i that left, so every control starts again from zero in a new epoch."""
        memory = {"control": trees.zeros_like(state.model)}
        return replace(state, memory=memory, dual_epoch=state.dual_epoch + 1)
