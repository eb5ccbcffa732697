"""The jobs of a trainer, whichever engine computes the gradients.

``train`` runs one round's local steps; ``adapt`` personalizes weights by gradient steps on the device's own samples.
"""

from __future__ import annotations

import os
import resource
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.compute import trained_update
from edge_agent.compute.worker import Done, Job
from edge_agent.device.local_samples import LocalData
from edge_agent.device.manifest_method import hyper_of, method_of, wire
from edge_agent.device.slots import Slots
from edge_agent.device.state import DeviceState, state_key
from fleet_core.algorithms.interface import ClientState, Method, Payload
from fleet_core.base import processes, schema, storage, trees
from fleet_core.base.errors import FleetError, MessageError, RoundError, StateError
from fleet_core.data.samples import Samples
from fleet_core.model.encoded_update import method_state
from fleet_core.model.layout import Layout
from fleet_core.power.sensors.cpu import process_peak_mib
from fleet_core.protocol.round_messages import Manifest
from fleet_core.training import local_round, personal_round, round_plans
from fleet_core.training.local_round import Engine, TrainResult
from fleet_core.training.round_plans import Participant


class TrainingJobs:
    """Does jobs with the gradients of ``engine``; keeps the samples of the last one."""

    def __init__(self) -> None:
        self._data: dict[str, Samples] = {}
        self._cancelled = False

    def cancel(self) -> None:
        """Ends the round in training, or the next one, after its present step."""
        self._cancelled = True

    def _progress(self, done: int, steps: int) -> None:
        if self._cancelled:
            raise RoundError(f"stopped after {done} of {steps} steps")

    def engine(self, order: Order) -> Engine:
        raise NotImplementedError

    def handle(self, job: Job) -> Done:
        """The job's result; a failure is in its ``error``."""
        try:
            return self._handled(job)
        except FleetError as error:
            return Done(job.kind, {"disk": storage.is_disk_error(error)}, error=str(error))
        except MemoryError:
            return Done(job.kind, {}, error="there is not enough memory for this round")
        except Exception as error:
            return Done(job.kind, {}, error=f"{type(error).__name__}: {str(error)[:500]}")

    def _handled(self, job: Job) -> Done:
        started_cpu = time.process_time()
        header, arrays = {"train": self._train, "adapt": self._adapt}[job.kind](Order.read(job.header))
        cost = {"cpu_s": time.process_time() - started_cpu, "peak_mib": peak_mib()}
        return Done(job.kind, {**header, **cost}, arrays)

    def _train(self, order: Order) -> tuple[dict[str, Any], dict[str, Any]]:
        """Trains one round; the update is left in the device's folder."""
        manifest, key = order.manifest, state_key(order.manifest)
        weights = order.weights("model", manifest.model.model)
        before = order.home.state(key) or {}
        broadcast = Payload(weights, manifest.scalars).beside(order.per_device())
        result = self.round(order, broadcast, method_state(before))
        trained_update.keep(
            order.home, order.boot, manifest, order.layout, result.update, result.pending, before,
            samples=result.samples, metrics={trained_update.LOSS: result.loss, **order.cut}, seed=order.seed,
        )
        return {
            "loss": result.loss, "samples": result.samples, "steps": result.steps, "flops": result.flops,
            "left_out": {str(k): v for k, v in result.left_out.items()},
        }, {}

    def round(self, order: Order, broadcast: Payload, state: ClientState) -> TrainResult:
        """The local steps of one round."""
        samples = self._samples(order)
        one = Participant(state, samples.x, samples.y, np.random.default_rng(order.seed))
        return local_round.train_one(
            self.engine(order), order.method, order.layout, broadcast, one, order.hyper, self._progress,
            moving=order.layout.moving(order.manifest.train),
        )

    def _adapt(self, order: Order) -> tuple[dict[str, Any], dict[str, Any]]:
        """The served weights after gradient steps."""
        serve = order.manifest.serve
        weights = order.served("" if serve is None else serve.model)
        samples = self._samples(order)
        scalars = {**order.manifest.scalars, "round": float(serve.round if serve else 1)}
        params = personal_round.adapt(
            self.engine(order), order.method, order.layout, weights, samples.x, samples.y, order.hyper,
            order.home.state(state_key(order.manifest)), scalars,
        )
        return {"samples": len(samples)}, storage.flatten(params)

    def _samples(self, order: Order) -> Samples:
        stamp = order.data.stamp()
        if stamp not in self._data:
            self._data = {stamp: order.data.own()}
            for note in self._data[stamp].notes:
                processes.say(note)
        return self._data[stamp]


@dataclass(frozen=True)
class Order:
    """The header of a job. boot: the start of the agent that sent it. seed: of everything random in the round.
    per_device_id: of the weights that this device alone received, or empty. graph, steps: ids of the fleet's graphs on
    the disk."""

    boot: str
    manifest: Manifest
    method: Method
    hyper: Any
    layout: Layout
    home: DeviceState
    data: LocalData
    seed: tuple[int, ...]
    per_device_id: str = ""
    graph: str = ""
    steps: str = ""

    @property
    def cut(self) -> dict[str, float]:
        """The batch sizes that the board's memory made smaller than the round's."""
        return round_plans.cut(hyper_of(self.method, self.manifest.method.hyper), self.hyper)

    @staticmethod
    def read(header: Mapping[str, Any]) -> Order:
        """Raises MessageError or ConfigError."""
        manifest, problems = schema.read(Manifest, header["manifest"], unknown="ignore")
        if manifest is None:
            raise MessageError("; ".join(map(str, problems)))
        method = method_of(manifest)
        hyper = round_plans.capped(hyper_of(method, manifest.method.hyper), header.get("max_batch"))
        layout, home = Layout.from_json(header["layout"]), DeviceState(Path(header["home"]))
        seed = int(manifest.scalars.get("seed", 0)), manifest.round, zlib.crc32(header["device"].encode())
        data = LocalData.of(home.folder, header["samples"], layout, header["split"])
        given, graph, steps = (str(header.get(key, "")) for key in ("given", "graph", "steps"))
        return Order(header["boot"], manifest, method, hyper, layout, home, data, seed, given, graph, steps)

    def per_device(self) -> trees.Params:
        """The weights that this device alone received; empty for most methods. Raises StateError when they are not on
        the disk."""
        return self.weights("given", self.per_device_id) if self.method.per_device else {}

    def served(self, model: str) -> trees.Params:
        """Raises StateError when the served model is not on the disk."""
        return self.weights(f"slots/{Slots(self.home).slot_of(model)}/serve", model)

    def weights(self, name: str, model: str) -> trees.Params:
        """Raises StateError when the weights ``name`` on disk are not ``model``."""
        held = self.home.weights(name)
        if held is None or held.model != model:
            raise StateError(f"the weights {model} are not here", where=str(self.home.folder))
        return wire(self.layout, self.method).ordered(held.params)


def peak_mib() -> float:
    """The most memory that this process has held. On Linux from /proc, because getrusage includes the peak of the
    process that started this one."""
    held = process_peak_mib(Path("/"), os.getpid())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20) if held is None else held
