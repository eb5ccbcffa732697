"""Gets the fleet's graph and backbone from the disk or the broker, and refuses a graph or backbone that fails its
check.

The graph is held in memory until it is whole. The backbone may be large: its chunks are written to the disk as they
come, and those of an earlier start are not fetched again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_agent.connection.blob_download import Fetcher
from edge_agent.device.local_samples import features_of
from edge_agent.device.state import DeviceState
from edge_agent.inference.service import Service
from edge_agent.updates.partial_file import PartialFile
from fleet_core.base.errors import BundleError, MessageError
from fleet_core.model import graph_bundle
from fleet_core.model.layout import Layout
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import Manifest

AGAIN = "see this device's log"


class Graphs:
    """``installed()`` is called once a graph, or its backbone, is in use. providers: as in ``Features.named``."""

    def __init__(
        self, home: DeviceState, service: Service, fetcher: Fetcher, installed: Callable[[], None],
        log: Callable[[str], None], providers: Sequence[str] = (),
    ):
        self._home, self._service, self._fetcher, self._installed = home, service, fetcher, installed
        self._log, self._providers = log, providers
        self._bad = ""
        self._backbone = ""  # id of the backbone that was found here and runs
        self._partial: PartialFile | None = None

    def want(self, manifest: Manifest, blob: Blob) -> None:
        """Installs the manifest's graph from the disk, or fetches it. Raises BundleError."""
        if blob.id == self._bad:
            raise BundleError("the fleet's graph failed its check here", hint=AGAIN)
        data = self._home.graph(blob)
        if data is None:
            self._fetcher.start(blob, graph_bundle.MAX_BYTES, "graph")
        else:
            self._install(manifest, blob.id, data)

    def take(self, manifest: Manifest, blob_id: str, data: bytes) -> None:
        """Installs a fetched graph. Raises BundleError for a graph that is not the manifest's."""
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

    # The backbone -----------------------------------------------------------------------------------------------------

    def complete(self, layout: Layout) -> bool:
        """Whether the layout has no backbone, or its backbone is here and runs."""
        return layout.backbone is None or layout.backbone.id == self._backbone

    def want_backbone(self, manifest: Manifest, layout: Layout) -> None:
        """Opens the layout's backbone, or fetches it. Raises FleetError."""
        from fleet_core.backbone import backbone_file  # not loaded by a device whose model takes raw samples

        features, blob = features_of(self._home.folder, layout), manifest.backbone
        if features is None:
            return
        if self._bad == features.backbone.id:
            raise BundleError("the fleet's backbone failed its check here", hint=AGAIN)
        if features.path.exists():
            return self._open(layout)
        if blob is None:
            raise MessageError("the model needs a backbone, and there is none", where=f"round {manifest.round}")
        if self._fetcher.target != blob.id:
            blob.check(backbone_file.MAX_BYTES)
            self._close()
            self._partial = PartialFile(features.path.with_suffix(".partial"), blob)
            while not self._partial.look():
                pass
            if self._partial.complete:
                return self.take_backbone(layout)
            self._fetcher.into(self._partial, "graph")

    def take_backbone(self, layout: Layout) -> None:
        """Opens a fetched backbone. Raises FleetError."""
        features, partial = features_of(self._home.folder, layout), self._partial
        if features is not None and partial is not None:
            partial.finish(features.path)
            self._partial = None
            self._open(layout)

    def _open(self, layout: Layout) -> None:
        """Checks the backbone's golden features, and chooses what computes it."""
        from fleet_core.backbone.features import measured

        features = features_of(self._home.folder, layout, self._providers)
        assert features is not None
        try:
            choice = measured(features)
        except BundleError:
            self._bad = features.backbone.id
            features.path.unlink(missing_ok=True)
            raise
        self._backbone = features.backbone.id
        speed = choice.seconds.get(choice.provider)
        self._log(f"backbone {features.backbone.name}: {choice.provider}"
                  + (f", {speed * 1000:.3g} ms a sample" if speed else ""))
        self._installed()

    def _close(self) -> None:
        if self._partial is not None:
            self._partial.close()
            self._partial = None
