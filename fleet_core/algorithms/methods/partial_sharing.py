"""Methods that share a part of the model and keep the rest: FedPer, FedRep, FedBABU, LG-FedAvg, and no sharing at all.

* FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", 2019: body shared, head kept, both
  trained together.
* LG-FedAvg: Liang et al., "Think Locally, Act Globally", 2020: the head is shared, the body kept. The paper starts from
  a model that FedAvg has trained; here, from first weights like the others.
* local: nothing is shared; a baseline.
* FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm
  1: first the head under the received body, then the body under that head.
* FedBABU: Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022: the
  body is trained under a head that stays as it was at first, alike on all devices; fine-tuned when evaluated.
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
    """head_steps: the first of the local steps, which move the head alone."""

    head_steps: int = count(10, least=0)


class KeepingClient(ClientRule):
    """Trains all groups together; sends the change of the shared ones and keeps the others."""

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
        coming = iter(steps)
        head = descend(head, (_beside(g, body) for g in itertools.islice(coming, hyper.head_steps)), hyper, lr)
        local = descend(body, (_beside(g, head) for g in coming), hyper, lr)
        return Payload(trees.subtract(local, body)), {"personal": head}


class FrozenHeadClient(KeepingClient):
    """Steps on the body alone, under the first head."""

    keeps = ()

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: LocalSgd
    ) -> tuple[Payload, ClientState]:
        body, lr = broadcast.groups, rate(hyper, broadcast.scalars["round"])
        local = descend(body, (_beside(g, state["personal"]) for g in steps), hyper, lr)
        return Payload(trees.subtract(local, body)), {}


class NoServer(ServerRule):
    """Nothing comes up, and nothing changes."""

    def apply(self, state: ServerState, updates: Iterable[Update], members: int, hyper: Any) -> ServerState:
        return state


def _beside(gradient: GradFn, fixed: Params) -> GradFn:
    """``gradient`` at the moving groups beside ``fixed`` ones: the moving groups' part of it."""
    return lambda at: trees.only(gradient({**at, **fixed}), at)
