"""Gets the fleet's graph from the disk or the broker and refuses one that fails its check."""

from __future__ import annotations

from collections.abc import Callable

from edge_agent.connection.blob_download import Fetcher
from edge_agent.device.state import DeviceState
from edge_agent.inference.service import Service
from fleet_core.base.errors import BundleError
from fleet_core.model import graph_bundle
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import Manifest


class Graphs:
    """``installed()`` is called once a graph is in use."""

    def __init__(self, home: DeviceState, service: Service, fetcher: Fetcher, installed: Callable[[], None]):
        self._home, self._service, self._fetcher, self._installed = home, service, fetcher, installed
        self._bad = ""

    def want(self, manifest: Manifest, blob: Blob) -> None:
        """Installs the manifest's graph from the disk, or fetches it. Raises BundleError."""
        if blob.id == self._bad:
            raise BundleError("the fleet's graph failed its check here", hint="see this device's log")
        data = self._home.graph(blob)
        if data is None:
            self._fetcher.start(blob, graph_bundle.MAX_BYTES, "graph")
        else:
            self._install(manifest, blob.id, data)

    def take(self, manifest: Manifest, blob_id: str, data: bytes) -> None:
        """Installs a fetched graph. Raises BundleError for one that is not the manifest's."""
        self._install(manifest, blob_id, data)
        self._home.save_graph(blob_id, data, keep=self._service.slots.graphs())

    def _install(self, manifest: Manifest, blob_id: str, data: bytes) -> None:
        self._bad = blob_id  # until it is installed
        graph = graph_bundle.unpack(data)
        if manifest.layout and graph.layout.hash != manifest.layout:
            raise BundleError(f"the graph has layout {graph.layout.hash}", expected=manifest.layout)
        self._service.install(blob_id, graph)
        self._bad = ""
        self._installed()
