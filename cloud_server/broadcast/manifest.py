"""The manifest: the signed message that opens a round, or says that none is open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

from cloud_server.broadcast.models_down import ModelsDown
from cloud_server.broadcast.open_round import OpenRound
from cloud_server.broadcast.round_codecs import RoundCodecs
from cloud_server.broadcast.served_model import ServedModels
from cloud_server.broker.publisher import Publisher
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Update
from cloud_server.records.checkpoint import Checkpoint
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.fleet_settings import FleetConfig
from fleet_core.base import schema
from fleet_core.base.trees import Params
from fleet_core.model.layout import Layout
from fleet_core.privacy.secure_collector import Collector
from fleet_core.protocol import cohort, messages, round_messages
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import (
    Cohort,
    Counted,
    Manifest,
    MethodRef,
    ModelRef,
    PrivacyRules,
    UploadRules,
)

WHOLE_IN_ALL = 6 << 20
"""Bytes of whole updates that may be on their way to the aggregator at once; granted chunks have the same limit."""
EXPIRY_MS = 30 * 24 * 3600 * 1000
COUNTED_ROUNDS = 1
"""A manifest says which updates this many last rounds counted. The number is small because every device receives every
manifest; a device that was away longer asks for the fate of its update."""
LISTED_IDS = 64
SEQ = "seq"
"""Fact of the ledger: the sequence number of the newest manifest."""


def privacy_rules(config: FleetConfig) -> PrivacyRules | None:
    """How devices clip their updates and add noise to them; None if updates are not private."""
    private = config.privacy
    return PrivacyRules(private.mode, private.clip, private.noise_multiplier) if private.on else None


class Manifests:
    """Builds, signs and publishes one fleet's manifests.

    sign(body): with the fleet's key. graph: the graph bundle's bytes. steps: those of the graph ``train``, if there is
    one. backbone: the file of the layout's backbone, if it has one. layout: of the model.
    max_upload_bytes: of the largest update. now: Unix seconds. resting(): devices that are not asked today. packed():
    what every device that is on can read (``messages.encode``). ``seq``: the newest manifest's sequence number.
    """

    def __init__(
        self, fleet: Fleet, models: ModelsDown, served: ServedModels, ledger: Ledger, publisher: Publisher,
        codecs: RoundCodecs, *,
        sign: Callable[[bytes], bytes], graph: bytes, steps: bytes | None, layout: Layout, max_upload_bytes: int,
        now: Callable[[], float],
        backbone: bytes | None = None,
        resting: Callable[[], Collection[str]] = tuple, packed: Callable[[], int] = lambda: messages.PLAIN,
    ):
        self._config, self._method, self._codecs = fleet.config, fleet.method, codecs
        self._hyper, self._sign = schema.plain(fleet.hyper), sign
        self._models, self._served, self._ledger, self._publisher = models, served, ledger, publisher
        self._graph, self._steps, self._layout = graph, steps, layout
        chunk = fleet.config.link.chunk_bytes
        self._backbone = None if backbone is None else (Blob.of(backbone, chunk), backbone)
        self._max_upload_bytes, self._now = max_upload_bytes, now
        self._resting, self._packed = resting, packed
        self._again: Callable[[], None] = lambda: None
        self._went_packed = messages.PLAIN
        self.seq = int(ledger.fact(SEQ) or "0")

    def open_round(self, opened: OpenRound, after: Checkpoint) -> None:
        """Announces the open round, which follows ``after``."""
        chosen = cohort.announce(self._config.fleet.seed, opened.number, list(opened.cohort), self._resting())
        codecs = self._codecs.accepted(opened.codecs["up"].codec)
        self._publish(
            after, opened.number, chosen, opened.model, opened.scalars, opened.per_device, codecs, opened.least_norm,
            is_open=True, secure=opened.secure, links={link.blob.id for link in opened.chain.links},
            train=self._layout.places(opened.arrays.moving), devices=len(opened.cohort),
        )
        self._again = partial(self.open_round, opened, after)

    def no_round(self, after: Checkpoint) -> None:
        """Announces what was counted and which model is served, and asks no device to train."""
        if after.round:
            if self._served.reference is None:
                self._served.serve(after)
            assert self._served.reference is not None
            self._publish(after, after.round, Cohort(devices=()), self._served.reference, {}, {},
                          self._codecs.accepted(), 0.0, is_open=False)
            self._again = partial(self.no_round, after)

    def unpack(self) -> None:
        """Publishes the manifest again in an older form, if a device that has connected cannot read the present one."""
        if self._packed() < self._went_packed:
            self._again()

    def again(self) -> None:
        """Publishes the last manifest again, with a new signature."""
        self._again()

    def _publish(
        self, after: Checkpoint, number: int, chosen: Cohort, model: ModelRef, scalars: Mapping[str, float],
        per_device: Mapping[str, Params], codecs: tuple[str, ...], least_norm: float, *, is_open: bool,
        secure: Collector | None = None, links: Collection[str] = (), train: str | None = None, devices: int = 0,
    ) -> None:
        fleet, link = self._config.fleet, self._config.link
        listed, own = self._models.publish_per_device(per_device)
        graph = self._models.blob(self._graph)
        manifest = Manifest(
            v=messages.PROTOCOL,
            fleet=fleet.name,
            round=number,
            seq=self._next_seq(),
            exp=int(self._now() * 1000) + EXPIRY_MS,
            deadline_s=fleet.deadline_s,
            method=MethodRef(self._method.name, self._method.version, self._hyper),
            cohort=chosen,
            model=model,
            graph=graph,
            serve=self._served.reference,
            layout=self._layout.hash,
            scalars={**scalars, "round": float(number), "seed": float(fleet.seed)},
            dual_epoch=after.state.dual_epoch,
            counted=self._counted(after.round),
            up=UploadRules(
                self._max_upload_bytes, link.chunk_bytes, codecs, least_norm, privacy_rules(self._config),
                None if secure is None else secure.session.rules,
                min(link.chunk_bytes // 2, WHOLE_IN_ALL // devices) if devices else 0,
            ),
            open=is_open,
            per_device=listed,
            train=train,
            steps=None if self._steps is None else self._models.blob(self._steps),
            backbone=None if self._backbone is None else self._publisher.blob(*self._backbone),
        )
        keep = {blob.id for blob in manifest.blobs()} | own | {*links}
        self._went_packed = self._packed()
        self._publisher.manifest(self._sign(messages.encode(manifest, packed=self._went_packed)), keep)

    def _next_seq(self) -> int:
        """max(last + 1, Unix ms), stored in the ledger. Thus it rises even after a backup was restored."""
        self.seq = max(self.seq + 1, int(self._now() * 1000))
        self._ledger.set_facts(**{SEQ: str(self.seq)})
        return self.seq

    def _counted(self, closed: int) -> tuple[Counted, ...]:
        """Which updates the last closed rounds counted; devices ask for the fate of older ones."""
        records = []
        for number in range(max(1, closed - COUNTED_ROUNDS + 1), closed + 1):
            rows = self._ledger.rows(Update, round=number, status="counted")
            marks = tuple(round_messages.mark(number, u.device, u.update_id) for u in rows)
            if len(marks) <= LISTED_IDS:
                records.append(Counted(number, ids=marks))
            else:
                records.append(Counted(number, blob=self._models.blob("\n".join(marks).encode())))
        return tuple(records)
