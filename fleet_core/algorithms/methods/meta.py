"""FedMeta: devices send meta-gradients, the server steps.

Chen, Luo, Dong, Li, He, "Federated Meta-Learning with Fast Convergence and Efficient Communication", 2018, Algorithm 1;
MAML, first-order MAML and Meta-SGD (eq. 3) differ only in the gradient estimator. Meta-SGD's learned rates a are one
more group of the model, ``rates``; it is sent and stepped like w.

The paper's appendix says that Adam is the *local* optimizer and that models are averaged, weighted by samples; in its
Algorithm 1 the server steps along the uniform mean of gradients. ``form`` chooses. The default is Algorithm 1 with
Adam, the paper's optimizer, on the server. """

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

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
    count,
    one_of,
    positive,
    weight,
)
from fleet_core.algorithms.methods.average import (
    LARGEST_BETA,
    MOMENTS,
    AverageClient,
    AverageServer,
    Averaging,
    mean,
    moved,
)
from fleet_core.algorithms.optimizers import SERVER
from fleet_core.base import trees

FORMS = ("algorithm-1", "appendix")
SERVERS = ("weighted", "server_optimizer", "server_lr", *MOMENTS)
STEPPING = ("client_lr", "lr_decay", "local_optimizer", "weight_decay", "clip_norm")
"""The settings of a device's own steps."""


@dataclass(frozen=True, kw_only=True)
class FedMeta(Averaging):
    """form: ``algorithm-1`` (server_lr is β) or ``appendix`` (client_lr is β). local_steps: gradients per device and
    round; Algorithm 1 takes one. server_lr: Adam's learning rate (Chen: 1e-4 on FEMNIST, 0.01 on Shakespeare)."""

    form: str = one_of("algorithm-1", FORMS)
    local_steps: int = count(1)
    client_lr: float = positive(1e-3)
    clip_norm: float = weight(0.0)
    server_optimizer: str = one_of("adam", SERVER)
    server_lr: float = positive(3e-3)
    server_beta2: float = weight(0.999, most=LARGEST_BETA)
    server_epsilon: float = positive(1e-8)

    def unread(self, method: Method) -> dict[str, str]:
        if self.form == "appendix":
            fixed = dict.fromkeys(SERVERS, "the appendix's form averages, weighted by samples")
            return {**fixed, "local_optimizer": "the appendix's form steps with Adam"}
        still = dict.fromkeys(STEPPING, "in the form algorithm-1 a device takes no step: the server does, by server_lr")
        return {**super().unread(method), **still}

    def averaging(self) -> FedMeta:
        """The settings of the appendix's form: devices step with Adam, the server averages."""
        return replace(self, local_optimizer="adam", weighted=True, server_optimizer="sgd", server_lr=1.0)


class GradientClient(ClientRule):
    """Sends the mean of its meta-gradients at the broadcast model; in the appendix's form, w_i − w after local
    steps."""

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: FedMeta
    ) -> tuple[Payload, ClientState]:
        if hyper.form == "appendix":
            return AverageClient().run(broadcast, state, steps, hyper.averaging())
        total, number = trees.zeros_like(broadcast.groups), 0
        for gradient in steps:
            total, number = trees.add(total, gradient(broadcast.groups)), number + 1
        return Payload(trees.scale(total, 1 / number)), state


class GradientServer(ServerRule):
    """w ← w − β/P Σ g_u, or a step of Adam or Yogi; in the appendix's form, the mean of the models."""

    sums = True

    def sends_changes(self, hyper: FedMeta) -> bool:
        return hyper.form == "appendix"

    def weighted(self, hyper: Any) -> bool:
        return super().weighted(hyper) or getattr(hyper, "form", "") == "appendix"

    def apply(self, state: ServerState, updates: Iterable[Update], members: int, hyper: FedMeta) -> ServerState:
        if hyper.form == "appendix":
            return AverageServer().apply(state, updates, members, hyper.averaging())
        model, memory, scalars = moved(state, trees.scale(mean(updates, hyper), -1.0), hyper)
        return replace(state, model=model, served=model, memory=memory, scalars=scalars)


@dataclass(frozen=True, kw_only=True)
class RatesStart(LocalSgd):
    """first_rate: initial value of every learned rate (Chen: α)."""

    first_rate: float = positive(0.01)


class RatesServer(GradientServer):
    """GradientServer with learned rates beside the model."""

    def init(self, first: trees.Params, hyper: RatesStart) -> ServerState:
        rates = {n: a * 0 + hyper.first_rate for n, a in first["rates"].items()}
        model = {**{g: dict(named) for g, named in first.items()}, "rates": rates}
        return ServerState(model=model, served=model)
