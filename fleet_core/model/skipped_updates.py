"""Small updates are skipped: computes the norm below which a device sends a note instead.

The measure is the mean norm of the updates of the last ``WINDOW`` rounds, as the aggregator decoded them; a skipped one
counts as zero. It falls as a fleet converges, so that no update stays unsent forever, and it falls when many devices
skip, so that rounds do not stay without updates for long. The aggregator computes it from the last checkpoint and signs
the norm for all devices of a round. A skipped update counts as zero; its device keeps it as residual.

Chen, Giannakis, Sun, Yin, "LAG: Lazily Aggregated Gradient for Communication-Efficient Distributed Learning", NeurIPS
2018, eq. 7a: a device need not send what is small compared with the recent moves of the model. There the server uses
the device's last gradient again; here the device's dual or residual takes that place. Their measure is the norm of the
mean update. If devices differ, it is far below the norm of each device's update, and hardly any would be skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean

from fleet_core.algorithms.interface import Update
from fleet_core.codecs.kinds.registry import NOTHING
from fleet_core.model import payloads

WINDOW = 5
"""Rounds. With one, half of the devices skip every other round at a share of 1, and PFLDyn diverges."""
FACT = "update_norms"
"""The key of the mean norms of the last rounds, the newest last, in a checkpoint's facts."""


def is_note(codec: str) -> bool:
    """Whether this codec is that of the note of a device that sends no update."""
    return codec == NOTHING.name


def least_norm(share: float, facts: Mapping[str, str]) -> float:
    """The norm below which updates are not sent in the round after the checkpoint with these facts; 0: all are sent."""
    norms = _norms(facts)
    return share * fmean(norms) if share and norms else 0.0


class Measured(Iterable[Update]):
    """Passes on a round's ``updates`` unchanged and notes the norm of each, unless ``share`` is 0."""

    def __init__(self, updates: Iterable[Update], share: float):
        self._updates, self._share = updates, share
        self._norms: dict[str, float] = {}

    def __iter__(self) -> Iterator[Update]:
        for update in self._updates:
            if self._share:
                self._norms[update.device] = payloads.norm(update.payload.groups)
            yield update

    def facts(self, before: Mapping[str, str]) -> dict[str, str]:
        """The checkpoint's facts after the round, with the same bits for any order of the updates."""
        kept = {key: value for key, value in before.items() if key != FACT}
        if not self._norms:
            return kept
        return kept | {FACT: " ".join(map(repr, [*_norms(before), fmean(self._norms.values())][-WINDOW:]))}


def _norms(facts: Mapping[str, str]) -> list[float]:
    return [float(text) for text in facts.get(FACT, "").split()]
