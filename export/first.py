"""What a fleet starts from: the layout of its model, the gated graphs, and the first weights. Needs torch, once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export.graph import export_graph
from fleet_core import bundle
from fleet_core.layout import InputSpec
from fleet_core.learning import models


def first(
    model: str, spec: InputSpec, classes: tuple[str, ...], options: Mapping[str, Any], *, head: bool, seed: int
) -> tuple[bytes, bytes]:
    """(graph bundle, weights) as bytes. head: the method's answers come from the model's own head.

    Raises ConfigError for a model that cannot be built, BundleError for graphs that fail their check.
    """
    layout = models.describe(model, spec, classes, options)
    graph = export_graph(layout, kinds=("embed", "predict") if head else ("embed",), seed=seed)
    return bundle.pack(graph), bundle.weights_bytes(models.initial(layout, seed))
