"""What was chosen for each round of a ledger: codecs and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cloud_server.figures.scores import AMOUNT
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import RoundArrays, RoundCodec


@dataclass(frozen=True, kw_only=True)
class ChosenCodec:
    """As ``ledger_tables.RoundCodec``; reason: empty for a codec that is set."""

    codec: str
    reason: str = ""
    left: float | None = field(default=None, metadata=AMOUNT)


@dataclass(frozen=True, kw_only=True)
class TrainedArrays:
    """As ``ledger_tables.RoundArrays``."""

    frozen: tuple[str, ...] = ()
    reason: str = ""
    moves: Mapping[str, float] = field(default_factory=dict, metadata=AMOUNT)


def codecs(ledger: Ledger, within: range | None = None) -> dict[int, dict[str, ChosenCodec]]:
    """Round -> way -> codec."""
    found: dict[int, dict[str, ChosenCodec]] = {}
    for one in ledger.each(RoundCodec, within):
        found.setdefault(one.round, {})[one.way] = ChosenCodec(codec=one.codec, reason=one.reason, left=one.left_out)
    return found


def arrays(ledger: Ledger, within: range | None = None) -> dict[int, TrainedArrays]:
    """By round; none of those that train the whole model and could train no part."""
    return {
        row.round: TrainedArrays(frozen=row.frozen, reason=row.reason, moves=row.moves)
        for row in ledger.each(RoundArrays, within)
    }
