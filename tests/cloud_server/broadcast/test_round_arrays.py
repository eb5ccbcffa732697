"""The arrays that rounds train by a schedule, chosen from the ledger."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cloud_server.broadcast.round_arrays import RoundArrays, sent_arrays
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Round
from cloud_server.ledger.ledger_tables import RoundArrays as Row
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.moving_arrays import EVERYTHING
from fleet_core.model.select_arrays import AUTO, TrainSection
from tests.support.simulation import toy_layout


def test_an_aggregator_that_restarts_after_rounds_were_folded_chooses_the_same_arrays(tmp_path: Path) -> None:
    layout, method = toy_layout(), METHODS["fedavg"]
    fleet: Any = SimpleNamespace(
        selected=lambda layout: EVERYTHING, config=SimpleNamespace(train=TrainSection(freeze=AUTO)), method=method)
    at_rest, *others = sent_arrays(layout, method)
    with Ledger(tmp_path / "ledger.db") as ledger:
        arrays = RoundArrays(fleet, layout, ledger)
        for number in range(1, 61):
            chosen = arrays.of_round(number)
            ledger.put(Round(round=number, opened_at=0.0, status="open"))
            opened: Any = SimpleNamespace(number=number, arrays=chosen)
            arrays.begin(opened)
            moves = dict.fromkeys(others, 1.0)
            if at_rest not in chosen.moving.frozen:
                moves[at_rest] = 1.0 if number < 10 else 0.01
            (row,) = ledger.rows(Row, round=number)
            ledger.put(Round(round=number, opened_at=0.0, status="closed", loss=1.0),
                       Row(round=number, frozen=row.frozen, reason=row.reason, moves=moves))
        wanted = arrays.of_round(61)
        assert at_rest in wanted.moving.frozen
        assert ledger.fold(50, step=1) is not None
        assert RoundArrays(fleet, layout, ledger).of_round(61) == wanted
