"""result.json: its figures by hand, its schema, and what an interrupted run leaves out."""

from __future__ import annotations

import getpass
import io
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cloud_server.figures import scores
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device, Energy, Evaluation, Flops, Round, Traffic, Update
from cloud_server.reports.terminal_view import RECENT_ROUNDS, LiveView, Snapshot, snapshot
from cloud_server.results import result
from fleet_core.base.errors import DataError
from fleet_core.tasks.calibration import BINS

GOOD, FAIR, POOR = ((8, 0), (0, 2)), ((8, 0), (1, 1)), ((8, 0), (2, 0))


def confusions() -> st.SearchStrategy[list[list[int]]]:
    return st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 50), min_size=n, max_size=n), min_size=n, max_size=n)
    )


def fill(ledger: Ledger, *, energy: bool = True, evaluated: bool = True) -> None:
    """Three rounds, the last one open: devices a and b train, n is new."""
    ledger.put(Device(name="a", took_part=True), Device(name="b", took_part=True), Device(name="n", new=True))
    for number in (1, 2, 3):
        closed = number < 3
        with ledger.transaction():
            ledger.put(Round(round=number, opened_at=number, cohort=("a", "b"), status="closed" if closed else "open",
                             loss=1 / number if closed else None, seconds=2.0 if closed else None,
                             models_transmitted=4.0 if closed else None))  # fmt: skip
            for device in ("a", "b"):
                refused = (number, device) == (2, "b")
                at: dict[str, Any] = {"round": number, "device": device}
                ledger.put(
                    Update(**at, update_id=device, received_at=1.0, status="refused" if refused else "counted",
                           reason="NaN" if refused else ""),
                    Traffic(**at, direction="up", kind="update", payload_bytes=100, mqtt_bytes=120),
                    Traffic(**at, direction="down", kind="model", payload_bytes=200, mqtt_bytes=220),
                    Flops(**at, flops=1e6),
                )  # fmt: skip
                if energy:
                    ledger.put(Energy(**at, phase="train", joules=1.5, source="RAPL", measured=True))
    if evaluated:
        for device, confusion in (("a", GOOD), ("b", FAIR), ("n", POOR)):
            row = result.evaluation(2, device, "after", "pfldyn-proto", confusion, new=device == "n")
            assert row is not None
            ledger.put(row)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.db") as books:
        yield books


def build(ledger: Ledger, baseline: result.Baseline | None = None) -> dict[str, Any]:
    built = result.build(ledger, method="pfldyn-proto", seed=7, config={"rounds": 3, "data": None}, baseline=baseline)
    data = result.to_json(built)
    assert result.validate(data) == []
    assert result.parse(json.loads(json.dumps(data))) == built
    return data


def test_macro_f1_by_hand() -> None:
    confusion = [[8, 2, 0], [1, 3, 0], [0, 0, 0]]
    f1_first, f1_second = 2 * 8 / (10 + 9), 2 * 3 / (4 + 5)
    assert scores.macro_f1(confusion, classes_present_only=True) == pytest.approx((f1_first + f1_second) / 2)
    assert scores.macro_f1(confusion, classes_present_only=False) == pytest.approx((f1_first + f1_second) / 3)
    assert scores.confusion_accuracy(confusion) == pytest.approx(11 / 14)


def test_a_class_that_was_missed_counts_zero_in_both() -> None:
    assert scores.macro_f1(POOR, classes_present_only=True) == pytest.approx((16 / 18) / 2)
    assert scores.macro_f1(POOR, classes_present_only=False) == pytest.approx((16 / 18) / 2)


def test_a_class_that_is_only_answered_costs_its_victims_but_is_no_class_of_the_device() -> None:
    assert scores.macro_f1([[3, 1], [0, 0]], classes_present_only=True) == pytest.approx(6 / 7)


def test_no_samples_give_no_figure() -> None:
    assert scores.confusion_accuracy([[0, 0], [0, 0]]) is None
    assert scores.macro_f1([[0, 0], [0, 0]], classes_present_only=False) is None
    assert result.evaluation(1, "a", "after", "fedavg", [[0]]) is None


@given(confusions())
def test_figures_are_shares_and_over_the_classes_present_never_lower(confusion: list[list[int]]) -> None:
    accuracy = scores.confusion_accuracy(confusion)
    present, every = scores.macro_f1(confusion, True), scores.macro_f1(confusion, False)
    if sum(map(sum, confusion)) == 0:
        assert accuracy is present is every is None
    else:
        assert accuracy is not None
        assert present is not None
        assert every is not None
        assert 0 <= accuracy <= 1
        assert 0 <= every <= present + 1e-12 <= 1 + 2e-12


@pytest.mark.parametrize("confusion", [[[1, 2]], [1, 2], [[-1]], []])
def test_what_is_no_confusion_is_refused(confusion: Any) -> None:
    with pytest.raises(DataError, match="not a table of counts"):
        scores.confusion_accuracy(confusion)


def test_a_run_says_what_its_ledger_holds(ledger: Ledger) -> None:
    fill(ledger)
    data = build(ledger, {name: {"before": POOR, "fine_tuned": FAIR} for name in "abn"})
    assert (data["format"], data["method"], data["seed"], data["devices"]) == (1, "pfldyn-proto", 7, 2)
    assert [r["round"] for r in data["rounds"]] == [1, 2]
    second = data["rounds"][1]
    assert (second["participants"], second["refused"], second["models_transmitted"]) == (1, 1, 4.0)
    assert second["payload_bytes"] == {"up": 200, "down": 400}
    assert second["mqtt_bytes"] == {"up": 240, "down": 440}
    assert second["energy_j"]["value"] == 3.0
    assert second["energy_j"]["source"] == "measured: RAPL"
    assert second["flops"] == 2e6
    assert [p["device"] for p in data["personalization"] if p["new"]] == ["n"]
    assert data["personalization"][0]["before"]["method"] == "fedavg"


def test_the_curve_is_of_the_devices_that_train_and_the_evaluated_are_all(ledger: Ledger) -> None:
    fill(ledger)
    data = build(ledger)
    assert data["rounds"][1]["accuracy"] == pytest.approx({"mean": 0.95, "worst": 0.9, "best": 1.0})
    assert data["evaluated"]["accuracy"] == pytest.approx((10 + 9 + 8) / 30)
    assert data["evaluated"]["macro_f1"] == pytest.approx((2 * 24 / (24 + 27) + 2 * 3 / (6 + 3)) / 2)
    assert data["new_devices"]["accuracy"] == pytest.approx(0.8)


def test_the_calibration_error_is_of_all_answers_together_and_absent_if_a_device_does_not_tell(ledger: Ledger) -> None:
    """a is too sure in the bin in which b is as much too unsure: together they have no error."""
    fill(ledger)
    rows = {row.device: row for row in ledger.rows(Evaluation)}
    empty = (0.0,) * (BINS - 1)
    ledger.put(replace(rows["a"], gaps=(-1.5, *empty)), replace(rows["b"], gaps=(1.5, *empty)))
    data = build(ledger)
    assert [p.get("after", {}).get("calibration_error") for p in data["personalization"]] == [0.15, 0.15, None]
    assert data["rounds"][1]["calibration_error"] == 0.0, "of those that train"
    assert "calibration_error" not in data["evaluated"], "the new device does not tell"
    ledger.put(replace(rows["n"], gaps=(*empty, -3.0)))
    assert build(ledger)["evaluated"]["calibration_error"] == pytest.approx(0.1)
    assert build(ledger)["new_devices"]["calibration_error"] == pytest.approx(0.3)


def test_pooled_before_is_reported_only_of_the_same_devices(ledger: Ledger) -> None:
    fill(ledger)
    data = build(ledger, {"a": {"before": POOR}, "b": {"before": POOR}, "n": {"before": POOR, "fine_tuned": FAIR}})
    assert data["evaluated"]["before"]["accuracy"] == pytest.approx(0.8)
    assert "fine_tuned" not in data["evaluated"]
    assert data["new_devices"]["fine_tuned"]["accuracy"] == pytest.approx(0.9)
    assert "fine_tuned" not in data["personalization"][0]


def test_a_figure_that_was_not_taken_is_an_absent_key(ledger: Ledger) -> None:
    fill(ledger, energy=False, evaluated=False)
    data = build(ledger)
    assert not {"evaluated", "new_devices"} & data.keys()
    assert data["personalization"] == []
    assert all(not {"energy_j", "wire_bytes", "accuracy", "macro_f1"} & r.keys() for r in data["rounds"])
    assert not {"energy_j", "wire_bytes"} & data["totals"].keys()
    assert data["config"] == {"rounds": 3, "data": None}


def test_the_bytes_of_the_round_in_flight_are_in_the_totals(ledger: Ledger) -> None:
    fill(ledger)
    assert build(ledger)["totals"]["payload_bytes"] == {"up": 600, "down": 1200}


def test_an_empty_ledger_gives_a_valid_result(ledger: Ledger) -> None:
    data = build(ledger)
    assert (data["devices"], data["rounds"], data["personalization"]) == (0, [], [])


@pytest.mark.parametrize("within", [range(0), range(1), range(1, 2), range(2, 9), range(5)])
def test_figures_of_some_rounds_are_those_of_the_whole(ledger: Ledger, within: range) -> None:
    fill(ledger)
    whole = result.round_figures(ledger)
    assert [figures.round for figures in whole] == [1, 2]
    assert result.round_figures(ledger, within) == tuple(figures for figures in whole if figures.round in within)


def test_what_is_asked_of_some_rounds_leaves_out_all_others(ledger: Ledger) -> None:
    fill(ledger)
    ledger.put(Update(round=1, device="n", update_id="n", received_at=1.0))
    only = range(2, 3)
    for sums in (ledger.volume("round", only), ledger.joules("round", only), ledger.flops(only)):
        assert sums.keys() == {2}
    for rows in (ledger.rounds(within=only), ledger.rounds("closed", only), ledger.rows(Evaluation, only)):
        assert {row.round for row in rows} == {2}
    assert ledger.joules(within=only)[None].missing is None
    assert ledger.joules(within=range(1, 2))[None].missing == 1
    assert ledger.rows(Update, only, status="refused") == ledger.rows(Update, status="refused")


def test_the_newest_round_is_that_of_the_last_row_that_fits(ledger: Ledger) -> None:
    assert ledger.newest(Round) is None
    fill(ledger)
    assert (ledger.newest(Round), ledger.newest(Round, status="closed")) == (3, 2)
    assert (ledger.newest(Update, status="refused"), ledger.newest(Evaluation, new=True, stage="before")) == (2, None)


def long_run(ledger: Ledger, rounds: int, evaluated: int) -> None:
    """The ledger that ``fill`` makes, with more closed rounds, of which ``evaluated`` was evaluated too."""
    fill(ledger)
    for number in range(3, rounds + 1):
        ledger.put(
            Round(round=number, opened_at=number, status="closed", seconds=number),
            Update(round=number, device="a", update_id="a", received_at=1.0),
            Energy(round=number, device="a", phase="train", joules=number, source="RAPL", measured=True),
        )
    row = result.evaluation(evaluated, "a", "after", "pfldyn-proto", FAIR)
    assert row is not None
    ledger.put(row)


def shown(now: Snapshot) -> str:
    stream = io.StringIO()
    Console(file=stream, width=150).print(LiveView(30, io.StringIO()).table(now))
    return stream.getvalue()


@pytest.mark.parametrize(("rounds", "evaluated"), [(3, 2), (7, 7), (20, 4), (20, 17)])
@pytest.mark.parametrize("told", [0, 3, 20])
def test_a_view_of_the_newest_rounds_shows_what_one_of_all_rounds_does(
    ledger: Ledger, rounds: int, evaluated: int, told: int
) -> None:
    long_run(ledger, rounds, evaluated)
    every, newest = snapshot(ledger), snapshot(ledger, told)
    assert [figures.round for figures in every.rounds] == list(range(1, rounds + 1))
    assert len(newest.rounds) <= max(rounds - told, RECENT_ROUNDS) + 1
    assert shown(newest) == shown(every)
    assert [f for f in newest.rounds if f.round > told] == [f for f in every.rounds if f.round > told]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_view_asks_for_no_round_twice(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    long_run(ledger, 20, 17)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    with LiveView(30, stream, settle_s=0) as view:
        assert view.told == -1
        view.update(snapshot(ledger, view.told))
        assert view.told == 20
        assert len(snapshot(ledger, view.told).rounds) == RECENT_ROUNDS


def test_the_environment_names_neither_the_machine_nor_its_user() -> None:
    text = json.dumps(result.environment())
    assert result.environment().keys() == {"python", "platform", "packages", "cpu_count"}
    assert socket.gethostname() not in text
    assert getpass.getuser() not in text
    assert "/" not in text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 2}, "format: 2 is over the limit"),
        ({"seed": None}, "seed"),
        ({"sead": 1}, "did you mean 'seed'"),
        ({"evaluated": {"accuracy": 1.5, "macro_f1": 0.5}}, "evaluated.accuracy: 1.5 is over"),
        ({"evaluated": {"accuracy": float("nan"), "macro_f1": 0.5}}, "evaluated.accuracy: expected a finite number"),
        ({"totals": {"energy_j": None}}, "totals.energy_j: leave out the key"),
        ({"rounds": [{"round": 1}]}, "rounds[0].participants: missing"),
        ({"rounds": "many"}, "rounds: expected a list"),
    ],
)
def test_what_is_wrong_with_a_result_is_named(ledger: Ledger, change: dict[str, Any], problem: str) -> None:
    problems = result.validate({**build(ledger), **change})
    assert any(problem in found for found in problems), problems


@pytest.mark.parametrize("data", [None, [], {}, "text", {"format": 1}])
def test_what_is_no_result_is_refused(data: Any) -> None:
    assert result.validate(data)
    with pytest.raises(DataError, match=r"not a valid result\.json"):
        result.parse(data)


def test_the_former_name_of_a_figure_is_read(ledger: Ledger) -> None:
    pooled = {"accuracy": 0.5, "macro_f1": 0.25, "method": "pfldyn-proto"}
    found = result.parse({**build(ledger), "judged": pooled})
    assert found.evaluated == result.parse({**build(ledger), "evaluated": pooled}).evaluated is not None


def test_keys_of_a_newer_program_are_ignored_when_reading(ledger: Ledger) -> None:
    assert result.parse({**build(ledger), "carbon": 3}).seed == 7
