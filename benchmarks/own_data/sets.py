"""The sets that models are compared on: generated series, named sets, and sets made from these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.own_data import series
from benchmarks.own_data.baseline import statistics
from cloud_server.laboratory.advise.recordings import recordings
from fleet_core.data.samples import Samples, save
from fleet_core.data.sets import set_cache
from fleet_core.data.sets.registry import entry

DEVICES = 10
SERIES = (*series.names(), "heartbeat", "har", "spoken-series")
IMAGES = ("mnist", "mnist-14", "spoken-image")
ROWS = ("har-rows", "heartbeat-rows", "vibration-free-rows", "event-free-rows")
SOURCES = {"har": "har", "har-rows": "har", "spoken-series": "spoken-digits", "spoken-image": "spoken-digits",
           "mnist": "mnist", "mnist-14": "mnist"}  # named sets that must be fetched
NO_NEW = {"evaluation": {"new_devices": 0.0}}  # four speakers are too few to set some aside


def is_here(name: str) -> bool:
    return name not in SOURCES or set_cache.is_here(entry(SOURCES[name]))


def sections(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The ``data``, ``partition`` and ``evaluation`` of an experiment on the set; files are made in ``folder``."""
    few = {"options": {"max_clients": DEVICES}}
    if name in ("heartbeat", "har"):
        return {"data": {"set": name}, "partition": few}
    if name in ("mnist", "mnist-14"):  # most writers wrote a few digits only
        data = {"set": name} if name == "mnist" else dict(_recorded(str(_file(name, folder))))
        return {"data": data, "partition": {"options": {**few["options"], "min_samples": 60}}}
    if name == "spoken-image":
        return {"data": {"set": "spoken-digits"}, **NO_NEW}
    found = {"data": dict(_recorded(str(_file(name, folder)))), "partition": few}
    return {**found, **NO_NEW} if name == "spoken-series" else found


@cache
def _recorded(path: str) -> Mapping[str, Any]:
    return recordings(path).section


def _file(name: str, folder: Path) -> Path:
    """The set as a user's file."""
    if name in series.names():
        return series.write(folder, name)
    path = folder / f"{name}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save(path, _derived(name))
    return path


def _derived(name: str) -> Samples:
    if name == "spoken-series":
        samples = set_cache.load_set("spoken-digits").train
        return replace(samples, x=samples.x[:, 0])
    if name == "mnist-14":
        samples = set_cache.load_set("mnist").train
        halved = samples.x.reshape(-1, 1, 14, 2, 14, 2).mean((3, 5))
        return replace(samples, x=halved.astype(np.uint8))
    kind = name.removesuffix("-rows")
    if kind in ("har", "heartbeat"):
        samples = set_cache.load_set(kind).train
    else:
        made = series.generated(kind)
        classes, y = np.unique(made["y"], return_inverse=True)
        samples = Samples(made["x"], y, made["client"], made["time"], tuple(classes.tolist()))
    return replace(samples, x=statistics(samples.x))
