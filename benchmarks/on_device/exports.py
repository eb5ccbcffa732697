"""Every method on every model family: what becomes a graph that passes the export gate, and the message if not.

    python -m benchmarks.on_device.exports --out benchmarks/on_device/exports.json [--only METHOD]

Runs the export of ``metafleet init``, at the sizes of the papers; steps that move the same groups are exported once for
all methods that take them. With ``--only`` the other methods' rows of the file stay.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from cloud_server.results.result import environment
from export import method_steps
from export.adapt_graph import with_adapt
from export.graph import export_graph
from fleet_core.algorithms.interface import Method
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.errors import BundleError
from fleet_core.base.storage import write_json
from fleet_core.learning import models
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import InputSpec

IMAGE = InputSpec((1, 28, 28), "uint8", 1 / 255)
OWN = "metafleet_benchmark_own:build"
FAMILIES: Mapping[str, tuple[str, InputSpec, dict[str, Any]]] = {
    "mlp": ("mlp", IMAGE, {}),
    "logistic": ("logistic", IMAGE, {}),
    "lenet": ("lenet", IMAGE, {}),
    "lenet-lim": ("lenet-lim", InputSpec((3, 32, 32), "uint8", 1 / 255), {}),
    "conv4": ("conv4", IMAGE, {}),
    "cnn1d": ("cnn1d", InputSpec((2, 128)), {}),
    "char-lstm": ("char-lstm", InputSpec((80,), "int64"), {}),
    "own": (OWN, InputSpec((3, 28, 28)), {}),
}
CLASSES = tuple("abcde")


class PersonalFiles(nn.Module):
    """A user's own model with ordinary layers: a residual block, a strided convolution, LayerNorm, GELU."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.block = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.down, self.norm = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.LayerNorm(16)
        self.head = nn.Linear(16, classes)

    def embed(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.first(x))
        x = nn.functional.silu(self.down(x + self.block(x)))
        z: Tensor = self.norm(x.mean((2, 3)))
        return z


def bring_own() -> None:
    """Makes ``OWN`` importable, like a user's installed package."""
    module = types.ModuleType(OWN.partition(":")[0])
    module.__dict__["build"] = lambda shape, classes: PersonalFiles(classes)
    sys.modules[module.__name__] = module


def family(name: str, say: Callable[[str], None], methods: Iterable[Method]) -> dict[str, Any]:
    """method -> what became a graph, for one model family."""
    model, spec, options = FAMILIES[name]
    layout, started = models.describe(model, spec, CLASSES, options), time.monotonic()
    seconds: dict[str, float] = {}
    graph = export_graph(layout, kinds=("embed", "predict"))
    seconds["embed, predict"] = round(time.monotonic() - started, 1)
    found: dict[str, Any] = {"parameters": layout.parameters(("body", "head")), "methods": {}}
    made: dict[Any, Graph | BundleError] = {}

    def once(graph_: Graph, *, rates: bool, groups: tuple[str, ...]) -> Graph:
        key = (groups, rates)
        if key not in made:
            begun = time.monotonic()
            try:
                made[key] = with_adapt(graph_, rates=rates, groups=groups)
            except BundleError as error:
                made[key] = error
            label = f"adapt: {', '.join(groups)}{' with rates' if rates else ''}"
            seconds[label] = round(time.monotonic() - begun, 1)
        one = made[key]
        if isinstance(one, BundleError):
            raise one
        return one

    with patch.object(method_steps, with_adapt.__name__, once):
        for method in methods:
            said: list[str] = []
            whole = method_steps.with_steps(graph, method, method.hyper(), models.initial(layout, 0), said.append)
            how = whole.info.adapt
            found["methods"][method.name] = {
                "graphs": [*method.graphs, *(["adapt"] if whole.adapt else [])],
                "steps": [] if how is None else list(how.groups), "rates": how is not None and how.rates,
                "said": [line for line in said if not line.startswith("exporting")],
            }  # fmt: skip
    say(f"{name}: {seconds}")
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=METHODS)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bring_own()
    methods = METHODS.values() if asked.only is None else [METHODS[asked.only]]
    found = {name: family(name, print, methods) for name in FAMILIES}
    if asked.only is not None:
        held = json.loads(asked.out.read_text(encoding="utf-8"))
        for name, made in found.items():
            held["families"][name]["methods"] |= made["methods"]
        return write_json(asked.out, held)
    return write_json(asked.out, {"environment": environment(), "families": found})


if __name__ == "__main__":
    main(sys.argv[1:])
