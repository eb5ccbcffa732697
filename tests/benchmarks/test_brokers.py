"""The page of brokers shows what was measured, and the command finds every feature of a broker that has them all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import markdown
from benchmarks.brokers import run
from tests.support.brokers import NEEDS_MOSQUITTO, private_broker
from tests.support.paths import ROOT

RESULT = ROOT / "benchmarks" / "brokers" / "result.json"


def test_the_page_has_the_table_of_the_result() -> None:
    page = (ROOT / "docs" / "brokers.md").read_text(encoding="utf-8")
    assert markdown.filled(page, {"brokers": run.page_table(json.loads(RESULT.read_text()))}) == page


def test_a_broker_that_refuses_a_version_has_a_row_that_says_so() -> None:
    cells = run.cells("b", "5", {"connects": "refused"})
    assert cells == ["b", "5", "refused", *[""] * (len(run.COLUMNS) - 1)]


@pytest.mark.parametrize(("changed", "word"), [
    ({}, "whole"), ({"rounds": 1}, "not whole"), ({"counted": 5}, "not whole"), ({"evaluated": False}, "not whole"),
])
def test_a_fleet_is_whole_only_with_all_rounds_updates_and_evaluations(changed: dict[str, Any], word: str) -> None:
    fleet = {"rounds": 2, "counted": 6, "evaluated": True, "seconds": 1.0, **changed}
    assert run.cells("b", "5", {"connects": "yes", "fleet": fleet})[-1].startswith(f"{word}: ")


@NEEDS_MOSQUITTO
@pytest.mark.slow
@pytest.mark.parametrize("version", run.VERSIONS)
def test_mosquitto_does_everything(tmp_path: Path, version: run.Version) -> None:
    with private_broker(tmp_path, "mosquitto") as broker:
        row = run.measure(broker.url, version, {})
    assert {row[column].split(";")[0] for column in run.COLUMNS[:6]} == {"yes"}
    assert row["burst"] == "300 of 300"
    assert run.cells("mosquitto", "5", row)[-1].startswith("whole: 2 rounds, 6 updates")
