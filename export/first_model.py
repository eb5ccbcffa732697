"""What a fleet starts from: the layout of its model, the gated graphs, and the first weights. Needs torch, once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from export.graph import export_graph
from export.method_steps import with_steps
from fleet_core.algorithms.interface import Method
from fleet_core.learning import models
from fleet_core.model import graph_bundle
from fleet_core.model.layout import InputSpec


def first(
    model: str, spec: InputSpec, classes: tuple[str, ...], options: Mapping[str, Any], *, head: bool, seed: int,
    method: Method | None = None, hyper: Any = None, say: Callable[[str], None] = lambda line: None,
) -> tuple[bytes, bytes]:  # fmt: skip
    """(graph bundle, weights) as bytes. head: the method's answers come from the model's own head. method, hyper: whose
    gradient steps devices without torch are to make, none without. say: what is under way, and what cannot be exported.

    Raises ConfigError for a model that cannot be built or lacks what the method trains, BundleError for graphs that
    fail their check.
    """
    started = time.monotonic()
    layout = models.describe(model, spec, classes, options)
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
