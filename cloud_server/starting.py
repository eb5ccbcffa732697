"""What a fleet is made from when a person gives data and not a file: named sets, and a fleet.toml that fits them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleet_core import config, schema
from fleet_core.algorithms.methods import METHODS
from fleet_core.data import heartbeat
from fleet_core.data.samples import Samples, load
from fleet_core.errors import ConfigError, DataError


def samples_of(data: str) -> Samples:
    """The named set, or the file. Raises DataError."""
    return heartbeat.load_heartbeat() if data == "heartbeat" else load(Path(data))


def fleet_toml(
    samples: Samples, name: str, method: str, model: str | None, *, rounds: int, seed: int, **fleet: Any
) -> str:
    """fleet.toml for samples like these; hyper-parameters are written out, so that a person sees what there is."""
    if method not in METHODS:
        near = schema.suggest(method, METHODS)
        raise ConfigError(f"unknown method '{method}'" + (f" (did you mean '{near}'?)" if near else ""),
                          expected=", ".join(METHODS), hint="metafleet methods")
    if samples.classes is None:
        raise DataError("the samples name no classes", hint="add an array 'classes' to the file")
    shape = samples.x.shape[1:]
    chosen = model or {2: "cnn1d", 3: "lenet"}.get(len(shape), "mlp")
    scale = 1 / 255 if samples.x.dtype.name == "uint8" else 1.0
    hyper = METHODS[method].hyper()
    return config.toml({
        "fleet": {"name": name, "method": method, "rounds": rounds, "seed": seed, **fleet},
        "model": {"name": chosen, "classes": list(samples.classes),
                  "input": {"shape": list(shape), "dtype": samples.x.dtype.name, "scale": scale}},
        "link": {"up": "int8", "down": "int8"},
        "hyper": schema.plain(hyper),
    })
