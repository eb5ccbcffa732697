"""The jobs of the engine onnx: gradients by the fleet's graph ``train``, in the agent's own process."""

from __future__ import annotations

import numpy as np

from edge_agent.compute.onnx_session import open_function, open_kind
from edge_agent.compute.training_jobs import Order, TrainingJobs
from fleet_core.base import storage
from fleet_core.base.errors import BundleError
from fleet_core.base.trees import Params
from fleet_core.model import graph_bundle, train_graph
from fleet_core.training.graph_engine import Array, GraphEngine, Opened, check_golden


class GraphJobs(TrainingJobs):
    """Keeps the graph of the last job open."""

    def __init__(self, threads: int = 1) -> None:
        super().__init__()
        self._threads = threads
        self._engines: dict[str, GraphEngine] = {}

    def engine(self, order: Order) -> GraphEngine:
        """Raises BundleError for a graph that is not the layout's, does not open here or fails its golden check."""
        if order.steps not in self._engines:
            self._engines = {}
            self._engines[order.steps] = self._opened(order)
        return self._engines[order.steps]

    def _opened(self, order: Order) -> GraphEngine:
        path = order.home.graph_path(order.steps, "steps")
        graph = train_graph.unpack(storage.read_bytes(path, limit=graph_bundle.MAX_BYTES), order.layout)
        functions = {
            kind: open_function(data, threads=self._threads, flushed=True) for kind, data in graph.graphs.items()
        }

        def embed(params: Params, x: Array) -> Array:
            bundle = graph_bundle.read(order.home.graph_path(order.graph))
            if bundle.layout.hash != graph.layout.hash:
                raise BundleError(f"the graph has layout {bundle.layout.hash}", expected=graph.layout.hash)
            return np.asarray(open_kind(bundle, "embed", params, threads=self._threads).run(x))

        opened = Opened(graph, functions, embed)
        check_golden(opened)
        return GraphEngine(opened)
