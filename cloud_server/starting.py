"""What a fleet is made from when a person gives data and not a file: named sets, and a fleet.toml that fits them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cloud_server import catalog
from fleet_core import config, schema
from fleet_core.data.partitions import pool
from fleet_core.data.samples import Samples, load
from fleet_core.data.sets.named import load_set
from fleet_core.data.sets.registry import entries
from fleet_core.errors import DataError


def samples_of(data: str) -> Samples:
    """The named set, or the file. Raises DataError."""
    if data not in entries() or Path(data).exists():
        return load(Path(data))
    found = load_set(data)
    return pool(found.train, found.test)


def fleet_toml(
    samples: Samples, name: str, method: str, model: str | None, *, rounds: int, seed: int, **fleet: Any
) -> str:
    """fleet.toml for samples like these; hyper-parameters are written out, so that a person sees what there is."""
    hyper = catalog.named(method).hyper()
    if samples.classes is None:
        raise DataError("the samples name no classes", hint="add an array 'classes' to the file")
    shape = samples.x.shape[1:]
    tokens = samples.x.dtype.name == "int64"
    chosen = model or ("char-lstm" if tokens else {2: "cnn1d", 3: "lenet"}.get(len(shape), "mlp"))
    scale = 1 / 255 if samples.x.dtype.name == "uint8" else 1.0
    return config.toml({
        "fleet": {"name": name, "method": method, "rounds": rounds, "seed": seed, **fleet},
        "model": {"name": chosen, "classes": list(samples.classes),
                  "input": {"shape": list(shape), "dtype": samples.x.dtype.name, "scale": scale}},
        "link": {"up": "int8", "down": "int8"},
        "hyper": schema.plain(hyper),
    })
