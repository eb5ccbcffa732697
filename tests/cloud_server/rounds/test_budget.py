"""The limits of [budget]: the fleet's end a run, a device's end its day, a target ends both; without them nothing
changes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloud_server.devices import fleet_status
from cloud_server.devices.devices import _status, facts_of
from cloud_server.ledger.ledger_tables import Energy, Evaluation, Round, Traffic
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.fleet_settings import BudgetSection
from cloud_server.rounds import budget
from cloud_server.rounds.budget import DAY_S, resting
from fleet_core.base.errors import ConfigError
from fleet_core.protocol import cohort
from tests.support.inprocess import World, config_text, toy, world

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

ROUNDS = 6

Make = Callable[..., World]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Make]:
    made: list[World] = []

    def make(budget: str, *, devices: int = 3, tariff: str = "", more: str = "") -> World:
        text = config_text(rounds=ROUNDS, devices=1, fleet=more).replace(f"serve_every = {ROUNDS}", "serve_every = 2")
        w = world(tmp_path, text)
        path = w.fleet.folder / "fleet.toml"
        path.write_text(path.read_text() + f"\n{budget}\n")
        if tariff:
            (w.fleet.folder / "tariff.toml").write_text(f'currency = "EUR"\nsource = "a test"\n{tariff}\n')
        made.append(w)
        w.start_server()
        for n in range(devices):
            w.start_agent(f"d{n}", toy(n, shift=float(n)))
        return w

    yield make
    for w in made:
        w.close()


def used(w: World, name: str | None = None) -> int:
    """MQTT bytes, the largest counter in one process."""
    volume = w.server.ledger.volume("device" if name else None)[name]
    return int(volume.mqtt.up + volume.mqtt.down)


def cohorts(w: World) -> list[tuple[str, ...]]:
    return [row.cohort for row in w.server.ledger.rows(Round)]


# The fleet ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_spent_budget_ends_the_run_serves_what_was_learned_and_stays_so(fleet: Make) -> None:
    w = fleet("[budget]\nbytes = 30_000")
    assert w.pump(lambda: w.server.finished)
    closed = w.closed()
    assert 0 < closed < ROUNDS
    assert used(w) >= 30_000
    assert w.logged(f"the fleet's budget is spent: {w.server.ended.split(': ')[1].split(';')[0]}")
    assert w.logged(f"no round opens after round {closed}; [budget] in fleet.toml has the limit")
    assert w.pump(lambda: len(w.server.ledger.rows(Evaluation, round=closed, stage="after")) == 3)
    assert w.server.served_round == closed
    assert "spent" in "\n".join(fleet_status.lines(fleet_status.facts(w.fleet, w.server.ledger), w.fleet.folder))
    w.kill_server()
    w.start_server()
    assert w.pump(lambda: w.server.finished)
    assert not w.pump(lambda: w.closed() > closed, steps=200)


@pytest.mark.slow
def test_a_raised_budget_goes_on(fleet: Make) -> None:
    w = fleet("[budget]\nbytes = 30_000")
    assert w.pump(lambda: w.server.finished)
    path = w.fleet.folder / "fleet.toml"
    w.kill_server()
    path.write_text(path.read_text().replace("30_000", "1e9"))
    w.start_server()
    assert w.pump(lambda: w.closed() == ROUNDS)
    assert w.server.ended == ""
    assert w.server.ledger.fact("ended") in ("", None)


def test_money_and_joules_end_a_run_as_bytes_do(fleet: Make) -> None:
    w = fleet("[budget]\nmoney = 0.03", tariff="per_mb = 1")
    assert w.pump(lambda: w.server.finished)
    assert "EUR of 0.03 EUR" in w.server.ended
    assert used(w) >= 30_000


@pytest.mark.slow
def test_joules_that_nobody_reports_are_not_kept_and_that_is_said(fleet: Make) -> None:
    w = fleet("[budget]\njoules = 1")
    assert w.pump(lambda: w.closed() == ROUNDS)
    assert sum("warning: budget.joules cannot be enforced" in line for line in w.lines) == 1
    w.server.ledger.put(Energy(round=ROUNDS, device="d0", phase="train", joules=2.0, source="x", measured=True))
    w.server._parts.budget._looked = None
    assert w.server._parts.budget.over(ROUNDS)
    assert "2.00 J of 1.00 J" in w.server.ended


def test_a_run_stops_at_its_target_and_keeps_the_model_that_reached_it(fleet: Make) -> None:
    w = fleet("[budget]\ntarget_accuracy = 0.5")
    assert w.pump(lambda: w.server.finished)
    assert 2 <= w.closed() < ROUNDS
    assert w.server.served_round == 2
    assert "the target is reached: accuracy" in w.server.ended
    assert "after round 2" in w.server.ended


def test_a_target_is_not_taken_from_the_reports_of_a_few_devices(fleet: Make) -> None:
    w = fleet("[budget]\ntarget_accuracy = 0.9")
    assert w.pump(lambda: w.closed() >= 1)
    perfect = Evaluation(round=1, device="d0", stage="after", method="m", confusion=((1,),), accuracy=1.0, macro_f1=1.0)
    w.server.ledger.put(perfect)
    w.server._parts.budget.evaluated(1)
    assert w.server.ledger.fact("reached") is None
    for name in ("d1", "d2"):
        w.server.ledger.put(replace(perfect, device=name, accuracy=0.85))
    w.server._parts.budget.evaluated(1)
    assert json.loads(w.server.ledger.fact("reached")) == [1, pytest.approx(0.9)]


@pytest.mark.slow
def test_a_run_stops_after_as_many_evaluations_without_a_gain_as_it_is_patient_for(fleet: Make) -> None:
    w = fleet("[budget]\npatience = 1\nmin_gain = 1")
    assert w.pump(lambda: w.server.finished)
    assert 4 <= w.closed() < ROUNDS
    assert "a longer run does not pay: 1 evaluation without a gain over accuracy" in w.server.ended
    assert "after round 2;" in w.server.ended
    path = w.fleet.folder / "fleet.toml"
    w.kill_server()
    path.write_text(path.read_text().replace("patience = 1", "patience = 9"))
    w.start_server()
    assert w.pump(lambda: w.closed() == ROUNDS)


@pytest.mark.parametrize(("accuracies", "ends"), [
    ((), None), ((0.5,), None), ((0.5, 0.5), None), ((0.5, 0.51, 0.5), (1, 0.5)), ((0.5, 0.51, 0.53), None),
    ((0.5, 0.53, 0.4, 0.54), (2, 0.53)), ((0.5, 0.5, 0.5, 0.6), None),
])
def test_a_gain_is_more_than_the_least_gain_over_the_best_before(
    accuracies: tuple[float, ...], ends: tuple[int, float] | None
) -> None:
    section = BudgetSection(patience=2, min_gain=0.02)
    assert budget._flat(list(enumerate(accuracies, 1)), section) == ends


# A device's day -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_device_that_has_used_its_share_is_not_asked_until_the_next_day(fleet: Make) -> None:
    w = fleet("[budget.device_day]\nbytes = 100_000")
    budget = w.server._parts.budget
    assert w.pump(lambda: w.closed() >= 1)
    w.server.ledger.put(Traffic(round=1, device="d0", direction="down", kind="link", mqtt_bytes=200_000))
    budget._looked = None
    before = len(cohorts(w))
    assert w.pump(lambda: w.closed() >= 4)
    assert all("d0" not in names for names in cohorts(w)[before + 1 :]), cohorts(w)
    assert w.logged("d0 is not asked until 00:00 UTC, its share of the day is used up: 2")
    shown = resting(w.server.ledger, w.clock.wall())
    assert list(shown) == ["d0"]
    assert resting(w.server.ledger, w.clock.wall() + DAY_S) == {}
    w.clock.seconds += DAY_S
    for name, agent in w.agents.items():
        w.server._members.heard(name)
        assert agent.link.connected
    w.server._parts.budget._looked = None
    assert w.pump(lambda: w.closed() == ROUNDS)
    assert "d0" in cohorts(w)[-1]


def test_devices_show_and_status_say_who_is_not_asked_today(fleet: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    w = fleet("[budget.device_day]\nbytes = 1")
    assert w.pump(lambda: len(w.server._members.resting) == 3)
    assert w.pump(lambda: bool(w.server.ledger.fact("resting")))
    monkeypatch.setattr(time, "time", w.clock.wall)
    device = w.server.ledger.device("d0")
    facts = facts_of(w.server.ledger, [device])[0]
    assert facts["resting"].endswith("of 1 B")
    assert _status(facts) == "enrolled, not asked today"
    text = "\n".join(fleet_status.lines(fleet_status.facts(w.fleet, w.server.ledger), w.fleet.folder))
    assert "d1 is not asked until 00:00 UTC" in text
    closed = w.closed()
    assert not w.pump(lambda: w.closed() > closed, steps=200)


@pytest.mark.slow
def test_the_cohort_is_the_seeded_draw_among_those_that_have_a_share_left(fleet: Make) -> None:
    w = fleet("[budget.device_day]\nbytes = 1e9", devices=4, more="cohort = 2")
    assert w.pump(lambda: w.closed() >= 1)
    w.server.ledger.put(Traffic(round=1, device="d3", direction="down", kind="link", mqtt_bytes=10**9))
    w.server._parts.budget._looked = None
    before = len(cohorts(w))
    assert w.pump(lambda: w.closed() == ROUNDS)
    for number, names in enumerate(cohorts(w)[before + 1 :], start=before + 2):
        assert list(names) == cohort.select(0, number, ["d0", "d1", "d2"], 2)


def test_a_large_cohort_is_named_when_the_rule_would_ask_a_device_that_rests() -> None:
    names = [f"d{n}" for n in range(100)]
    chosen = cohort.select(0, 1, names[1:], 80)
    left_out = max(names, key=lambda name: cohort.rank(0, 1, name))
    assert cohort.announce(0, 1, chosen).rule == "rank"
    lowest = min(names, key=lambda name: cohort.rank(0, 1, name))
    without = [name for name in chosen if name != lowest]
    told = cohort.announce(0, 1, without, [lowest])
    assert told.devices == tuple(without)
    assert not cohort.includes(told, 1, lowest)
    assert cohort.announce(0, 1, chosen, [left_out]).rule == "rank", "its rank is above the rule's limit"


# Settings -------------------------------------------------------------------------------------------------------------


def test_a_limit_of_money_needs_prices(fleet: Make, tmp_path: Path) -> None:
    w = fleet("")
    path = w.fleet.folder / "fleet.toml"
    path.write_text(path.read_text() + "\n[budget.device_day]\nmoney = 1\n")
    with pytest.raises(ConfigError, match=r"budget\.device_day\.money: needs prices: per_mb or per_kwh"):
        Fleet.load(w.fleet.folder)
    (w.fleet.folder / "tariff.toml").write_text('currency = "EUR"\nsource = "x"\nmonthly_fee = 1\n')
    with pytest.raises(ConfigError, match="needs prices"):
        Fleet.load(w.fleet.folder)
    (w.fleet.folder / "tariff.toml").write_text('currency = "EUR"\nsource = "x"\nper_kwh = 1\n')
    loaded: Any = Fleet.load(w.fleet.folder).config.budget
    assert loaded.device_day.money == 1


def test_limits_of_nothing_and_unknown_ones_are_refused(fleet: Make) -> None:
    w = fleet("")
    path = w.fleet.folder / "fleet.toml"
    path.write_text(path.read_text() + "\n[budget]\nbytes = 0\njuoles = 3\n")
    with pytest.raises(ConfigError) as raised:
        Fleet.load(w.fleet.folder)
    assert "budget.bytes: 0 must be above 0" in str(raised.value)
    assert "did you mean 'joules'?" in str(raised.value)


@pytest.mark.slow
def test_without_the_table_no_facts_are_written(fleet: Make) -> None:
    w = fleet("")
    assert w.pump(lambda: w.closed() == ROUNDS)
    assert not {"ended", "resting", "reached"} & w.server.ledger.facts().keys()
