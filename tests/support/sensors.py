"""Devices with sources: folders with a model of windows, and what a source made."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent import Device
from edge_agent.inference.service import Service
from edge_agent.sources import run_sources
from edge_agent.sources.interface import Feed, Item
from export.graph import export_graph
from fleet_core.board.device_settings import settings_of
from fleet_core.data.live import Taken
from fleet_core.learning import models
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import InputSpec
from tests.support import homes

WINDOWS = InputSpec((2, 8))
CLASSES = ("a", "b", "c")


@cache
def graph_of(spec: InputSpec) -> Graph:
    layout = models.describe("mlp", spec, CLASSES, {"hidden": [4]})
    return export_graph(layout, kinds=("embed", "predict"))


def home(folder: Path, toml: str, spec: InputSpec = WINDOWS) -> tuple[Path, Service]:
    """A device's folder with these tables in device.toml, and the first weights of a model of ``spec``."""
    made = homes.home(folder, toml=toml)
    graph = graph_of(spec)
    service = homes.service_with_model(made, "fedavg", graph=graph, params=models.initial(graph.layout, 1))
    return made, service


def read_all(feed: Feed, tries: int = 400) -> list[Item]:
    """What a feed gives until it ends."""
    found: list[Item] = []
    for _ in range(tries):
        items = feed.read(0.05)
        if items is None:
            return found
        found += items
    raise AssertionError(f"the feed does not end: {found[-3:]}")


def made_of(place: Path, items: list[Item], spec: InputSpec = WINDOWS) -> list[Taken]:
    """The samples that the first source of device.toml makes of ``items``, and then ends."""
    settings = settings_of(place)
    maker = run_sources.Maker(settings.source[0], settings, spec)
    made = [*maker.made(items), *maker.made(None)]
    return [one for one in made if isinstance(one, Taken)]


def bits(samples: list[Taken]) -> bytes:
    return np.stack([one.x for one in samples]).tobytes() if samples else b""


def stored(place: Path) -> np.ndarray[Any, Any]:
    """The unlabelled samples of a device, in the order of time."""
    found = sorted(Device(place).unlabelled(limit=1000), key=lambda one: one.id)
    return np.stack([one.x for one in found]) if found else np.empty(0)
