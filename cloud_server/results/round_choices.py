"""What was chosen for each round of a ledger: codecs, arrays and privacy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cloud_server.figures.scores import AMOUNT
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import RoundArrays, RoundCodec, RoundPrivacy


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


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """As ``ledger_tables.RoundPrivacy``."""

    mode: str
    clip: float = field(metadata=AMOUNT)
    noise: float = field(metadata=AMOUNT)
    delta: float = field(metadata=AMOUNT)
    epsilon: float = field(metadata=AMOUNT)
    spent: float = field(metadata=AMOUNT)
    most: int = field(metadata=AMOUNT)


def privacy(ledger: Ledger, within: range | None = None) -> dict[int, Privacy]:
    """Round -> its privacy, for rounds with private updates."""
    return {
        row.round: Privacy(mode=row.mode, clip=row.clip, noise=row.noise, delta=row.delta, epsilon=row.epsilon,
                           spent=row.spent, most=row.most)
        for row in ledger.each(RoundPrivacy, within)
    }


def codecs(ledger: Ledger, within: range | None = None) -> dict[int, dict[str, ChosenCodec]]:
    """Round -> way -> codec."""
    found: dict[int, dict[str, ChosenCodec]] = {}
    for one in ledger.each(RoundCodec, within):
        found.setdefault(one.round, {})[one.way] = ChosenCodec(codec=one.codec, reason=one.reason, left=one.left_out)
    return found


def arrays(ledger: Ledger, within: range | None = None) -> dict[int, TrainedArrays]:
    """Round -> its arrays, without rounds that could only train the whole model."""
    return {
        row.round: TrainedArrays(frozen=row.frozen, reason=row.reason, moves=row.moves)
        for row in ledger.each(RoundArrays, within)
    }
