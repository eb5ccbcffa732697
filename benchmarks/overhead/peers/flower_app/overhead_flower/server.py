"""Federated averaging as a ServerApp, without evaluation; notes when each round ends."""

import os
import time
from collections.abc import Iterable

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Timed(FedAvg):
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        found = super().aggregate_train(server_round, replies)
        with open(os.environ["OVERHEAD_ENDS"], "a") as ends:
            print(time.time(), file=ends)
        return found


@app.main()
def main(grid: Grid, context: Context) -> None:
    devices, rounds = int(context.run_config["devices"]), int(context.run_config["rounds"])
    strategy = Timed(
        fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=devices, min_available_nodes=devices
    )
    strategy.start(grid, ArrayRecord([np.zeros(794_762, np.float32)]), num_rounds=rounds)
