"""pFedHN: a hypernetwork on the server makes every device's model from a learned embedding of the device.

Shamsian, Navon, Fetaya, Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021, Algorithm 1: device
i receives θ_i = h(v_i; φ), makes K local steps from it and sends Δθ_i; the server moves φ and v_i by the
vector-Jacobian products of h with Δθ_i. Neither h nor the embeddings leave the server, and θ_i goes to one device.

Deviations: the paper has one device per round; here φ moves by the mean of the cohort's products, all computed at the
same φ, and each v_i by its own. A device answers with the weights at the end of its last counted round; in the paper
the server makes them from the latest φ, which would send a model to every device after every evaluated round. A
device's embedding is drawn when it first takes part, and trained from then on. A device that never takes part receives
the model of the mean embedding and fine-tunes it (the paper searches for a new device's embedding over further rounds,
as a device that takes part does here). A device that left keeps its embedding. ``model.hypernetwork`` is the network.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
    count,
    descend,
    positive,
    rate,
)
from fleet_core.algorithms.methods.average import Averaging, moved
from fleet_core.base import trees
from fleet_core.base.trees import Params

NETWORK, EMBEDDINGS, FINGERPRINT = "hypernetwork", "embeddings", "fingerprint"


@dataclass(frozen=True, kw_only=True)
class Hyper(Averaging):
    """embedding: width of v. hyper_width, hyper_layers: width and number of h's hidden layers. h has ``hyper_width``
    times as many values as the model, and every checkpoint stores them all. embedding_lr: learning rate of v.
    server_lr: learning rate of φ."""

    embedding: int = count(16, most=1000)
    hyper_width: int = count(32, most=1000)
    hyper_layers: int = count(2, most=10)
    embedding_lr: float = positive(0.1)

    def unread(self, method: Method) -> dict[str, str]:
        return {**super().unread(method), "weighted": "each device moves the hypernetwork alike"}


class HyperClient(ClientRule):
    """K steps of SGD from the weights made for this device; sends their change and keeps the final weights."""

    keeps = ("personal",)

    def init(self, model: Params, personal: Params, hyper: LocalSgd) -> ClientState:
        return {"personal": model}

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: LocalSgd
    ) -> tuple[Payload, ClientState]:
        anchor = broadcast.groups
        local = descend(anchor, steps, hyper, rate(hyper, broadcast.scalars["round"]))
        return Payload(trees.subtract(local, anchor)), {"personal": local}


class HyperServer(ServerRule):
    """Keeps h and the embeddings; serves the model of the mean embedding."""

    serves = "another"

    def init(self, first: Params, hyper: Hyper) -> ServerState:
        from fleet_core.model import hypernetwork

        network = hypernetwork.initial(
            first, hyper.embedding, hyper.hyper_width, hyper.hyper_layers, hypernetwork.generator(first)
        )
        scalars = {FINGERPRINT: float(hypernetwork.fingerprint(first)), "embedding": float(hyper.embedding)}
        return ServerState({NETWORK: network}, first, scalars=scalars)

    def broadcast(self, state: ServerState) -> Payload:
        return Payload({})

    def per_device(self, state: ServerState, device: str) -> Params:
        from fleet_core.model import hypernetwork

        return hypernetwork.generate(dict(state.model[NETWORK]), embedding_of(state, device), state.served)

    def as_received(self, state: ServerState, groups: Params) -> ServerState:
        return state

    def apply(self, state: ServerState, updates: Iterable[Update], members: int, hyper: Hyper) -> ServerState:
        from fleet_core.model import hypernetwork

        network = dict(state.model[NETWORK])
        steps: dict[str, Any] = {}

        def product(update: Update) -> Params:
            change, steps[update.device] = hypernetwork.vector_jacobian(
                network, embedding_of(state, update.device), update.payload.groups
            )
            return {NETWORK: change}

        total, number = aggregation.total(updates, product)
        model, memory, scalars = moved(state, trees.scale(total, 1 / number), hyper)
        known = dict(embeddings(state))
        for device, step in steps.items():
            known[device] = embedding_of(state, device) + step * hyper.embedding_lr
        ordered = {device: known[device] for device in sorted(known)}
        middle = sum(ordered.values()) * (1 / len(ordered))
        served = hypernetwork.generate(dict(model[NETWORK]), middle, state.served)
        memory = {**memory, EMBEDDINGS: {EMBEDDINGS: ordered}}
        return replace(state, model=model, served=served, memory=memory, scalars=scalars)


def embeddings(state: ServerState) -> Mapping[str, Any]:
    """The embeddings of the devices that have taken part."""
    return state.memory.get(EMBEDDINGS, {}).get(EMBEDDINGS, {})


def embedding_of(state: ServerState, device: str) -> Any:
    """v [E] of a device; if it never took part, its initial one, drawn from its name and the fleet's first weights."""
    from fleet_core.model import hypernetwork

    known = embeddings(state).get(device)
    if known is not None:
        return known
    seed = int(state.scalars[FINGERPRINT]), zlib.crc32(device.encode())
    return hypernetwork.embedding(int(state.scalars["embedding"]), seed)
