"""The rounds of a ledger that are kept only as sums (``ledger.fold_rounds``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from cloud_server.figures.scores import AMOUNT
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_sums import FOLDED, Bytes, Joules


@dataclass(frozen=True, kw_only=True)
class FoldedSums:
    """Rounds ``first`` to ``last``, which are kept only as sums. closed: how many of them closed. Figures as in
    ``RoundFigures``, summed over the rounds; seconds and models_transmitted over those that have the figure."""

    first: int = field(metadata={"min": 0})
    last: int = field(metadata={"min": 0})
    closed: int = field(metadata=AMOUNT)
    participants: int = field(metadata=AMOUNT)
    skipped: int = field(default=0, metadata=AMOUNT)
    refused: int = field(default=0, metadata=AMOUNT)
    seconds: float | None = field(default=None, metadata=AMOUNT)
    models_transmitted: float | None = field(default=None, metadata=AMOUNT)
    payload_bytes: Bytes | None = None
    mqtt_bytes: Bytes | None = None
    wire_bytes: Bytes | None = None
    flops: float | None = field(default=None, metadata=AMOUNT)
    energy_j: Joules | None = None

    @property
    def text(self) -> str:
        return f"rounds {self.first} to {self.last} were folded into sums"


def of_ledger(ledger: Ledger) -> FoldedSums | None:
    """The rounds of which the ledger has only sums."""
    found, volume = ledger.folded(), ledger.volume(within=FOLDED).get(None)
    if found is None:
        return None
    operations = ledger.flops(FOLDED, by="device")
    return FoldedSums(
        **vars(found), payload_bytes=volume.payload if volume else None, mqtt_bytes=volume.mqtt if volume else None,
        wire_bytes=volume.wire if volume else None, flops=sum(operations.values()) if operations else None,
        energy_j=ledger.joules(within=FOLDED).get(None),
    )  # fmt: skip
