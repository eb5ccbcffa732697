"""Makes what a fleet starts from: its model's layout, checked graphs and first weights. Needs torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from export.graph import export_graph
from export.method_steps import with_steps
from export.train_graph import export_train
from fleet_core.algorithms.interface import Method
from fleet_core.base.errors import BundleError
from fleet_core.base.trees import Params
from fleet_core.learning import models
from fleet_core.model import graph_bundle, train_graph
from fleet_core.model.layout import Backbone, InputSpec, Layout
from fleet_core.tasks.task import Task


def first(
    model: str, spec: InputSpec, classes: tuple[str, ...], options: Mapping[str, Any], *, head: bool, seed: int,
    method: Method | None = None, hyper: Any = None, say: Callable[[str], None] = lambda line: None,
    backbone: Backbone | None = None, task: Task | None = None,
) -> tuple[bytes, bytes]:  # fmt: skip
    """(graph bundle, weights) as bytes. head: the method answers with the model's head. method, hyper: their gradient
    steps are exported; None for none. backbone: makes the input ``spec`` of raw samples. task: what the model answers
    instead of ``classes``.
    say: called with the current step, and with what cannot be exported.

    Raises ConfigError if the model cannot be built or lacks groups that the method trains, BundleError if a graph fails
    its check.
    """
    started = time.monotonic()
    layout = replace(models.describe(model, spec, classes, options, task), backbone=backbone)
    if method is not None:
        models.check_groups(method, layout)
    kinds = ("embed", "predict") if head else ("embed",)
    say(f"exporting {model}: {', '.join(kinds)} …")
    graph = export_graph(layout, kinds=kinds, seed=seed)
    weights = models.initial(layout, seed)
    if method is not None:
        graph = with_steps(graph, method, hyper, weights, say)
    say(f"made and checked in {time.monotonic() - started:.1f} s")
    return graph_bundle.pack(graph), graph_bundle.weights_bytes(weights)


def train_graph_of(
    layout: Layout, method: Method, hyper: Any, initial: Params, *, seed: int,
    say: Callable[[str], None] = lambda line: None,
) -> bytes:
    """The graph with which devices train without torch, as bytes; empty if there is none: ``say`` gets the reason."""
    started = time.monotonic()
    say(f"exporting {layout.model}: train …")
    try:
        graph = export_train(layout, method, hyper, initial, seed)
    except BundleError as error:
        say(f"{error.what}: {error.hint}")
        return b""
    say(f"made and compared with torch in {time.monotonic() - started:.1f} s")
    return train_graph.pack(graph)
