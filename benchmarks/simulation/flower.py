"""The workload on Flower's Ray simulation; ``run`` starts it under the Python that Flower is installed for.

    python -m benchmarks.simulation.flower WORKLOAD ROUNDS      prints every round's end, Unix seconds

In the most favourable way found: one float32 array down and up, no evaluation, one processor and one torch thread for a
client, the model and the samples made once in each of Ray's processes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.simulation.loop import MODELS, train
from benchmarks.simulation.workload import LR, WORKLOADS

client, server = ClientApp(), ServerApp()


@cache
def made(name: str) -> Any:
    torch.set_num_threads(1)
    return MODELS[WORKLOADS[name].model]()


@cache
def samples(name: str, device: int) -> Any:
    return tuple(map(torch.tensor, WORKLOADS[name].data(device)))


@client.train()
def train_client(message: Message, context: Context) -> Message:
    name = os.environ["SIMULATED"]
    workload, model = WORKLOADS[name], made(name)
    (weights,) = message.content["arrays"].to_numpy_ndarrays()
    vector_to_parameters(torch.tensor(weights), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), LR)
    x, y = samples(name, int(context.node_config["partition-id"]))
    train(model, optimizer, x, y, workload.batch, workload.local_steps)
    after = parameters_to_vector(model.parameters()).detach().numpy()
    content = RecordDict({"arrays": ArrayRecord([after]), "metrics": MetricRecord({"num-examples": len(y)})})
    return Message(content=content, reply_to=message)


class Timed(FedAvg):
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        kept = list(replies)
        found = super().aggregate_train(server_round, kept)
        if len(kept) < WORKLOADS[os.environ["SIMULATED"]].clients or any(reply.has_error() for reply in kept):
            raise SystemExit("a client has failed")
        print("end", time.time(), flush=True)
        return found


@server.main()
def main(grid: Grid, context: Context) -> None:
    workload = WORKLOADS[os.environ["SIMULATED"]]
    strategy = Timed(
        fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=workload.clients,
        min_available_nodes=workload.clients,
    )
    size = sum(parameter.numel() for parameter in MODELS[workload.model]().parameters())
    strategy.start(grid, ArrayRecord([np.zeros(size, np.float32)]), num_rounds=int(os.environ["SIMULATED_ROUNDS"]))


def simulate(name: str, rounds: str) -> None:
    os.environ["SIMULATED"], os.environ["SIMULATED_ROUNDS"] = name, rounds
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, WORKLOADS[name].clients, backend_config=resources)


if __name__ == "__main__":
    from benchmarks.simulation import flower  # Ray's processes find the app in a module of its own name

    flower.simulate(*sys.argv[1:])
