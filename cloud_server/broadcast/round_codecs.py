"""The codecs of a fleet's rounds: chosen when a round opens, kept in the ledger with the reason and what they left out.

The choice for a round depends only on the closed rounds before it, so that a round that is reopened after a restart has
the same codecs.
"""

from __future__ import annotations

from dataclasses import replace

from cloud_server.broadcast.models_down import moved
from cloud_server.broadcast.open_round import OpenRound
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import RoundCodec
from cloud_server.records.fleet_folder import Fleet
from fleet_core.algorithms.interface import ServerState
from fleet_core.model import choose_codec
from fleet_core.model.choose_codec import AUTO, WAYS, Choice, Past


class RoundCodecs:
    """Chooses one fleet's codecs."""

    def __init__(self, fleet: Fleet, ledger: Ledger):
        self._wanted = {"up": fleet.codec_up, "down": fleet.codec_down}
        self._method, self._keeps, self._ledger = fleet.method, fleet.method.client.keeps, ledger

    def of_round(self, number: int) -> dict[str, Choice]:
        """Way (up, down) -> the codec of round ``number``."""
        return {
            way: choose_codec.next_choice(way, wanted, self._keeps, self._past(way, number) if wanted == AUTO else ())
            for way, wanted in self._wanted.items()
        }

    def _past(self, way: str, number: int) -> list[Past]:
        within = range(max(1, number - choose_codec.LOOK_BACK), number)
        losses = {row.round: row.loss for row in self._ledger.rounds("closed", within)}
        rows = self._ledger.rows(RoundCodec, within, way=way)
        return [Past(row.codec, losses[row.round], row.left_out) for row in rows if row.round in losses]

    def accepted(self, preferred: str | None = None) -> tuple[str, ...]:
        """The codecs of updates that a manifest lists: the preferred one, then larger ones for agents that lack it."""
        codecs = choose_codec.possible("up", self._wanted["up"], self._keeps)
        return codecs[codecs.index(preferred)::-1] if preferred in codecs else codecs

    def begin(self, opened: OpenRound) -> None:
        """Writes the rows of a round whose ``Round`` is in the ledger."""
        self._ledger.put(*(
            RoundCodec(round=opened.number, way=way, codec=one.codec, reason=one.reason,
                       left_out=opened.left if way == "down" else None)
            for way, one in opened.codecs.items()
        ))

    def close(self, opened: OpenRound, after: ServerState) -> None:
        """Adds how much the counted updates left out, as their devices report it. after: the state after the round."""
        row = self._ledger.rows(RoundCodec, round=opened.number, way=WAYS[0])[0]
        norms = (manifest.residual for manifest in opened.received.values())
        left = choose_codec.backlog(norms, moved(self._method, after, opened.published))
        self._ledger.put(replace(row, left_out=left))
