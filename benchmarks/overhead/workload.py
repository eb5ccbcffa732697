"""The workload of the overhead benchmark: the model, the step and the samples; and our fleet for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.identity.create_fleet import create_fleet
from cloud_server.identity.device_folder import write_device_folder
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.fleet_settings import FleetConfig
from export.first_model import first, train_graph_of
from fleet_core.base import config
from fleet_core.base.trees import Params
from fleet_core.data.samples import Samples, save
from fleet_core.model.layout import InputSpec, Layout

CLASSES = tuple(map(str, range(10)))
PARAMETERS = 794_762
RAW_BYTES = PARAMETERS * 4
BATCH, STEP = 32, 0.01


@dataclass(frozen=True)
class Workload:
    """``devices`` as processes of one thread each; one step of batch 32 per round on the LeNet of Acar et al. with
    1×32×32 input and ten classes (794,762 float32 parameters), method fedavg, no evaluation."""

    devices: int = 8
    rounds: int = 20

    def raw_bytes(self) -> int:
        """All rounds' models, one way, as float32."""
        return self.rounds * self.devices * RAW_BYTES


def samples(device: int, count: int = 64) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A device's x float32 [count, 1, 32, 32] and y int64 [count]."""
    rng = np.random.default_rng(device)
    return rng.normal(size=(count, 1, 32, 32)).astype(np.float32), rng.integers(0, 10, count)


def make_fleet(folder: Path, workload: Workload, codec: str, url: str, engine: str = "torch") -> Fleet:
    """A fleet in ``folder``/fleet and its devices' homes in ``folder``/devices, which train with ``engine``."""
    text = config.toml({
        "fleet": {"name": "overhead", "method": "fedavg", "rounds": workload.rounds, "min_devices": workload.devices,
                  "serve_every": 1_000_000},
        "model": {"name": "lenet", "classes": list(CLASSES), "input": {"shape": [1, 32, 32]}},
        "link": {"up": codec, "down": codec},
        "hyper": {"local_steps": 1, "batch": BATCH, "client_lr": STEP},
    })
    fleet = create_fleet(folder / "fleet", text, _made, _steps if engine == "onnx" else None)
    for k in range(workload.devices):
        home = folder / "devices" / f"d{k}"
        write_device_folder(fleet, f"d{k}", home, url, train={"engine": engine})
        save(home / "samples.npz", Samples(*samples(k), classes=CLASSES))
    return fleet


def _made(settings: FleetConfig, head: bool) -> tuple[bytes, bytes]:
    return _exported(settings.model.input, head)


def _steps(fleet: Fleet, layout: Layout, first_weights: Params) -> bytes:
    """The graph with which devices train without torch."""
    return train_graph_of(layout, fleet.method, fleet.hyper, first_weights, seed=0, say=lambda line: None)


@cache
def _exported(spec: InputSpec, head: bool) -> tuple[bytes, bytes]:
    """Graph and first weights, the same for every codec."""
    return first("lenet", spec, CLASSES, {}, head=head, seed=0)
