"""Methods that share a part of the model and keep the rest: FedPer, FedRep, FedBABU, LG-FedAvg, and local training.

* FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", 2019: the body is shared and the head
  kept; both are trained together.
* LG-FedAvg: Liang et al., "Think Locally, Act Globally", 2020: the head is shared, the body kept. The paper starts from
  a model that FedAvg has trained; here the start is the initial weights, as for the other methods.
* local: nothing is shared; a baseline.
* FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm
  1: first the head under the received body, then the body under that head.
* FedBABU: Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022: the
  body is trained under the initial head, which is the same on all devices; the model is fine-tuned for evaluation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fleet_core.algorithms.interface import (
    ClientRule,
    ClientState,
    GradFn,
    LocalSgd,
    Payload,
    ServerRule,
    ServerState,
    Update,
    count,
    descend,
    rate,
)
from fleet_core.base import trees
from fleet_core.base.trees import Params


@dataclass(frozen=True, kw_only=True)
class HeadFirst(LocalSgd):
    """head_steps: number of first local steps, which train only the head."""

    head_steps: int = count(10, least=0)


class KeepingClient(ClientRule):
    """Trains all groups together; sends the change of the shared groups and keeps the others."""

    keeps: tuple[str, ...] = ("personal",)

    def init(self, model: Params, personal: Params, hyper: LocalSgd) -> ClientState:
        return {"personal": personal}

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: LocalSgd
    ) -> tuple[Payload, ClientState]:
        shared, own = broadcast.groups, state["personal"]
        local = descend({**shared, **own}, steps, hyper, rate(hyper, broadcast.scalars["round"]))
        return Payload(trees.subtract(trees.only(local, shared), shared)), {"personal": trees.only(local, own)}


class HeadFirstClient(KeepingClient):
    """Steps on the head, then on the body."""

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: Any
    ) -> tuple[Payload, ClientState]:
        body, head, lr = broadcast.groups, state["personal"], rate(hyper, broadcast.scalars["round"])
        gradients = iter(steps)
        head = descend(head, (_with_fixed(g, body) for g in itertools.islice(gradients, hyper.head_steps)), hyper, lr)
        local = descend(body, (_with_fixed(g, head) for g in gradients), hyper, lr)
        return Payload(trees.subtract(local, body)), {"personal": head}


class FrozenHeadClient(KeepingClient):
    """Steps on the body only, under the initial head."""

    keeps = ()

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: LocalSgd
    ) -> tuple[Payload, ClientState]:
        body, lr = broadcast.groups, rate(hyper, broadcast.scalars["round"])
        local = descend(body, (_with_fixed(g, state["personal"]) for g in steps), hyper, lr)
        return Payload(trees.subtract(local, body)), {}


class NoServer(ServerRule):
    """Devices send nothing, so nothing changes."""

    def apply(self, state: ServerState, updates: Iterable[Update], members: int, hyper: Any) -> ServerState:
        return state


def _with_fixed(gradient: GradFn, fixed: Params) -> GradFn:
    """``gradient`` with ``fixed`` groups beside those that are trained; returns the part of the trained groups."""
    return lambda at: trees.only(gradient({**at, **fixed}), at)
