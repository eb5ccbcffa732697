"""The trainer: the only process on a device that loads torch. Reads jobs on standard input, answers on standard output.

``train`` runs one round's local steps; ``adapt`` personalizes weights by gradient steps on the device's own samples.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_agent.local import LocalData
from edge_agent.worker import Done, Job, parse_frame, write_frame
from fleet_core import schema, storage
from fleet_core.algorithms.methods import METHODS
from fleet_core.algorithms.seam import Method, Payload
from fleet_core.data.samples import Samples
from fleet_core.errors import ConfigError, FleetError
from fleet_core.layout import Layout
from fleet_core.learning import models, train


class Workshop:
    """Keeps the model and the samples of the last job, so that a round costs its steps and nothing else."""

    def __init__(self) -> None:
        self._models: dict[str, torch.nn.Module] = {}
        self._data: dict[str, Samples] = {}

    def handle(self, job: Job) -> Done:
        """The job's result; whatever goes wrong with it is in ``error``, and the next job can come."""
        try:
            return self._handled(job)
        except FleetError as error:
            return Done(job.kind, {}, error=str(error))
        except Exception as error:
            return Done(job.kind, {}, error=f"{type(error).__name__}: {error}")

    def _handled(self, job: Job) -> Done:
        started_cpu = time.process_time()
        header, arrays = {"train": self._train, "adapt": self._adapt}[job.kind](job.header, job.arrays)
        cost = {"cpu_s": time.process_time() - started_cpu, "peak_mib": peak_mib()}
        return Done(job.kind, {**header, **cost}, arrays)

    def _train(self, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        method, hyper, layout, model, samples = self._setting(header)
        groups = storage.unflatten_roles(arrays)
        broadcast = Payload(groups.pop("broadcast"), header["scalars"])
        state = groups or method.client.init(broadcast.groups, hyper)
        result = train.train_round(
            method, model, layout, broadcast, state, samples.x, samples.y, hyper, np.random.default_rng(header["seed"])
        )
        out = storage.flatten_roles({"update": result.update.groups, **result.pending})
        return {
            "loss": result.loss, "samples": result.samples, "steps": result.steps, "flops": result.flops,
            "scalars": dict(result.update.scalars), "left_out": {str(k): v for k, v in result.left_out.items()},
        }, out

    def _adapt(self, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        method, hyper, layout, model, samples = self._setting(header)
        params = train.adapt(method, model, layout, storage.unflatten(arrays), samples.x, samples.y, hyper)
        return {"samples": len(samples)}, storage.flatten(params)

    def _setting(self, header: Mapping[str, Any]) -> tuple[Method, Any, Layout, torch.nn.Module, Samples]:
        method = METHODS[header["method"]]
        hyper, problems = schema.read(method.hyper, header["hyper"])
        if hyper is None:
            raise ConfigError("; ".join(map(str, problems)))
        layout = Layout.from_json(header["layout"])
        if layout.hash not in self._models:
            self._models = {layout.hash: models.build(layout)}
        data = header["data"]
        local = LocalData(Path(data["path"]), layout.classes, **data["split"])
        stamp = local.stamp()
        if stamp not in self._data:
            self._data = {stamp: local.own()}
        return method, hyper, layout, self._models[layout.hash], self._data[stamp]


class InlineTrainer:
    """The trainer in the caller's own process, which it sets to ``threads``: for a whole fleet in one process."""

    def __init__(self, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self._workshop = Workshop()
        self._done: Done | None = None

    @property
    def busy(self) -> bool:
        return self._done is not None

    def submit(self, job: Job) -> None:
        self._done = self._workshop.handle(job)

    def poll(self) -> Done | None:
        done, self._done = self._done, None
        return done

    def descriptors(self) -> tuple[int, ...]:
        return ()

    def stop(self) -> None:
        self._done = None


def peak_mib() -> float:
    """The most memory that this process has held; Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def main(arguments: list[str]) -> int:
    """The child's loop; ends when standard input does."""
    torch.set_num_threads(int(arguments[arguments.index("--threads") + 1]) if "--threads" in arguments else 1)
    workshop, buffer = Workshop(), bytearray()
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not mix with the frames
    while data := os.read(source.fileno(), 1 << 20):
        buffer += data
        while (frame := parse_frame(buffer)) is not None:
            header, arrays, used = frame
            del buffer[:used]
            done = workshop.handle(Job(header["kind"], header, arrays))
            with contextlib.suppress(BrokenPipeError):
                write_frame(sink, {**done.header, "error": done.error}, done.arrays)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
