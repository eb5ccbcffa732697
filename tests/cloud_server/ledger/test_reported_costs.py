"""What reports add to the ledger: joules with spreads and reasons, CPU seconds, memory, connected seconds and bytes
sent again; and reports of agents of the version before."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cloud_server.ledger import folded_tables
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import VERSION, Device, Energy, Flops, Traffic, Usage
from cloud_server.ledger.reported_costs import ReportedCosts
from fleet_core.base.error_bounds import Spread
from fleet_core.base.errors import MessageError
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
    costs = ReportedCosts(ledger)
    for joules in (4.0, 10.0, 10.0):
        costs.report("d0", reported(joules))
    costs.report("d0", reported(11.0, round_number=2))
    assert (train(ledger).joules, train(ledger).low, train(ledger).high) == (10.0, 5.0, 20.0)
    assert (train(ledger, 2).joules, train(ledger, 2).low, train(ledger, 2).high) == (1.0, 0.5, 2.0)


def test_measured_joules_have_no_spread(ledger: Ledger) -> None:
    ReportedCosts(ledger).report("d0", reported(4.0, None))
    assert (train(ledger).measured, train(ledger).low, train(ledger).high) == (True, None, None)


def test_an_agent_that_begins_to_model_within_a_round_makes_its_sum_modelled(ledger: Ledger) -> None:
    costs = ReportedCosts(ledger)
    costs.report("d0", reported(4.0, None))
    costs.report("d0", reported(10.0))
    row = train(ledger)
    assert (row.measured, row.joules, row.low, row.high) == (False, 10.0, 4.0 + 3.0, 4.0 + 12.0)


def test_a_report_of_an_agent_of_the_version_before_has_joules_without_a_spread(ledger: Ledger) -> None:
    costs = ReportedCosts(ledger)
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
    costs = ReportedCosts(ledger)
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


def usage_report(number: int, boot: str = "one", **figures: Any) -> Report:
    traffic = {key: figures.pop(key) for key in ("connected_s", "retransmitted") if key in figures}
    return Report(round=number, boot=boot, traffic=device_messages.Traffic(10, 10, **traffic), **figures)


def test_a_round_gets_the_difference_and_the_largest_peak(ledger: Ledger) -> None:
    costs = ReportedCosts(ledger)
    costs.report("d0", usage_report(1, cpu_s=2.0, peak_mib=80.0, connected_s=10.0, retransmitted=5))
    costs.report("d0", usage_report(1, cpu_s=3.0, peak_mib=90.0, connected_s=15.0, retransmitted=5))
    costs.report("d0", usage_report(2, cpu_s=7.0, peak_mib=90.0, connected_s=40.0, retransmitted=25))
    costs.report("d0", usage_report(2, boot="two", cpu_s=1.0, peak_mib=70.0, connected_s=1.0, retransmitted=0))
    assert ledger.rows(Usage) == [
        Usage(round=1, device="d0", cpu_s=3.0, peak_mib=90.0, connected_s=15.0, retransmitted_bytes=5),
        Usage(round=2, device="d0", cpu_s=5.0, peak_mib=90.0, connected_s=26.0, retransmitted_bytes=20),
    ]
    assert ledger.usage() == {"d0": {"cpu_s": 8.0, "connected_s": 41.0, "retransmitted_bytes": 25, "peak_mib": 90.0}}


def test_a_report_that_comes_twice_adds_nothing(ledger: Ledger) -> None:
    costs = ReportedCosts(ledger)
    for _ in range(3):
        costs.report("d0", usage_report(1, cpu_s=2.0, connected_s=10.0))
    assert ledger.rows(Usage) == [Usage(round=1, device="d0", cpu_s=2.0, connected_s=10.0)]


def test_a_report_of_an_older_agent_is_read_and_leaves_no_row(ledger: Ledger) -> None:
    old = b'{"round":1,"boot":"one","traffic":{"mqtt_up":5,"mqtt_down":6,"payload":{}},"flops":3.0}'
    ReportedCosts(ledger).report("d0", messages.decode(Report, old))
    assert ledger.rows(Usage) == []
    assert [row.mqtt_bytes for row in ledger.rows(Traffic)] == [6, 5]
    assert [row.flops for row in ledger.rows(Flops)] == [3.0]


def test_figures_that_a_device_does_not_have_are_not_in_its_report() -> None:
    text = messages.encode(usage_report(1))
    for key in (b"cpu_s", b"peak_mib", b"connected_s", b"retransmitted"):
        assert key not in text


def test_a_ledger_of_the_version_before_gets_the_table(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    with Ledger(path) as made:
        made.put(Device(name="d0"))
    with closing(sqlite3.connect(path)) as old:
        old.executescript("".join(f"DROP TABLE {n};" for n in re.findall(r"CREATE TABLE (\w+)", folded_tables.SCHEMA)))
        old.executescript("""
            DROP TABLE usage; DROP TABLE codecs; DROP TABLE absent_energy; ALTER TABLE energy DROP COLUMN low;
            ALTER TABLE energy DROP COLUMN high; ALTER TABLE updates DROP COLUMN skipped; DROP TABLE arrays;
            DROP TABLE privacy; DROP TABLE task_evaluations;
            ALTER TABLE evaluations DROP COLUMN gaps;
            PRAGMA user_version = 5;""")
    with Ledger(path) as opened:
        opened.put(Usage(round=1, device="d0", cpu_s=1.0))
        assert opened.device("d0") is not None
        assert opened._pragma("user_version") == VERSION
