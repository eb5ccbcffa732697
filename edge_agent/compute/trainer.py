"""The trainer of the engine torch: the only process on a device that loads it."""

from __future__ import annotations

import sys

import torch

from edge_agent.compute.training_jobs import Order, TrainingJobs, serve_jobs, threads_of
from edge_agent.compute.worker import Inline
from fleet_core.learning import models
from fleet_core.learning.local_training import TorchEngine


class TrainerJobs(TrainingJobs):
    """Keeps the model of the last job, so that a round costs its steps alone."""

    def __init__(self) -> None:
        super().__init__()
        self._models: dict[str, torch.nn.Module] = {}

    def engine(self, order: Order) -> TorchEngine:
        layout = order.layout
        if layout.hash not in self._models:
            self._models = {layout.hash: models.build(layout)}
        return TorchEngine(self._models[layout.hash])


class InlineTrainer(Inline):
    """The trainer in the caller's process, with ``threads`` threads."""

    def __init__(self, threads: int = 1, workshop: TrainerJobs | None = None) -> None:
        torch.set_num_threads(threads)
        super().__init__((workshop or TrainerJobs()).handle)


def main(arguments: list[str]) -> int:
    torch.set_num_threads(threads_of(arguments))
    return serve_jobs(TrainerJobs())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
