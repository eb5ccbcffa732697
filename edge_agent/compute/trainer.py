"""The trainer of the engine torch: the only process on a device that loads it."""

from __future__ import annotations

import os
import sys

import torch

from edge_agent.compute.training_jobs import Order, TrainingJobs
from edge_agent.compute.worker import Inline, Job, parse_frame, write_result
from fleet_core.board import allocator
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
    """The child's loop: jobs on standard input, results on standard output; ends when standard input does."""
    allocator.keep_freed()
    torch.set_num_threads(int(arguments[arguments.index("--threads") + 1]) if "--threads" in arguments else 1)
    workshop, buffer = TrainerJobs(), bytearray()
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the frames
    while data := os.read(source.fileno(), 1 << 20):
        buffer += data
        while (frame := parse_frame(buffer)) is not None:
            header, _, used = frame
            del buffer[:used]
            write_result(sink, workshop.handle(Job(header["kind"], header)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
