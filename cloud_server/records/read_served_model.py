"""Reads the served model of a fleet from its folder or a checkpoint, also while an aggregator runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cloud_server.records import checkpoint
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base import trees
from fleet_core.base.errors import CodecError, ConfigError, StateError
from fleet_core.base.processes import typed
from fleet_core.base.trees import Params
from fleet_core.model.layout import Layout

STATE, SERVED = "state", "served.safetensors"


def place_of(source: Path) -> tuple[Fleet, Path]:
    """(fleet, file of a served model). source: a fleet's folder, which gives the last served model, or a file in its
    folder ``state``. Raises ConfigError."""
    if source.is_dir():
        fleet, served = Fleet.load(source), source / STATE / SERVED
        if not served.exists():
            hint = f"metafleet server start {typed(source)}, or give a checkpoint of {typed(source / STATE)}"
            raise ConfigError("no model was evaluated here yet", where=str(source), hint=hint)
        return fleet, served
    if not source.is_file() or source.resolve().parent.name != STATE:
        expected = f"FLEET, or FLEET/{STATE}/round-….safetensors"
        raise ConfigError("is neither a fleet's folder nor a checkpoint of one", where=str(source), expected=expected)
    return Fleet.load(source.resolve().parent.parent), source


def served_model(fleet: Fleet, file: Path, layout: Layout) -> tuple[int, Params]:
    """(round, shared groups as float32) of the served model in ``file``. Raises StateError if the file is damaged or
    holds another model."""
    number, arrays = checkpoint.served(file)
    shared = fleet.method.shared
    wire = layout.extended(fleet.method.down, shared)
    params = wire.ordered(trees.apply(lambda a: np.asarray(a, np.float32), trees.only(arrays, shared)))
    try:
        wire.check(params, shared)
    except CodecError as error:
        raise StateError(f"is of another model: {error.what}", where=str(file), expected=error.expected) from error
    return number, params
