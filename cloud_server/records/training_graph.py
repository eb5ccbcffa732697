"""Reads ``train.safetensors`` in a fleet's folder: the graph with which devices train without torch."""

from __future__ import annotations

from pathlib import Path

from cloud_server.records.fleet_folder import Fleet
from fleet_core.base import storage
from fleet_core.base.errors import BundleError, StateError
from fleet_core.base.processes import typed
from fleet_core.model import train_graph
from fleet_core.model.graph_bundle import MAX_BYTES
from fleet_core.model.layout import Layout


def path_of(fleet: Fleet) -> Path:
    return fleet.folder / "train.safetensors"


def read(fleet: Fleet, layout: Layout) -> bytes | None:
    """The graph's bytes; None if the fleet has no graph for its method and hyper-parameters. Raises StateError if the
    file cannot be read."""
    path = path_of(fleet)
    if not path.exists():
        return None
    data = storage.read_bytes(path, limit=MAX_BYTES)
    try:
        info = train_graph.unpack(data, layout).info
    except BundleError as error:
        hint = f"delete it, then 'metafleet init {typed(fleet.folder)}' makes it again"
        raise StateError(error.what, where=str(path), expected=error.expected, hint=hint) from error
    return None if info.refuses(fleet.method.adaptation, fleet.hyper) else data
