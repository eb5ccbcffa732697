"""What reports of joules add to the ledger: spreads, reasons, and reports of agents of the version before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_server.records.ledger import Ledger
from cloud_server.records.ledger_tables import Device, Energy
from cloud_server.rounds.round_costs import RoundCosts
from fleet_core.base.errors import MessageError
from fleet_core.base.spread import Spread
from fleet_core.protocol import device_messages, messages
from fleet_core.protocol.device_messages import Report

OLD = {"round": 1, "boot": "x", "energy": [{"phase": "train", "joules": 4.0, "source": "model", "measured": False}]}


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.db") as books:
        books.put(Device(name="d0"))
        yield books


WIDE = Spread(0.5, 2.0)


def reported(joules: float, spread: Spread | None = WIDE, round_number: int = 1, *absent: str) -> Report:
    energy = device_messages.Energy("train", joules, "model" if spread else "RAPL", spread is None, spread)
    return Report(round=round_number, boot="x", energy=(energy,), absent_terms=absent)


def train(ledger: Ledger, round_number: int = 1) -> Energy:
    (row,) = ledger.rows(Energy, round=round_number, phase="train")
    return row


def test_a_round_gets_the_spread_of_what_it_added(ledger: Ledger) -> None:
    costs = RoundCosts(ledger, lambda: 0.0)
    for joules in (4.0, 10.0, 10.0):
        costs.report("d0", reported(joules))
    costs.report("d0", reported(11.0, round_number=2))
    assert (train(ledger).joules, train(ledger).low, train(ledger).high) == (10.0, 5.0, 20.0)
    assert (train(ledger, 2).joules, train(ledger, 2).low, train(ledger, 2).high) == (1.0, 0.5, 2.0)


def test_measured_joules_have_no_spread(ledger: Ledger) -> None:
    RoundCosts(ledger, lambda: 0.0).report("d0", reported(4.0, None))
    assert (train(ledger).measured, train(ledger).low, train(ledger).high) == (True, None, None)


def test_an_agent_that_begins_to_model_within_a_round_makes_its_sum_modelled(ledger: Ledger) -> None:
    costs = RoundCosts(ledger, lambda: 0.0)
    costs.report("d0", reported(4.0, None))
    costs.report("d0", reported(10.0))
    row = train(ledger)
    assert (row.measured, row.joules, row.low, row.high) == (False, 10.0, 4.0 + 3.0, 4.0 + 12.0)


def test_a_report_of_an_agent_of_the_version_before_has_joules_without_a_spread(ledger: Ledger) -> None:
    costs = RoundCosts(ledger, lambda: 0.0)
    costs.report("d0", messages.decode(Report, json.dumps(OLD).encode()))
    assert (train(ledger).joules, train(ledger).low) == (4.0, None)
    costs.report("d0", reported(10.0))
    assert (train(ledger).joules, train(ledger).low) == (10.0, None), "a part of the round has none"


def test_a_report_keeps_the_keys_that_the_version_before_reads() -> None:
    sent = json.loads(messages.encode(reported(4.0, WIDE, 1, "radio: none")))
    assert OLD.items() <= {**sent, "energy": [{k: v for k, v in sent["energy"][0].items() if k != "spread"}]}.items()
    assert sent["energy"][0]["spread"] == {"low": 0.5, "high": 2.0}
    assert sent["absent_terms"] == ["radio: none"]


def test_the_reasons_are_those_of_the_last_report_that_speaks_of_joules(ledger: Ledger) -> None:
    costs = RoundCosts(ledger, lambda: 0.0)
    costs.report("d0", reported(4.0, WIDE, 1, "radio: none", "compute: none"))
    costs.report("d0", Report(round=1, boot="x", want="chunks"))
    assert set(ledger.absent_energy()[None]) == {"radio: none", "compute: none"}
    costs.report("d0", reported(5.0, WIDE, 1, "radio: none"))
    assert set(ledger.absent_energy()[None]) == {"radio: none"}


@pytest.mark.parametrize("spread", ['{"low":2,"high":3}', '{"low":0.5,"high":0.9}', '{"low":-1,"high":2}', '"wide"'])
def test_an_impossible_spread_is_refused(spread: str) -> None:
    data = json.dumps(OLD).replace('"measured": false', f'"measured": false, "spread": {spread}')
    with pytest.raises(MessageError, match="spread"):
        messages.decode(Report, data.encode())
