"""The bill: costs by device, cost against accuracy, a month of it, and that absent figures stay absent."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloud_server.commands import cli
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_sums import Bytes
from cloud_server.ledger.ledger_tables import Device, Energy, Evaluation, Flops, Round, Traffic, Update, Usage
from cloud_server.records.tariff import Tariff
from cloud_server.reports import cost_tables
from cloud_server.reports.html_costs import Pricing
from cloud_server.reports.html_report import render
from cloud_server.results import bill, result
from tests.support.paths import ROOT

EXAMPLE = Tariff("EUR", "an example", per_mb=0.5, monthly_fee=1.0, included_mb=20, per_kwh=0.3, battery_wh=10)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        yield opened


def fill(ledger: Ledger, rounds: int = 2, *, wire: bool = True, joules: tuple[str, ...] = ("a", "b")) -> None:
    """Two devices; in each round 1 MB up and 2 MB down of payload, 1.1 and 2.2 MB on the wire, 30 J, 5 FLOP."""
    ledger.put(Device(name="a", took_part=True), Device(name="b", took_part=True), Device(name="silent"))
    for number in range(1, rounds + 1):
        ledger.put(Round(round=number, opened_at=1.0, cohort=("a", "b"), status="closed"))
        for name in ("a", "b"):
            at: dict[str, Any] = {"round": number, "device": name}
            ledger.put(
                Update(**at, update_id=name, received_at=1.0),
                Traffic(**at, direction="up", kind="update", payload_bytes=1_000_000),
                Traffic(**at, direction="down", kind="model", payload_bytes=2_000_000),
                Traffic(**at, direction="up", kind="link", mqtt_bytes=1_050_000,
                        wire_bytes=1_100_000 if wire else None),
                Traffic(**at, direction="down", kind="link", mqtt_bytes=2_100_000,
                        wire_bytes=2_200_000 if wire else None),
                Flops(**at, flops=5.0),
                Evaluation(**at, stage="before", method="m", confusion=((1, 1), (1, 1)), accuracy=0.5, macro_f1=0.5),
                Evaluation(**at, stage="after", method="m", confusion=((2, 0), (0, 2)), accuracy=1.0, macro_f1=1.0),
            )
            if name in joules:
                ledger.put(Energy(**at, phase="train", joules=30.0, source="RAPL", measured=True),
                           Energy(**at, phase="idle", joules=99.0, source="RAPL", measured=True))


def built(ledger: Ledger) -> result.Result:
    return result.parse(result.to_json(result.build(ledger, method="fedavg", seed=0, config={})))


def test_every_device_has_its_bytes_by_kind_its_operations_joules_and_rounds(ledger: Ledger) -> None:
    fill(ledger)
    a, _, silent = built(ledger).costs
    assert (a.device, a.rounds, a.flops) == ("a", 2, 10.0)
    assert a.payload_bytes == Bytes(up=2_000_000, down=4_000_000)
    assert a.wire_bytes == Bytes(up=2_200_000, down=4_400_000)
    assert a.kinds == {"update": Bytes(up=2_000_000, down=0), "model": Bytes(up=0, down=4_000_000)}
    assert a.energy_j is not None
    assert (a.energy_j.value, a.energy_j.source) == (60.0, "measured: RAPL")
    assert (silent.rounds, silent.payload_bytes, silent.flops, silent.energy_j, silent.kinds) == (0, *[None] * 4)


def test_the_result_leaves_absent_figures_out_and_older_results_have_no_costs(ledger: Ledger) -> None:
    fill(ledger, wire=False, joules=())
    made = result.to_json(result.build(ledger, method="fedavg", seed=0, config={}))
    assert set(made["costs"][0]) == {"device", "new", "rounds", "payload_bytes", "mqtt_bytes", "kinds", "flops"}
    assert set(made["costs"][2]) == {"device", "new", "rounds"}
    assert result.validate(made) == []
    del made["costs"]
    assert result.parse(made).costs == ()
    assert "Costs by device" not in render(made, title="an older one")


def test_a_month_is_the_average_round_times_the_months_rounds(ledger: Ledger) -> None:
    fill(ledger)
    a, b, fleet = bill.months(built(ledger), 2, EXAMPLE)
    rounds = 2 * 30
    assert (a.counter, a.up, a.down) == ("wire", 1_100_000 * rounds, 2_200_000 * rounds)
    assert a.joules == 30 * rounds
    assert a.battery_days == pytest.approx(10 * 3600 / (30 * 2))
    assert a.data == pytest.approx((3.3 * rounds - 20) * 0.5)
    assert a.energy == pytest.approx(30 * rounds / 3.6e6 * 0.3)
    assert a.data is not None
    assert a.energy is not None
    assert a.money == pytest.approx(1.0 + a.data + a.energy)
    assert (b.up, fleet.device, fleet.up) == (a.up, None, 2 * 1_100_000 * rounds)
    assert fleet.money == pytest.approx(2 * (1.0 + a.data + a.energy))
    assert fleet.battery_days == a.battery_days


def test_a_sum_of_money_that_lacks_a_priced_part_is_absent(ledger: Ledger) -> None:
    fill(ledger, joules=("a",))
    a, b, fleet = bill.months(built(ledger), 1, EXAMPLE)
    assert a.money is not None
    assert b.data is not None
    assert (b.joules, b.battery_days, b.energy, b.money) == (None,) * 4
    assert (fleet.joules, fleet.energy, fleet.money) == (None,) * 3
    assert bill.months(built(ledger), 1, None)[0].money is None
    assert bill.months(built(ledger), 1, None, battery_wh=5)[0].battery_days is not None


def test_what_lacks_reports_is_not_billed_by_that_counter(ledger: Ledger) -> None:
    fill(ledger)
    ledger.put(Traffic(round=2, device="a", direction="down", kind="link", mqtt_bytes=1, wire_bytes=None),
               Traffic(round=2, device="a", direction="up", kind="link", mqtt_bytes=1, wire_bytes=None))
    a, b, fleet = bill.months(built(ledger), 1, EXAMPLE)
    assert (a.counter, b.counter) == ("MQTT", "wire")
    assert (fleet.counter, fleet.up) == (None, None)


def test_cost_against_accuracy_is_a_running_sum_that_ends_where_a_figure_is_missing(ledger: Ledger) -> None:
    fill(ledger, rounds=3)
    first, second, third = bill.reached(built(ledger))
    assert (first.payload_bytes, second.payload_bytes, third.payload_bytes) == (6_000_000, 12_000_000, 18_000_000)
    assert (first.accuracy, first.joules, third.flops) == (1.0, 60.0, 30.0)
    ledger._query("DELETE FROM energy WHERE round = 2")
    assert [one.joules for one in bill.reached(built(ledger))] == [60.0, None, None]


def test_cpu_seconds_memory_and_connection_are_of_those_that_report_them(ledger: Ledger) -> None:
    fill(ledger)
    for number in (1, 2):
        ledger.put(Usage(round=number, device="a", cpu_s=2.0, peak_mib=90.0 + number, connected_s=30.0,
                         retransmitted_bytes=10))
    a, b, _ = built(ledger).costs
    assert (a.cpu_s, a.peak_mib, a.connected_s, a.retransmitted_bytes) == (4.0, 92.0, 60.0, 20)
    assert (b.cpu_s, b.peak_mib, b.connected_s, b.retransmitted_bytes) == (None,) * 4
    _, (first, second, _, fleet) = cost_tables.device_table(built(ledger))
    assert first[7:11] == ("4.0 s", "92 MiB", "1 min 00 s", "20 B")
    assert second[7:11] == fleet[7:11] == ("—",) * 4
    ledger.put(Usage(round=2, device="b", cpu_s=1.0, peak_mib=80.0))
    assert cost_tables.device_table(built(ledger))[1][-1][7:11] == ("5.0 s", "92 MiB", "—", "—")


def test_tables_show_a_dash_for_what_is_absent(ledger: Ledger) -> None:
    fill(ledger, wire=False, joules=())
    heads, rows = cost_tables.device_table(built(ledger))
    assert heads[0] == "device"
    assert rows[0] == ("a", "2", "2.00 MB / 4.00 MB", "2.10 MB / 4.20 MB", "—", "10.0 FLOP", *["—"] * 5,
                       "0.500 → 1.000")
    assert rows[2] == ("silent", "0", *["—"] * 10)
    assert rows[3][0] == "fleet"


def test_the_report_has_the_bill_and_with_a_pace_the_month(ledger: Ledger) -> None:
    fill(ledger)
    made = result.to_json(built(ledger))
    page = render(made, title="t", pricing=Pricing(EXAMPLE, 2))
    for words in ("Costs by device", "2.00 MB / 4.00 MB", "Accuracy against payload bytes", "Costs per month",
                  "sum EUR"):
        assert words in page
    assert "Costs per month" not in render(made, title="t")


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["metafleet", "costs", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        assert not ended.value.code, shown.err
        return shown.out

    return run


def test_the_command_shows_a_finished_fleet_as_text_csv_and_json(
    finished: Path, tmp_path: Path, costs: Callable[..., str]
) -> None:
    fleet = shutil.copytree(finished / "fleet", tmp_path / "fleet")
    shutil.copy(ROOT / "docs" / "tariffs" / "example-mains.toml", fleet / "tariff.toml")
    text = costs(fleet, "--per-month", 24)
    assert "d0" in text
    assert "sum EUR" in text
    facts = json.loads(costs(fleet, "--json", "--per-month", 24))
    lines = list(csv.DictReader(costs(fleet, "--csv", "--per-month", 24).splitlines()))
    assert [line["device"] for line in lines] == [one["device"] for one in facts["devices"]] == ["d0", "d1"]
    for line, one in zip(lines, facts["devices"], strict=True):
        assert int(line["payload_up"]) == one["payload_bytes"]["up"]
        assert line["joules"] == line["wire_up"] == "", "in one process there is neither a meter nor a wire"
    assert facts["months"][-1].get("money") is None, "electricity has a price, and no joules were measured"
    assert facts["months"][0]["data"] >= 0
