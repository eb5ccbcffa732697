"""The workload on Flower's Ray simulation; ``run`` starts it with the Python that has Flower.

    python -m benchmarks.simulation.flower WORKLOAD ROUNDS FORM      prints every round's end, Unix seconds

No evaluation, one torch thread per client; each Ray process makes the samples once. FORM:

* ``favourable``, the most favourable found: one float32 array down and up, the model made once in each process, one
  processor per client.
* ``documented``, as in Flower's PyTorch quickstart: a state dict, loaded into a new model for every message, and the
  simulation's default of two processors per client.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from functools import cache
from typing import Any

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
    return MODELS[WORKLOADS[name].model](WORKLOADS[name].shape)


@cache
def samples(name: str, device: int) -> Any:
    return tuple(map(torch.tensor, WORKLOADS[name].data(device)))


@client.train()
def train_client(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    name, documented = os.environ["SIMULATED"], os.environ["SIMULATED_FORM"] == "documented"
    workload, arrays = WORKLOADS[name], message.content["arrays"]
    model = MODELS[workload.model](workload.shape) if documented else made(name)
    if documented:
        model.load_state_dict(arrays.to_torch_state_dict())
    else:
        vector_to_parameters(torch.tensor(arrays.to_numpy_ndarrays()[0]), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), LR)
    x, y = samples(name, int(context.node_config["partition-id"]))
    train(model, optimizer, x, y, workload.batch, workload.local_steps)
    content = RecordDict({"arrays": sent(model), "metrics": MetricRecord({"num-examples": len(y)})})
    return Message(content=content, reply_to=message)


def sent(model: torch.nn.Module) -> ArrayRecord:
    if os.environ["SIMULATED_FORM"] == "documented":
        return ArrayRecord(model.state_dict())
    return ArrayRecord([parameters_to_vector(model.parameters()).detach().numpy()])


class Timed(FedAvg):
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        kept = list(replies)
        found = super().aggregate_train(server_round, kept)
        if len(kept) < WORKLOADS[os.environ["SIMULATED"]].clients or any(reply.has_error() for reply in kept):
            raise SystemExit("a client failed")
        print("end", time.time(), flush=True)
        return found


@server.main()
def main(grid: Grid, context: Context) -> None:
    workload = WORKLOADS[os.environ["SIMULATED"]]
    strategy = Timed(
        fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=workload.clients,
        min_available_nodes=workload.clients,
    )
    strategy.start(grid, sent(MODELS[workload.model](workload.shape)), num_rounds=int(os.environ["SIMULATED_ROUNDS"]))


def simulate(name: str, rounds: str, form: str) -> None:
    os.environ |= {"SIMULATED": name, "SIMULATED_ROUNDS": rounds, "SIMULATED_FORM": form}
    one_each = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    settings = None if form == "documented" else one_each
    run_simulation(server, client, WORKLOADS[name].clients, backend_config=settings)


if __name__ == "__main__":
    from benchmarks.simulation import flower  # Ray's processes import the app by its module name

    flower.simulate(*sys.argv[1:])
