"""The encoder of a fleet's own model as a frozen backbone for other fleets."""

from __future__ import annotations

from export.backbones.from_onnx import AS_IT_IS, of_model
from export.int8_encoder import with_weights
from fleet_core.backbone.backbone_file import BackboneFile
from fleet_core.base import trees
from fleet_core.base.errors import ConfigError
from fleet_core.base.trees import Params
from fleet_core.model.graph_bundle import Graph


def of_encoder(graph: Graph, params: Params, name: str) -> BackboneFile:
    """params: of the group ``body``, float32; other groups are left out. The graph's own preprocessing is kept. Raises
    ConfigError for a model without an encoder, or a model that has a backbone itself."""
    body = trees.only({**graph.first, **params}, ("body",))
    if not body or "embed" not in graph.graphs or graph.layout.backbone is not None:
        raise ConfigError("has no encoder of raw samples", where=name, hint="take a fleet with another model")
    return of_model(with_weights(graph.graphs["embed"], body), AS_IT_IS, None, name, name)
